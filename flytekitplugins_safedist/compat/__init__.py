"""Private names of torch, flytekit and Horovod: each is looked up in one place, by an error that names the versions.

What is private upstream may go in any release. Where we cannot do without such a name it stands in :mod:`.flytekit`,
:mod:`.torch` or :mod:`.horovod`, and nowhere else; that it is gone is said at once, never passed over: a checkpoint or
metadata that silently is not there costs more than a job that does not start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import metadata
from typing import Any

from ..errors import IncompatibleVersionError

TESTED: dict[str, tuple[str, ...]] = {
    "flytekit": ("1.16.0", "1.16.31"),
    "torch": ("2.5.0", "2.8.0", "2.13.0", "2.14.1", "2.15.0"),
    "horovod": ("0.28.1",),
}
"""The versions with which this project's tests have run: docs/versions.md says which of the tests."""


def lookup(holder: Any, name: str, *, of: str) -> Any:
    """``holder.name``.

    Args:
        holder: a module, class or object of the library.
        name: its attribute.
        of: the library: a key of :data:`TESTED`.

    Raises:
        IncompatibleVersionError: the installed version has no such name.
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        raise gone(f"{getattr(holder, '__name__', type(holder).__qualname__)}.{name}", of=of) from None


def gone(what: str, *, of: str) -> IncompatibleVersionError:
    """The error for something private of a library that is not there, or not as it was."""
    try:
        seen = f"{of} {metadata.version(of)}"
    except metadata.PackageNotFoundError:
        seen = f"{of} of an unknown version"
    text = f"{of} no longer has something that safedist relies on"
    tested = f"{of} {', '.join(TESTED[of])} (tested)"
    hint = f"install a version of {of} that was tested, or a newer safedist"
    return IncompatibleVersionError(text, where={"name": what}, seen=seen, expected=tested, hint=hint)


def before_threads_end(action: Callable[[], object]) -> None:
    """Have ``action`` called as Python ends, before it ends the threads of ``concurrent.futures``, with which a store's
    client resolves names. Python's own way, which it has no public name for; without it such a save may fail. Not in a
    process that is forked from this one, where no thread does what ``action`` may wait for."""
    register, pid = getattr(threading, "_register_atexit", None), os.getpid()
    if register is not None:
        register(lambda: action() if os.getpid() == pid else None)
