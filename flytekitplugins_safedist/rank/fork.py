"""A rank that was forked is as a fresh interpreter that has imported the same libraries.

No code of the user's has run before the fork, so only what libraries keep of their process is to be put right
(:func:`as_fresh`). Once the rank's module is imported, what libraries have read of the environment is compared with
what the rank's own variables say (:class:`Reads`), and where they are with where the rank's own path has them
(:func:`elsewhere`). Where these differ, the rank becomes a fresh interpreter indeed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing.process
import multiprocessing.util
import operator
import os
import random
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from types import FrameType, ModuleType
from typing import Any

from .. import envvars, package
from ..compat import flytekit as flytekit_inside
from ..config.caches import CACHES

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent (the thread of it that started us) ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


# --- what libraries keep of the process that has imported them --------------------------------------------------------
def _local_rank(module: ModuleType) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def _rank(module: ModuleType) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _dynamos_cache(module: ModuleType) -> None:
    if hasattr(module, "DynamoCache"):  # since 2.9
        module.DynamoCache.path_prefix = os.path.join(module.cache_dir(), "dynamo")  # noqa: PTH118  (as torch has it)


KEPT: dict[str, Callable[[ModuleType], object]] = {
    # Code that torch has compiled and keeps, since 2.9: in the rank's own TORCHINDUCTOR_CACHE_DIR.
    "torch._dynamo.package": _dynamos_cache,
    "torchmetrics.utilities.prints": _local_rank,
    # Lightning's, after torchmetrics': as in a fresh interpreter, each has its own, and its strategies set both.
    "lightning.fabric.utilities.rank_zero": _rank,
    "lightning_fabric.utilities.rank_zero": _rank,
    # How many threads it starts when they are needed; pandas imports it, where it is installed.
    "numexpr.utils": operator.methodcaller("_init_num_threads"),
    # All that it reads.
    "numba.core.config": operator.methodcaller("reload_config"),
}
"""Modules that keep what they read as they are imported, each with what evaluates that again in this process. Only what
a test needs stands here: every other module makes ranks fresh interpreters."""


def as_fresh(environment: Mapping[str, str], draws: Draws) -> str | None:
    """Have this process, just forked, keep nothing of its parent's: no generator, loop or temporary directory.

    Args:
        environment: the rank's own variables, which are in place.
        draws: of the libraries that were imported.

    Returns:
        Why that cannot be, or None.
    """
    _end_as_fresh()
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    own = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    own.pop("tempdir", None)
    own["authkey"] = multiprocessing.process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]
    tempfile.tempdir = None  # computed once, and kept
    _no_event_loop()
    _draw_anew()
    draws.anew()
    _threads_of(environment)
    for name, evaluate in KEPT.items():
        if name in sys.modules:
            try:
                evaluate(sys.modules[name])
            except Exception as error:  # a version of a library that has it otherwise
                return f"what {name} keeps of its process cannot be put right: {type(error).__name__}: {error}"
    return None


def _end_as_fresh() -> None:
    """What libraries have registered for an interpreter's end is done at this one's (a tracker ends its run, say), but
    for what removes what all ranks have together."""
    for removes in (shutil.rmtree, os.remove, os.unlink, os.rmdir, os.removedirs):
        atexit.unregister(removes)
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # a temporary directory's, say
        each.atexit = False


def _no_event_loop() -> None:
    """Two ranks that share a loop's sockets wake each other, and one of them waits for ever. From Python 3.12 on this
    is done in every child."""
    module: Any = sys.modules.get("asyncio.events")
    if module is None or sys.version_info >= (3, 12):
        return
    module._set_running_loop(None)
    policy = module._event_loop_policy
    if policy is not None:
        policy._local = type(policy)._Local()


def _draw_anew() -> None:
    """Python itself seeds ``random`` anew in each child; what else there is by now does not."""
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None:
        numpy.seed()  # type: ignore[attr-defined, unused-ignore]
    if torch is not None:
        torch.default_generator.seed()
    flytekit_inside.draw_names_anew()


class Draws:
    """The generators of random numbers that libraries have made as they were imported, and left to the system to seed.
    Those that they have seeded are in every process as they are."""

    def __init__(self) -> None:
        self._of_python: dict[int, random.Random] = {}
        self._entropy: set[int] = set()
        self._of_numpy: list[Any] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, note all that is drawn from the system for a generator."""
        numpy: Any = sys.modules.get("numpy.random.bit_generator")
        randbits: Any = getattr(numpy, "randbits", None)
        seed = random.Random.seed

        def seeded(generator: random.Random, a: Any = None, *version: Any, **named: Any) -> None:
            seed(generator, a, *version, **named)
            self._of_python.pop(id(generator), None)
            if a is None:
                self._of_python[id(generator)] = generator

        def drawn(bits: int) -> Any:
            entropy = randbits(bits)
            self._entropy.add(entropy)
            return entropy

        random.Random.seed = seeded  # type: ignore[method-assign, assignment]
        if randbits is not None:
            numpy.randbits = drawn
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
            if randbits is not None:
                numpy.randbits = randbits

    def find(self) -> None:
        """Find numpy's generators that were made by what it has drawn, among all objects that there are."""
        if self._entropy:
            kind = sys.modules["numpy.random.bit_generator"].BitGenerator
            found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
            self._of_numpy += [each for each in found if getattr(each.seed_seq, "entropy", None) in self._entropy]
            self._entropy.clear()

    def anew(self) -> None:
        """Seed all of them anew, in a process that was forked."""
        for generator in self._of_python.values():
            generator.seed()
        for each in self._of_numpy:
            each.state = type(each)().state


