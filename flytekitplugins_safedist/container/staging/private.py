"""Directories that belong to one start alone, and say by themselves whether it still lives; a lock that saves work."""

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
from pathlib import Path
from typing import Any

from ...fs.oserrors import mount_of

_PREFIX = ".safedist-"
_NAME = re.compile(r"\.safedist-[0-9a-f]{8}-[0-9a-f]{12}")
_POLL_SECONDS = 0.05


def _try_lock(fd: int) -> bool | None:
    """True: ours. False: somebody else's. None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


@contextmanager
def one_at_a_time(directory: Path, *, patience: float, waiting: Callable[[float], None]) -> Iterator[None]:
    """Hold the lock of ``directory`` itself, if that can be had. Nothing is right because of it: it keeps processes
    from doing the same work side by side.

    Args:
        patience: seconds after which to go on without it: a holder that is frozen must not stop everybody.
        waiting: called with the seconds waited, every time the lock is found taken.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        start = time.monotonic()
        while _try_lock(fd) is False and (waited := time.monotonic() - start) <= patience:
            waiting(waited)
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)  # and with it the lock


class Private:
    """A new directory in ``parent`` for this process, removed by :meth:`close`.

    Its maker holds a lock on the directory itself. Whoever finds one and can take that lock knows that the maker is
    dead, whatever process ids say (a restarted container starts again at 1) and however clocks are skewed; the next
    start in the same parent removes it. Its name says how far that lock reaches.

    Raises:
        OSError: ``parent`` cannot be written.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._prefix = f"{_PREFIX}{_reach(parent)}-"
        self.path, self._fd = self._make()
        with suppress(OSError):  # what stays there harms nobody
            self._sweep()

    def _make(self) -> tuple[Path, int]:
        while True:
            path = self._parent / f"{self._prefix}{secrets.token_hex(6)}"
            path.mkdir(mode=0o700)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # swept between mkdir and open, by somebody who took us for dead
            if _try_lock(fd) is not False and _is_same(path, fd):
                os.set_inheritable(fd, True)  # noqa: FBT003  (a command that takes our place needs it, too)
                return path, fd
            os.close(fd)  # a sweeper holds it, or has just removed it

    def _sweep(self) -> None:
        """Remove what dead starts have left: those whose locks are known here, and
        all where no other kernel can be at work."""
        if not self._locks_exclude():
            return
        prefix = _PREFIX if mount_of(self._parent).is_local else self._prefix
        for path in self._parent.iterdir():
            if not path.name.startswith(prefix) or not _NAME.fullmatch(path.name) or path == self.path:
                continue  # others' directories may begin alike, and hold no lock
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _try_lock(fd) and _is_same(path, fd):
                        remove_tree(path)
                finally:
                    os.close(fd)

    def _locks_exclude(self) -> bool:
        """Whether locks can be trusted here. Some file systems grant every one: asked for our own a second time, they
        must refuse."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _try_lock(fd) is False
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the directory and release its lock."""
        try:
            remove_tree(self.path)
        finally:
            os.close(self._fd)

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reach(parent: Path) -> str:
    """How far a lock in ``parent`` reaches: this run of this kernel (random(4), "boot_id"), this mount."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = secrets.token_bytes(8)  # no two are alike
    return hashlib.sha256(boot + str(parent.stat().st_dev).encode()).hexdigest()[:8]


def _is_same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False


def remove_tree(path: Path) -> None:
    """Remove a tree, read-only directories included; what cannot be removed stays, what is gone is fine."""

    def opened_up(function: Callable[..., Any], name: str, _: object) -> None:
        with suppress(OSError):
            for directory in (os.path.dirname(name), name):  # noqa: PTH120
                if stat.S_ISDIR(os.lstat(directory).st_mode):
                    os.chmod(directory, 0o700)  # noqa: PTH101
            shutil.rmtree(name) if function in (os.open, os.scandir, os.lstat) else function(name)

    shutil.rmtree(path, onerror=opened_up)
