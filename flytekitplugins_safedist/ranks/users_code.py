"""Around the user's code: it runs in processes whose end means something to others, and may fork and end them.

An agent that a module ends with status 0 has a pod that looks done, without a verdict; a child that comes back from an
import, or from the task's function, would go on as a second agent, rank server or rank.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import stat
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .. import stopping
from ..errors import LaunchTimeoutError, PayloadError
from ..texts import said
from . import process_tree

_OPEN = Path("/proc/self/fd")
_ABOVE = 1 << 16
_ROOM = 256
"""Copies of what is open have numbers from ``_ABOVE - _ROOM`` on: far above those that a module goes through."""

_FRAMES = 4
"""Of where an import stands: the last ones, below Python's own."""

_FAILED: dict[str, str] = {}
"""By package, the error of its first import in this process."""


def why_it_failed(module: str, error: BaseException) -> str:
    """The error of the first import of that module's package here: what a later one says is of that one's leavings."""
    return _FAILED.setdefault(module.partition(".")[0], f"{type(error).__name__}: {error}")


@contextmanager
def without_children() -> Iterator[None]:
    """Inside, the user's code runs: a child that it forks, and that returns from it or raises, ends with the status
    that a script would have, and does nothing that is this process's to do."""
    process, status = os.getpid(), 1
    try:
        yield
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    except BaseException as error:
        if os.getpid() != process:
            traceback.print_exception(error)
        raise
    finally:
        if os.getpid() != process:
            stopping.end_now(status & 0xFF)


class _Ended(BaseException):
    """In the place of ``os._exit``: unwinds the import."""

    def __str__(self) -> str:
        return f"os._exit({self.args[0]})"


@contextmanager
def importing() -> Iterator[None]:
    """Inside, the user's module is imported: what would end this process is an error, and what it closes of this
    process is open again; a child that it forks ends with this process. Native code is not held.

    Raises:
        PayloadError: the module would have ended this process, or has closed what cannot be had back.
    """
    process, thread, before, forks = os.getpid(), threading.get_ident(), os._exit, os.fork
    ended: list[BaseException] = []
    is_over = False  # what the module has taken by name (``from os import _exit``) outlives its import

    def leave(status: int) -> NoReturn:
        if is_over or os.getpid() != process:
            stopping.end_now(status)
        if threading.get_ident() != thread:  # nobody waits for it here: it may end all, but not say that all is well
            stopping.end_now(status or 1)
        ended.append(_Ended(status))
        raise ended[-1]

    def fork() -> int:
        child = forks()
        if child == 0 and not is_over and threading.get_ident() == thread:
            # It holds what this process has open: as long as it lives, nobody sees that this process is gone.
            process_tree.die_with_parent(signal.SIGKILL)
        return child

    os._exit, os.fork = leave, fork
    try:
        with descriptors_kept(), without_children():
            yield
    except (Exception, stopping.StopRequested):
        raise
    except BaseException as error:
        ended.insert(0, error)
    finally:
        os._exit, os.fork, is_over = before, forks, True
    if ended:  # also where the module has swallowed it
        raise _refused(ended[0]) from ended[0]


@contextmanager
def in_time(seconds: float | None) -> Iterator[None]:
    """Inside, the main thread imports the user's module. Native code that holds Python's lock is not interrupted.

    Args:
        seconds: it may take; None: as long as it likes.

    Raises:
        LaunchTimeoutError: it takes longer.
    """
    if seconds is None:
        yield
        return

    def late(_: int, frame: FrameType | None) -> NoReturn:
        stands = "".join(traceback.format_stack(frame)[-_FRAMES:])
        raise LaunchTimeoutError(
            "importing the task's module takes too long",
            where={"pid": os.getpid(), "host": socket.gethostname()},
            seen=f"after {seconds:g} s it is here:\n{stands}",
            expected="Timeouts(start=...) to be enough for it",
            hint="look at what that line waits for, or raise Timeouts(start=...)",
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # no thread: this process may be forked afterwards
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _refused(ended: BaseException) -> PayloadError:
    text = said(ended)
    called = text if isinstance(ended, _Ended) else f"{type(ended).__name__}{text and f': {text}'}"
    return PayloadError(
        f"importing the task's module would have ended this process by {called}",
        expected="a module that can be imported by the agent, the rank server and every rank",
        hint="put what only a script is to do below: if __name__ == '__main__'",
    )


@contextmanager
def descriptors_kept() -> Iterator[None]:
    """Inside, what was open on entry may be closed: it is open again afterwards.

    Modules that make themselves daemons close it (``os.closerange(3, 1000)``), and a closed socket or event loop of
    ours would be a process that waits for ever.

    Raises:
        PayloadError: it cannot be, because its number is taken by now, or its copy is closed, too.
    """
    copies = _copies()
    try:
        yield
    finally:
        # A client closes a connection that nobody has used for a while, from a thread of its own: no loss.
        lost = [here for here, copy in copies.items() if not (_is_back(here, copy) or _is_connection(copy))]
        for copy in copies.values():
            with suppress(OSError):
                os.close(copy)
    if lost:
        raise PayloadError(
            "importing the task's module closed files that this process needs",
            seen=f"closed: {', '.join(map(str, lost))}",
            expected="a module that closes only what it has opened",
            hint="look for os.closerange or os.close in it, or in what it imports",
        )


def _copies() -> dict[int, int]:
    """A copy of each socket, pipe and event queue. Not of files: to close a copy of one would give up its locks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(_ABOVE, hard)  # Linux has no infinity of files
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))  # what is open stays so when the limit is back
    copies = {}
    try:
        for descriptor in [int(entry.name) for entry in _OPEN.iterdir()]:
            with suppress(OSError):  # closed by another thread; or no number is left, and it is not kept
                if descriptor > 2 and stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFSOCK, stat.S_IFIFO, 0):
                    copies[descriptor] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(3, most - _ROOM))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return copies


def _is_back(descriptor: int, copy: int) -> bool:
    here, there = _open_as(descriptor), _open_as(copy)
    if here is None and there is not None:
        os.dup2(copy, descriptor, inheritable=False)
        return True
    return here is not None and there in (here, None)


def _is_connection(copy: int) -> bool:
    """Whether it is a socket of a network, not one between processes of this machine."""
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        return False
    found.detach()
    return found.family in (socket.AF_INET, socket.AF_INET6)


def _open_as(descriptor: int) -> tuple[int, int, str] | None:
    try:
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino, str((_OPEN / str(descriptor)).readlink())
    except OSError:
        return None