def _threads_of(environment: Mapping[str, str]) -> None:
    """Give OpenMP and the BLAS libraries, which were loaded with one thread each, as many as they would have had."""
    threads = {library: threads_by(environment, names) for library, names in _NUMBERS.items()}
    if set(threads.values()) != {1}:  # with one, the libraries are as they were loaded
        own = dict(os.environ)
        import threadpoolctl

        for name in os.environ.keys() - own:  # it sets KMP_DUPLICATE_LIB_OK as it is imported
            del os.environ[name]
        loaded = threadpoolctl.ThreadpoolController()
        for library, number in threads.items():
            named = {"user_api": library} if library == "openmp" else {"internal_api": library}
            loaded.select(**named).limit(limits=number)


_NUMBERS = {
    "openmp": ("OMP_NUM_THREADS",),
    "openblas": ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"),  # in OpenBLAS's own order
    "mkl": ("MKL_NUM_THREADS", "OMP_NUM_THREADS"),
}
"""By what each goes, as threadpoolctl names it."""


def threads_by(environment: Mapping[str, str], names: Sequence[str]) -> int:
    """How many threads a library would have that goes by these variables, in this order."""
    for name in names:
        # OpenMP takes a list, one number for each level of nesting; and what is no number of threads is as if unset.
        with contextlib.suppress(KeyError, ValueError):
            if (threads := int(environment[name].partition(",")[0])) > 0:
                return threads
    return len(os.sched_getaffinity(0))


# --- where libraries are ----------------------------------------------------------------------------------------------
def elsewhere(names: Collection[str], path: Sequence[str]) -> str | None:
    """Which of these modules, imported here, are somebody else's by that module search path; None where none is."""
    importlib.invalidate_caches()  # a directory may have come since it was looked for
    theirs = {name: getattr(sys.modules.get(name), "__spec__", None) for name in names if name != package.NAME}
    other = sorted(name for name, spec in theirs.items() if is_elsewhere(spec, path))
    if not other:
        return None
    return f"modules of the task's are named as libraries that are imported already: {', '.join(other)}"


def is_elsewhere(spec: ModuleSpec | None, path: Sequence[str]) -> bool:
    """Whether a module search path has another module of the name of one that is imported."""
    found = None if spec is None else PathFinder.find_spec(spec.name, list(path))
    if spec is None or found is None or not found.has_location:  # by a finder of its own, or a namespace, as is its way
        return False
    return places_of(found) != places_of(spec)


def places_of(spec: ModuleSpec) -> list[str]:
    """The directories that a module is in, or those of a namespace."""
    if spec.has_location and spec.origin is not None:
        return [os.path.realpath(os.path.dirname(spec.origin))]  # noqa: PTH120  (for thousands of them)
    return list(spec.submodule_search_locations or ["nowhere"])


# --- what libraries read of the environment as they are imported ------------------------------------------------------
UNDER: dict[str, str] = {
    # OpenMP and OpenBLAS start their threads when they are loaded, unless they have just one. Ranks get their own
    # number back.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # torch.cuda.is_available() then asks NVML instead of initialising the driver, which no fork survives
    # (torch/cuda/__init__.py: is_available).
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # pyarrow's jemalloc has a thread give memory back, and does without where it may not. pandas, datasets,
    # transformers' Trainer and torch._dynamo import it, where it is installed.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Under which libraries are imported; ranks have their own word again."""

_OWN = {"os", "collections.abc", "_collections_abc", __name__}
_EACH_RANKS_OWN = frozenset(
    {envvars.TMPDIR, "TEMP", "TMP", "PYTORCH_NVML_BASED_CUDA_CHECK", *(cache.variable for cache in CACHES)}
)
"""Other in each rank than where libraries are imported; what is kept of these is put right above."""

_READ_BELOW_PYTHON = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "TORCH_", "PYTORCH_", "ATEN_")
"""Beginnings of variables that native libraries read as they are loaded, which nobody can see."""
_READ_LATER = ("TORCH_NCCL_", *_EACH_RANKS_OWN)


