"""What a module does as it is imported, and whose code it is: the user's, or a library's that it brings."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Any

from .. import envvars
from . import known


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
        if text not in reads and not known.keeps(reader):
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
