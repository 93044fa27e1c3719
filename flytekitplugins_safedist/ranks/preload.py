"""Import modules once for all ranks of a node, and tell whether forking afterwards is safe.

Forking a process that runs threads copies their locks in whatever state they were, and a CUDA context does not survive
a fork at all. So every import is followed by a look at the process: what it started names the module that did it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing.util
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compat import flytekit as flytekit_inside
from ..errors import IncompatibleVersionError
from ..flyte import task_context
from . import known, users_code

GPU_DEVICES: tuple[str, ...] = ("/dev/nvidia", "/dev/kfd")
"""How the paths of the GPU drivers' device files begin."""

_LEAVING_SECONDS = 2.0

_WAY_OUT = "do that in the task's function, or set start_method='spawn' to be told no more"


@dataclass(frozen=True)
class Preloaded:
    """What importing did.

    Attributes:
        unsafe: why ranks must not be forked from here, or None when they may.
        random_state: state of ``random`` where the user's modules seeded it (a seed that ranks keep), else None.
        numpy_seeded: whether the user's modules seeded numpy's; if not, ranks must not share its one sequence.
        at_exit: what they registered for the interpreter's end.
        error: what one of them raised as it was imported, where it would do so again.
    """

    unsafe: str | None
    random_state: Any = None
    numpy_seeded: bool = False
    at_exit: tuple[Callable[[], object], ...] = ()
    error: BaseException | None = None


def preload(libraries: Sequence[str], modules: Sequence[str], late: Sequence[str] = (), mode: str = "") -> Preloaded:
    """Import everything, in order, stopping at the first import that makes forking unsafe.

    Args:
        libraries: torch, the backend, flytekit: imported before the random generators are looked at.
        modules: the user's.
        late: see :func:`with_late`.
        mode: see :func:`..flyte.task_context.importing`.
    """
    reason = import_libraries(libraries)
    if reason is not None:
        return Preloaded(reason)
    imported = import_modules(modules, mode)
    return imported if imported.unsafe is not None else with_late(imported, late)


def import_libraries(names: Sequence[str]) -> str | None:
    """Import them in order, up to the first that makes forking unsafe; why it does, or None."""
    with _collector_resting():
        return next((reason for name in names if (reason := _import(name)[0]) is not None), None)


def import_modules(names: Sequence[str], mode: str) -> Preloaded:
    """Import the user's modules, up to the first that makes forking unsafe; see :func:`preload`."""
    # numpy imports its generators lazily. They must be there before the user's modules, or a seed that one sets could
    # not be told from numpy's own. torch has imported the rest of it anyway.
    with contextlib.suppress(Exception):
        importlib.import_module("numpy.random")
    with task_context.importing(mode), _seeds_noted() as seeded, _exit_handlers_noted() as at_exit:
        for name in names:
            reason, error = _import_alike(name)
            if reason is not None:
                return Preloaded(reason, error=error)
        random_state = random.getstate() if "random" in seeded else None
    return Preloaded(None, random_state, "numpy.random" in seeded, tuple(at_exit))


def with_late(imported: Preloaded, names: Sequence[str]) -> Preloaded:
    """In the process that ranks are forked from: import what the libraries import by themselves when ranks begin their
    work. What cannot be imported is left to that."""
    _forget_exit_handlers(imported.at_exit)
    with _collector_resting():
        for name in names:
            reason, _ = _import_alike(name, needed=False)
            if reason is not None:
                return Preloaded(reason)
    keep()
    return imported


def keep() -> None:
    """Before a fork: what is alive now lives as long as the node. Keep the collector from touching it, so that pages
    stay shared."""
    gc.collect()
    gc.freeze()


def _forget_exit_handlers(users: Sequence[Callable[[], object]]) -> None:
    """Ranks run what modules of the user's have registered, as fresh interpreters would, and before it what
    multiprocessing does at every end. The libraries' are this process's own, which runs none."""
    atexit._clear()
    for handler in (multiprocessing.util._exit_function, *users):  # type: ignore[attr-defined]
        atexit.register(handler)


@contextlib.contextmanager
def _exit_handlers_noted() -> Iterator[list[Callable[[], object]]]:
    """Note what is registered for the interpreter's end, and not taken back."""
    noted: list[Callable[[], object]] = []
    register: Callable[..., Any] = atexit.register
    unregister = atexit.unregister

    def noting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        noted.append(functools.partial(function, *args, **kwargs))
        return register(function, *args, **kwargs)

    def forgetting(function: Callable[..., Any]) -> None:
        noted[:] = [one for one in noted if one.func != function]  # type: ignore[attr-defined]
        unregister(function)

    atexit.register, atexit.unregister = noting, forgetting  # type: ignore[assignment]
    try:
        yield noted
    finally:
        atexit.register, atexit.unregister = register, unregister


