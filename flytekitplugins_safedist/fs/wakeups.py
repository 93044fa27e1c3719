"""A wake-up for those who wait on the worker's own machine: they sleep in the kernel until the work is done.

A hint, no more. Who is woken looks into the coordination store, and who cannot be woken (another machine, another
container, another user) looks as often as ever. It is a pipe of the worker's which the waiters open as
``/proc/PID/fd/N`` (proc(5)): no file is left behind, whoever is killed, and when the worker dies the kernel closes the
pipe, which wakes them too.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from types import TracebackType


class WakeUp:
    """The worker's end; a context manager. ``address`` goes to the waiters ("" if no more files can be opened)."""

    def __init__(self) -> None:
        self.address = ""
        self._ends: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            self._ends = os.pipe()
            self.address = f"{os.getpid()}:{self._ends[1]}:{os.fstat(self._ends[1]).st_ino}"

    def wake(self) -> None:
        """Wake all who sleep, and all who begin to before the block ends."""
        if self._is_whole():
            # A byte, not only a close: a child that the work has forked holds the pipe open. Nobody reads it.
            os.write(self._ends[1], b"!")

    def __enter__(self) -> WakeUp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # This, too, wakes those who still sleep, unless a forked child holds the pipe open.
        if self._is_whole():
            for end in self._ends:
                os.close(end)
        self._ends = ()

    def _is_whole(self) -> bool:
        # The user's work may have closed every file it found (a daemon does), and these numbers be other files by now.
        inode = self.address.rpartition(":")[2]
        return bool(self._ends) and all(_pipe_inode(end) == inode for end in self._ends)


class Sleeper:
    """A waiter's end of the pipe at ``address``, if that is one of this machine. A context manager."""

    def __init__(self, address: str) -> None:
        self._end = -1
        pid, _, rest = address.partition(":")
        end, _, inode = rest.partition(":")
        place = f"/proc/{pid}/fd/{end}"
        # If the worker's end is closed, its number may be another file's: one that must not be opened, even for a look.
        if inode and _pipe_inode(place) == inode:
            with contextlib.suppress(OSError):
                self._end = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if self.can_be_woken and _pipe_inode(self._end) != inode:
                self._close()

    @property
    def can_be_woken(self) -> bool:
        """True while a wake-up is still to come: there is no need to look before it."""
        return self._end >= 0

    def sleep(self, seconds: float) -> None:
        """Return when woken (that happens once), or after ``seconds``."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._close()

    def _close(self) -> None:
        os.close(self._end)
        self._end = -1

    def __enter__(self) -> Sleeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.can_be_woken:
            self._close()


def _pipe_inode(pipe: int | str) -> str:
    """The inode number of an open pipe, which no other pipe of this kernel has meanwhile; "" if it is none."""
    try:
        status = os.stat(pipe)  # noqa: PTH116  (a handle or a path)
    except OSError:
        return ""
    return str(status.st_ino) if stat.S_ISFIFO(status.st_mode) else ""
