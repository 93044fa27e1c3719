"""What modules do as they are imported that must not be done once for all ranks, who does it, and what is known of it.

One that starts threads is told by a variable not to. One that keeps what only a rank has (its number, its directories)
is allowed to, and each rank puts right what it kept, at once after the fork. What is not in the table makes ranks fresh
interpreters.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from .. import envvars


def _local_rank(module: ModuleType) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def _rank(module: ModuleType) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _dynamos_cache(module: ModuleType) -> None:
    if hasattr(module, "DynamoCache"):  # since 2.9
        module.DynamoCache.path_prefix = os.path.join(module.cache_dir(), "dynamo")  # noqa: PTH118  (as torch has it)


def _numbas_cache(module: ModuleType) -> None:
    module.reload_config()


VARIABLES: dict[str, str] = {
    # OpenBLAS starts its threads when it is loaded, unless it has just one. Ranks get their own number back
    # (preload.refresh).
    "OPENBLAS_NUM_THREADS": "1",
    # torch.cuda.is_available() then asks NVML instead of initialising the driver, which no fork survives
    # (torch/cuda/__init__.py: is_available).
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # pyarrow's jemalloc has a thread give memory back, and does without where it may not. pandas, datasets,
    # transformers' Trainer and torch._dynamo import it, where it is installed.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Under which the preloading process imports; ranks have their own word again."""

FACTS: dict[str, Callable[[ModuleType], object]] = {
    # Code that torch has compiled and keeps, since 2.9: in the rank's own TORCHINDUCTOR_CACHE_DIR.
    "torch._dynamo.package": _dynamos_cache,
    "torchmetrics.utilities.prints": _local_rank,
    # Lightning's, after torchmetrics': as in a fresh interpreter, each has its own, and its strategies set both.
    "lightning.fabric.utilities.rank_zero": _rank,
    "lightning_fabric.utilities.rank_zero": _rank,
    # Reads NUMBA_CACHE_DIR when it is imported.
    "numba.core.config": _numbas_cache,
}
"""Modules that keep what only a rank has, each with what evaluates that again, in the process in which it is called."""


def keeps(reader: FrameType) -> str | None:
    """The module that reads in this frame, or in one that called it, what each rank will read again; None for others,
    and for what such a module reads later, when it is called by somebody else."""
    module = reader.f_globals.get("__name__")
    frame: FrameType | None = reader
    while module in FACTS and frame is not None and frame.f_globals.get("__name__") == module:
        if frame.f_code.co_name == "<module>":
            return str(module)
        frame = frame.f_back
    return None


def put_right() -> None:
    """In a rank, whose variables are set: evaluate what modules have kept of another process's. In the preloading
    process: find out whether that can be done with the versions which are here.

    Raises:
        Exception: whatever a version of a library that is not known says.
    """
    for name, evaluate in FACTS.items():
        if name in sys.modules:
            evaluate(sys.modules[name])


# --- watching an import: whose code it is, the user's, or a library's that it brings ----------------------------------
@contextlib.contextmanager
def identity_withheld(package: str) -> Iterator[list[str]]:
    """Take a rank's variables out of the environment, and note who asks for them: ``LOCAL_RANK (in users, line 3)``.

    What a module keeps of them would be one value for all ranks: a default, or the operator's index of the pod. Known
    modules may: each rank evaluates it again.

    Args:
        package: whose code may not go through all variables either; libraries do, for those that they know by a prefix.
    """
    reads: list[str] = []
    held = {name: os.environ.pop(name) for name in envvars.IDENTITY if name in os.environ}

    def note(what: str) -> None:
        reader = _reader()
        text = f"{what} ({_place(reader)})"
        if text not in reads and not keeps(reader):
            reads.append(text)

    def one(encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def encodekey(key: Any) -> Any:
            name = os.fsdecode(key) if isinstance(key, (str, bytes)) else ""
            if name in envvars.IDENTITY:
                note(name)
            return encode(key)

        return encodekey

    def each(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def decodekey(key: Any) -> Any:
            if str(_reader().f_globals.get("__name__")).partition(".")[0] == package:
                note("all variables")
            return decode(key)

        return decodekey

    # What each way to read a variable goes through (os._Environ): [], get, in, os.getenv, iteration; also with bytes.
    kept = [(environ, environ.encodekey, environ.decodekey) for environ in (os.environ, os.environb)]
    for environ, encode, decode in kept:
        environ.encodekey, environ.decodekey = one(encode), each(decode)
    try:
        yield reads
    finally:
        for environ, encode, decode in kept:
            environ.encodekey, environ.decodekey = encode, decode
        os.environ.update(held)


def _reader() -> FrameType:
    """Who reads os.environ: the first frame outside the mapping's own code and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", __name__):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    return f"in {frame.f_globals.get('__name__')}, line {frame.f_lineno}"


_LOAD = "_load_unlocked"
"""Of importlib; a Python that calls it otherwise traces nothing."""


@contextlib.contextmanager
def threads_traced() -> Iterator[list[ModuleSpec]]:
    """Note the modules during whose own import the process got more threads: the innermost one first.

    Python loads every module through one function of its own; where that has another name, nothing is noted.
    """
    noted: list[ModuleSpec] = []
    importing: Any = sys.modules["_frozen_importlib"]
    original = getattr(importing, _LOAD, None)

    def load(spec: ModuleSpec) -> Any:
        before = _threads()
        try:
            return original(spec)  # type: ignore[misc]
        finally:
            if _threads() > before:
                noted.append(spec)

    if original is not None:
        importing._load_unlocked = load
    try:
        yield noted
    finally:
        if original is not None:
            importing._load_unlocked = original


def _threads() -> int:
    return os.stat("/proc/self/task").st_nlink  # noqa: PTH116  (twice for each module that is imported)