Sets = Mapping[str, tuple[str | None, str]]
"""Variables that libraries have set as they were imported: what each was before, and what it is since."""


def add_sets(environment: Mapping[str, str], sets: Sets) -> dict[str, str]:
    """What a process with these variables has once libraries were imported. A library may have made its value of the
    one before (``os.environ["PATH"] = mine + os.environ["PATH"]``): one that is another here stays as it is."""
    new = {name: value for name, (before, value) in sets.items() if environment.get(name, before) == before}
    return {**environment, **new}


class Reads:
    """What was read while libraries were imported.

    Attributes:
        draws: of random numbers.
    """

    def __init__(self) -> None:
        self.draws = Draws()
        self._names: frozenset[str] = frozenset()
        self._last: str | None = None
        self._read: dict[str, tuple[str | None, str]] = {}
        """Of a variable: its value as it was read first, and by which module."""
        self._families: dict[str, tuple[str, dict[str, str]]] = {}
        """Of a module that goes through all variables: those that begin with its package's name, and its own name."""
        self._walks: set[tuple[Any, int]] = set()

    def top_names(self) -> frozenset[str]:
        """Of all that this process has imported beside Python itself. Looks at what has come since it was last asked:
        thousands of names lie all over the memory that a forked process has in common with its parent, and to look at
        one is to copy its page."""
        new = list(takewhile(partial(operator.ne, self._last), reversed(sys.modules)))
        self._names |= {name.partition(".")[0] for name in new} - sys.stdlib_module_names
        self._last = new[0] if new else self._last
        return self._names

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, note every variable that is asked for, and what is drawn."""
        kept = [(environ, environ.encodekey, environ.decodekey) for environ in (os.environ, os.environb)]
        before = set(self._families)
        for environ, encode, decode in kept:
            # What each way to read a variable goes through (os._Environ): [], get, in, os.getenv, iteration.
            environ.encodekey, environ.decodekey = self._one(encode), self._each(decode)
        try:
            with self.draws.noted():
                yield
        finally:
            for environ, encode, decode in kept:
                environ.encodekey, environ.decodekey = encode, decode
            for prefix in self._families.keys() - before:
                self._families[prefix] = self._families[prefix][0], _family(os.environ, prefix)

    def _one(self, encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def encodekey(key: Any) -> Any:
            encoded, frame = encode(key), _reader()
            reader = str(frame.f_globals.get("__name__"))
            if reader not in KEPT and (frame.f_code, frame.f_lineno) not in self._walks:
                value = os.environ._data.get(encoded)  # type: ignore[attr-defined]
                text = None if value is None else os.fsdecode(value)
                self._read.setdefault(os.fsdecode(encoded), (text, reader))
            return encoded

        return encodekey

    def _each(self, decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def decodekey(key: Any) -> Any:
            frame = _reader()
            reader = str(frame.f_globals.get("__name__"))
            self._walks.add((frame.f_code, frame.f_lineno))
            if reader not in KEPT:
                self._families.setdefault(f"{reader.partition('.')[0].upper()}_", (reader, {}))
            return decode(key)

        return decodekey

    def sets(self, name: str, value: str | None) -> None:
        """A library has set a variable itself."""
        if name in self._read:
            self._read[name] = value, self._read[name][1]

    def difference(self, before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
        """What a library would have found otherwise, had it been imported by this rank; None where nothing differs.
        With what would spare a second start. Names only: values may be secrets.

        Args:
            before: the rank's variables as it began.
            now: the same, with what its module has set as it was imported.
        """
        for name, (value, reader) in self._read.items():
            if name not in _EACH_RANKS_OWN and now.get(name) != value:
                return (
                    f"{name} has another value here than {reader} found as it was imported for all ranks{_remedy(name)}"
                )
        for prefix, (reader, family) in self._families.items():
            own = _family(now, prefix)
            if own != family:
                names = sorted(name for name in own | family if own.get(name) != family.get(name))
                why = f"other here than {reader} found as it was imported for all ranks"
                return f"{', '.join(names)}: {why}{_remedy(*names)}"
        for name in sorted(before.keys() | now.keys()):
            is_native = name.startswith(_READ_BELOW_PYTHON) and not name.startswith(_READ_LATER)
            if is_native and before.get(name) != now.get(name):
                why = "is set here, and native libraries that may read it were loaded for all ranks"
                return f"{name} {why}{_remedy(name)}"
        return None


def _remedy(*names: str) -> str:
    """What would spare ranks a second start for these variables, of which a task may not say all."""
    is_ours = any(name in UNDER or name in envvars.IDENTITY for name in names)
    advice = 'start_method="spawn"' if is_ours else "@task(environment=...)"
    return f"; {advice} would spare that"


def _family(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(prefix)}


def _reader() -> FrameType:
    """Who reads os.environ: the first frame outside the mapping's own code and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back
    return frame
