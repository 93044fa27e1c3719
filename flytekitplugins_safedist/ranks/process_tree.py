"""Ties between a process, its parent and its descendants, as the Linux kernel keeps them: nobody is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ..errors import LaunchError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Inside, a process is started, and nothing else done.

    Raises:
        LaunchError: it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{what} cannot be started",
            where={"host": socket.gethostname()},
            seen=f"{type(error).__name__}: {error}",
            hint="look at this node's limits of processes, memory and open files",
        ) from error


def adopt_orphans() -> None:
    """Have the kernel hand this process every descendant whose parent ends, whatever session it is in."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent (the thread of it that started us) ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _state_and_parent(pid)[1] == os.getpid()]


def thaw(pid: int) -> None:
    """Let a process go on that somebody has stopped (SIGSTOP)."""
    if _state_and_parent(pid)[0] == "T":
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        # The command's name, in brackets, may hold spaces and brackets itself.
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[:2]
    except OSError:  # it ended meanwhile
        return "", 0
    return state, int(parent)


def end(*, spare: Collection[int], patience: float) -> None:
    """Kill and reap all children, and theirs as they are handed over, for at most ``patience`` seconds.

    Args:
        spare: children to leave alone.
        patience: seconds; what the kernel cannot end by then is left behind.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        left = [pid for pid in children() if pid not in spare]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # not reaped yet, so the number is no one else's
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            # With a deadline, so not a wait that blocks; a killed process is gone within a millisecond or so.
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.002)