@contextlib.contextmanager
def _collector_resting() -> Iterator[None]:
    """Keep Python's collector from looking, hundreds of times, through modules that are there to stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _seeds_noted() -> Iterator[set[str]]:
    """Note by whom a global generator is given a seed or a state: ``random``, ``numpy.random``. One that is only drawn
    from keeps nobody's seed."""
    seeded: set[str] = set()
    kept: list[tuple[Any, str, Any]] = []

    def noting(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seed(*args: Any, **kwargs: Any) -> Any:
            seeded.add(module)
            return function(*args, **kwargs)

        return seed

    for name, functions in (
        ("random", ("seed", "setstate")),
        ("numpy.random", ("seed", "set_state", "set_bit_generator")),
    ):
        module = sys.modules.get(name)
        for function in functions if module is not None else ():
            if not hasattr(module, function):  # numpy before 1.24 has no set_bit_generator
                continue
            kept.append((module, function, getattr(module, function)))
            setattr(module, function, noting(name, getattr(module, function)))
    try:
        yield seeded
    finally:
        for module, function, original in kept:
            setattr(module, function, original)


def refresh(preloaded: Preloaded, environment: Mapping[str, str]) -> None:
    """In a rank just forked: give it the random numbers and the number of threads that a fresh interpreter would have.

    Args:
        preloaded: what :func:`preload` returned, in the process this one was forked from.
        environment: the rank's own variables.
    """
    known.put_right()
    flytekit_inside.draw_names_anew()
    # Python reseeds ``random`` in every forked child; put a module's deliberate seed back.
    if preloaded.random_state is not None:
        random.setstate(preloaded.random_state)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and not preloaded.numpy_seeded:
        numpy_random.seed()  # type: ignore[attr-defined, unused-ignore]
    _limit({"blas": blas_threads(environment), "openmp": _threads_by(environment, ("OMP_NUM_THREADS",))})


def limit_openmp(environment: Mapping[str, str]) -> None:
    """In the preloading process: give OpenMP, where it is loaded already, the number of threads that modules expect
    under ``environment``. Starts none of them."""
    _limit({"openmp": _threads_by(environment, ("OMP_NUM_THREADS",))})


def _limit(threads: dict[str, int]) -> None:
    if set(threads.values()) != {1}:  # with one, the libraries are as they were loaded
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads)


def blas_threads(environment: Mapping[str, str]) -> int:
    """How many threads OpenBLAS would have under ``environment`` (the order of variables is OpenBLAS's own)."""
    return _threads_by(environment, ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"))


def _threads_by(environment: Mapping[str, str], names: Sequence[str]) -> int:
    """How many threads a library would have that goes by these variables, in this order."""
    for name in names:
        # OpenMP takes a list, one number for each level of nesting; and what is no number of threads is as if unset.
        with contextlib.suppress(KeyError, ValueError):
            if (threads := int(environment[name].partition(",")[0])) > 0:
                return threads
    return len(os.sched_getaffinity(0))


def _import_alike(name: str, *, needed: bool = True) -> tuple[str | None, BaseException | None]:
    """Import what must be the same in all ranks; why it is not, or why ranks must not be forked, or None. And what it
    has raised, if it would raise that in a rank, too."""
    with known.identity_withheld(name.partition(".")[0] if needed else "") as reads:
        reason, raised = _import(name, needed=needed)
        noted = "; ".join(reads)
        try:
            known.put_right()
        except Exception as error:  # a version of a library that has it otherwise
            return f"after importing {name}, what a library keeps of a rank cannot be put right: {error!r}", None
    if noted:  # first of all: an import that failed without a rank's variables has failed for this
        return f"importing {name} reads {noted}: only a rank has it, and each its own; {_WAY_OUT}", None
    return reason, raised


def _import(name: str, *, needed: bool = True) -> tuple[str | None, BaseException | None]:
    try:
        with users_code.importing(), known.threads_traced() as noted:
            importlib.import_module(name)
    except BaseException as error:  # a module may even call sys.exit; the preloading process must outlive it
        if needed:
            return f"importing {name} once for all ranks failed with {users_code.why_it_failed(name, error)}", error
    try:
        # A launch plan with default inputs beside the tasks has started one; ended, it is no danger.
        flytekit_inside.stop_event_loops()
    except IncompatibleVersionError as error:
        return f"after importing {name}, flytekit's threads cannot be ended: {error}", None
    by = noted[0] if noted and noted[0].name != name else None
    return unsafe_to_fork(f"importing {name}", f" in {by.name} ({by.origin})" if by is not None else ""), None


def unsafe_to_fork(culprit: str, where: str = "") -> str | None:
    """Why this process must not be forked, or None.

    Args:
        culprit: what was done last, for the message.
        where: in which module of a library, where that is known.
    """
    threads = _threads()
    if threads:
        started = f"{culprit} started {len(threads)} thread(s) ({', '.join(threads)}){where}"
        return f"{started}, and a forked copy of their locks can hang; {_WAY_OUT}"
    torch_cuda = sys.modules.get("torch.cuda")
    if torch_cuda is not None and torch_cuda.is_initialized():
        return f"{culprit} initialised CUDA, which does not survive a fork; {_WAY_OUT}"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith(GPU_DEVICES):
                return f"{culprit} opened the GPU driver, whose state does not survive a fork; {_WAY_OUT}"
    return None


def _threads() -> list[str]:
    """Names of the threads beside this one. One that was joined takes a moment to leave the kernel's list: give it
    that."""
    deadline = time.monotonic() + _LEAVING_SECONDS
    own = threading.get_native_id()
    while True:
        others = {int(task.name) for task in Path("/proc/self/task").iterdir()} - {own}
        if not others or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    return [named.get(thread) or _native_name(thread) for thread in sorted(others)]


def _native_name(thread: int) -> str:
    """What the kernel calls a thread that Python does not know: native code has started it."""
    with contextlib.suppress(OSError):
        return f"native {Path(f'/proc/self/task/{thread}/comm').read_text().strip()!r}"
    return "native, gone by now"
