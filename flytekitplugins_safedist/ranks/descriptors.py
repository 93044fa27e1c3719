"""What this process has open, kept while a module is imported that closes what it has not opened.

Modules that make themselves daemons do (``os.closerange(3, 1000)``), and a closed socket or event loop of ours would be
a process that waits for ever. Copies are held meanwhile, far above the numbers that such a module goes through.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PayloadError

_OPEN = Path("/proc/self/fd")
_ABOVE = 1 << 16
_ROOM = 256


@contextmanager
def kept() -> Iterator[None]:
    """Inside, what was open on entry may be closed: it is open again afterwards.

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
    lowest = _ABOVE if hard == resource.RLIM_INFINITY else max(3, min(_ABOVE, hard - _ROOM))
    copies = {}
    wanted = lowest + _ROOM if hard == resource.RLIM_INFINITY else min(lowest + _ROOM, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:  # what is open stays so when the limit is back
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        for descriptor in [int(entry.name) for entry in _OPEN.iterdir()]:
            with suppress(OSError):  # closed by another thread; or no number is left, and it is not kept
                if descriptor > 2 and stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFSOCK, stat.S_IFIFO, 0):
                    copies[descriptor] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
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
