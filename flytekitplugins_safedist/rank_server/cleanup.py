"""Nothing outlives the agent: descendants are ended, directories removed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_CLEANERS = (b".resource_tracker import main", b"torch_shm_manager")
"""Helpers of Python, joblib (a copy of Python's) and torch that remove shared memory once their last client has ended.
They end by themselves then: the first two have a pipe from their clients, torch's a socket."""
_CLEANING_SECONDS = 10.0
"""They need some hundredths of a second, and more where the processor is busy: nobody waits longer than they take."""


def adopt_orphans() -> None:
    """Have the kernel hand this process every descendant whose parent ends, whatever session it is in."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    try:
        own = [(task / "children").read_bytes() for task in Path("/proc/self/task").iterdir()]
        return [int(pid) for children_of_thread in own for pid in children_of_thread.split()]
    except OSError:  # a kernel or a sandbox that has no such files
        return [pid for pid in _processes() if state_and_parent(pid)[1] == os.getpid()]


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def thaw(pid: int) -> None:
    """Let a process, and those of its group, go on that somebody has stopped (SIGSTOP)."""
    if state_and_parent(pid)[0] == "T":
        send_signal(pid, signal.SIGCONT, whole_group=True)


def state_and_parent(pid: int) -> tuple[str, int]:
    """One letter, as proc(5) has it, and the parent's process id; ("", 0) of a process that is gone."""
    try:
        # The name, in parentheses, may hold any bytes, spaces and parentheses included.
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[:2]
    except OSError:  # it ended meanwhile
        return "", 0
    return state.decode(), int(parent)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send_signal(pid: int, number: int, *, whole_group: bool) -> None:
    """Signal a child that is not reaped yet, so that the number cannot be anybody else's; or all of its group."""
    # Between fork and setsid a rank has no group of its own yet; the process itself is there all the same.
    for send in (os.killpg, os.kill) if whole_group else (os.kill,):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's: sudo's, say
            send(pid, number)
            return


def _is_another_users(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def end_group(pid: int) -> None:
    """Kill a rank that has ended and is not reaped yet, and all of its session's group but those who clean up after it:
    a killed ``resource_tracker`` would leave /dev/shm full."""
    cleaners = [each for each in _group_of(pid) if _cleans_up(each)]
    if not cleaners:
        send_signal(pid, signal.SIGKILL, whole_group=True)
        return
    for each in _group_of(pid):
        if each not in cleaners:
            send_signal(each, signal.SIGKILL, whole_group=False)


def _group_of(leader: int) -> list[int]:
    found = []
    for pid in _processes():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def _cleans_up(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(name in command for name in _CLEANERS)
    return False


def end_descendants(*, spare: Collection[int], patience: float) -> None:
    """Kill and reap all children, and theirs as they are handed over, for at most ``patience`` seconds.

    Those that remove what others have left in shared memory have time to end by themselves first: they do when the last
    of the others is gone.

    Args:
        spare: children to leave alone, beside those that go on as another user.
        patience: seconds for each of both; what the kernel cannot end by then is left behind.
    """

    def left(*, cleaners: bool) -> list[int]:
        own = [pid for pid in children() if pid not in spare and not _is_another_users(pid)]
        # What the kernel cannot end is waited for once; what has ended, and has no command any more, is reaped.
        return [pid for pid in own if _cleans_up(pid) is cleaners or state_and_parent(pid)[0] == "Z"]

    _reap(lambda: left(cleaners=False), patience, kills=True)
    _reap(lambda: left(cleaners=True), _CLEANING_SECONDS, kills=False)
    _reap(lambda: left(cleaners=True), patience, kills=True)


def _reap(left: Callable[[], Collection[int]], seconds: float, *, kills: bool) -> None:
    """Reap children until none is left, as they end or are killed. By looks, for a wait that blocks has no deadline."""
    deadline = time.monotonic() + seconds
    while (pids := left()) and time.monotonic() < deadline:
        for pid in pids:
            if kills:
                send_signal(pid, signal.SIGKILL, whole_group=False)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def remove(path: Path) -> str | None:
    """Remove a tree as far as possible; what could not be removed is returned as text, None when all is gone."""
    with contextlib.suppress(OSError):
        path.unlink()  # a link: never what is behind it
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return None
    # rmtree goes down by recursion in every Python before 3.13, by paths that may become too long, and stops at
    # directories whose permissions a user took away.
    path = path.absolute()
    try:
        mode = ["-type", "d", "!", "-perm", "-u=rwx", "-exec", "chmod", "u+rwx", "{}", ";"]
        # From "/": find does nothing where it may not come back to the directory that it is started in.
        subprocess.run(["find", path, *mode], capture_output=True, check=False, cwd="/")
        english = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(["rm", "-rf", "--", path], capture_output=True, check=False, env=english)
        said = done.stderr.decode(errors="replace").replace("rm: ", "").splitlines()
    except OSError as error:
        said = [f"{path}: {error}"]
    return "; ".join(said[:5]) or None
