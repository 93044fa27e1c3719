"""Ties between a process, its parent and its descendants, as the Linux kernel keeps them: nobody is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have the kernel hand this process every descendant whose parent ends, whatever session it is in."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent (the thread of it that started us) ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    me = str(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The command's name, in brackets, may hold spaces and brackets itself; the parent is the second after it.
            if (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[1] == me:
                found.append(int(entry.name))
    return found


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
