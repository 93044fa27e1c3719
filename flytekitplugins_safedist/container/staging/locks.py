"""Advisory locks that spare work, and directories that say by themselves whether their maker still lives.

Nothing in staging is correct *because* of a lock: some network file systems ignore flock(2), some refuse it. A lock
only decides who works while the others wait. flock and not fcntl locks: it belongs to the open file description, so it
works between threads, ends with the process whatever kills it, and cannot be lost by closing another descriptor.
"""

# ruff: noqa: PTH101, PTH116, PTH118, PTH208
# bytes paths and descriptors: names in archives need not be text, and Path costs more than the call

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_POLL_FIRST, _POLL_MOST = 0.002, 0.05
"""Seconds between two tries. A blocking flock could not be given a deadline without a thread or a signal handler."""

_WORK_PREFIX = ".safedist-"
_WORK_NAME = re.compile(r"\.safedist-[0-9a-f]{8}-[0-9a-f]{12}")

UNKNOWN_BOOT = "unknown"


@cache
def boot_id() -> str:
    """Which run of which kernel this is: the reach of flock on any file system (random(4), "boot_id")."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return UNKNOWN_BOOT


def _try_lock(fd: int) -> bool | None:
    """True: ours. False: somebody else's. None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


@contextmanager
def one_at_a_time(path: Path, *, patience: float, waiting: Callable[[str, float], None]) -> Iterator[bool]:
    """Hold the lock file ``path`` if that can be had; yields whether it is held.

    Args:
        patience: seconds after which to go on without the lock: a holder that is frozen must not stop everybody, and
            going on is only slower, never wrong.
        waiting: called with the holder (a text) and the seconds waited, every time the lock is found taken.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        start, pause = time.monotonic(), _POLL_FIRST
        while (held := _try_lock(fd)) is False:
            waited = time.monotonic() - start
            if waited > patience:
                break
            waiting(_owner(fd), waited)
            time.sleep(pause)
            pause = min(pause * 2, _POLL_MOST)
        if held:
            with suppress(OSError):  # a full disk must not keep the lock from being used: the text is for people
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield bool(held)
    finally:
        os.close(fd)  # and with it the lock


def _owner(fd: int) -> str:
    with suppress(OSError):
        return os.pread(fd, 200, 0).decode("utf-8", "replace") or "another process"
    return "another process"


class WorkDir:
    """A private directory in ``parent`` that is removed at the end, and can be recognised as left behind.

    Its maker holds a lock on the directory itself. Whoever finds such a directory and can take that lock knows that
    the maker is dead, whatever process ids say (a restarted container starts again at 1) and however skewed clocks
    are. The name carries the kernel and the file system, because a lock means nothing to another kernel.

    Raises:
        OSError: ``parent`` cannot be written.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._prefix = f"{_WORK_PREFIX}{_reach(parent)}-"
        self.path, self._fd, self._locked = self._make()

    def _make(self) -> tuple[Path, int, bool]:
        while True:
            path = self._parent / f"{self._prefix}{secrets.token_hex(6)}"
            path.mkdir(mode=0o700)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # swept between mkdir and open, by somebody who took us for dead
            locked = _try_lock(fd)
            if locked is not False and is_same(path, fd):
                return path, fd, bool(locked)
            os.close(fd)  # a sweeper holds it, or has just removed it

    def sweep(self, *, everybodys: bool = False) -> int:
        """Remove what dead processes of this kernel left in the same parent; returns how many directories.

        Args:
            everybodys: also what other kernels left, and this one under another device number: for file systems that
                no other machine can be using.
        """
        if not self.locks_exclude():
            return 0
        swept = 0
        for name in os.listdir(self._parent):
            ours = name.startswith(self._prefix) or (everybodys and _WORK_NAME.fullmatch(name))
            if not ours or name == self.path.name:
                continue
            path = self._parent / name
            with suppress(OSError), exclusively(path) as alone:  # gone already, or not ours to remove: it does no harm
                if alone:
                    remove_tree(path)
                    swept += 1
        return swept

    def share(self) -> None:
        """Keep others from removing it, and let them use it: it is about to be published under another name."""
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def locks_exclude(self) -> bool:
        """Whether locks can be trusted here. Some file systems say yes to every one: ask for our own a second time,
        which must be refused."""
        if not self._locked:
            return False
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _try_lock(fd) is False
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the directory, if it is still there, and release its lock."""
        try:
            remove_tree(self.path)
        finally:
            os.close(self._fd)

    def __enter__(self) -> WorkDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def exclusively(path: Path) -> Iterator[bool]:
    """Whether the directory ``path`` is locked for us alone, while the block runs.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield bool(_try_lock(fd)) and is_same(path, fd)
    finally:
        os.close(fd)


def _reach(parent: Path) -> str:
    return hashlib.sha256(f"{boot_id()} {parent.stat().st_dev}".encode()).hexdigest()[:8]


def is_same(path: Path, fd: int) -> bool:
    """Whether ``path`` still names what ``fd`` is."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False


def remove_tree(path: Path) -> None:
    """Remove a tree, read-only directories included; what cannot be removed stays, what is gone is fine."""
    try:
        path.rmdir()  # nearly always it is empty by now, or has been published
    except FileNotFoundError:
        return
    except OSError:
        pass
    else:
        return
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return
    for directory, names, _ in os.walk(path):
        for name in names:
            inner = os.path.join(directory, name)
            with suppress(OSError):
                if stat.S_ISDIR(os.lstat(inner).st_mode):
                    os.chmod(inner, 0o700)
    shutil.rmtree(path, ignore_errors=True)
