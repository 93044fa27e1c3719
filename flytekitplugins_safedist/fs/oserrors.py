"""One place that says what each errno means to a person, and for which of them trying again can help."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import (
    FsAccessError,
    FsError,
    FsIoError,
    FsUnsupportedError,
    NoSpaceError,
    PathBlockedError,
    ReadOnlyFsError,
    StaleHandleError,
)
from .mount_info import host, mount_of

T = TypeVar("T")

AGAIN = frozenset({errno.EINTR, errno.EAGAIN})
"""Nothing was done and nothing is wrong. Python retries some calls by itself (PEP 475), but not mkdir, rename, link."""

STALE = frozenset({errno.ESTALE, errno.ETIMEDOUT})
"""The next look-up by name gets a fresh handle from the server, or the server is back. Worth up to PATIENCE_S."""

FAILED = frozenset({errno.EIO, errno.ENOTCONN, errno.EREMOTEIO, errno.ECONNRESET, errno.ENOLINK})
"""A soft-mounted or failing-over server says this once and then works; a broken disk says it always. A few tries."""

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What link(2) says where there are no hard links, or not enough of them."""

PATIENCE_S = 30.0
FEW = 8

_MEANING: dict[int, tuple[type[FsError], str, str]] = {
    errno.EACCES: (FsAccessError, "permission denied", "check owner and mode of the directory and this task's user"),
    errno.EPERM: (FsAccessError, "operation not permitted", "check the mount's options and this task's user"),
    errno.ENOENT: (FsError, "the directory that it belongs in is not there", "make it first, with ensure_dir"),
    errno.EROFS: (ReadOnlyFsError, "the file system is read-only", "mount it writable, or choose another directory"),
    errno.ENOSPC: (NoSpaceError, "no space (or no inodes) left", "free space there, or choose another directory"),
    errno.EDQUOT: (NoSpaceError, "the disk quota is used up", "free space, or ask for a larger quota"),
    errno.ESTALE: (StaleHandleError, "stale file handle", "see whether the directory was removed or re-exported"),
    errno.ENOTDIR: (PathBlockedError, "a file is in the way where a directory is needed", "move the file away"),
    errno.EISDIR: (PathBlockedError, "a directory is in the way", "choose another name, or move it away"),
    errno.ENOTEMPTY: (PathBlockedError, "a directory with contents is in the way", "move it away"),
    errno.EEXIST: (PathBlockedError, "it exists already", "choose another name, or move it away"),
    errno.ELOOP: (PathBlockedError, "the path goes round in symbolic links", "repair the links"),
    errno.EOPNOTSUPP: (FsUnsupportedError, "the file system cannot do this", "choose another file system"),
    errno.ENOSYS: (FsUnsupportedError, "the file system cannot do this", "choose another file system"),
    errno.EMFILE: (FsError, "this process has too many files open", "close some, or raise its limit (ulimit -n)"),
    errno.ENFILE: (FsError, "this machine has too many files open", "close some, or raise the limit (fs.file-max)"),
    errno.EBADF: (FsError, "the file was closed in the middle", "see who closes it: the block's code, or a thread"),
    errno.ENAMETOOLONG: (FsError, "the name is too long for the file system", "choose a shorter one"),
    errno.EINVAL: (FsError, "the name or the request is nothing that the file system takes", "choose another name"),
    errno.EXDEV: (FsError, "it lies on another file system", "make it beside its final place"),
    errno.EIO: (FsIoError, "the file system or its server failed", "look at the kernel log and the file server"),
    errno.ENOTCONN: (FsIoError, "the file system's server process is gone", "mount it again"),
}


def explain(error: OSError, path: str | os.PathLike[str], doing: str) -> FsError:
    """The FsError that says what ``error`` means for ``path``, with host and file system."""
    number = error.errno or 0
    unknown = FsIoError if number in FAILED | STALE else FsError
    cls, meaning, hint = _MEANING.get(number, (unknown, error.strerror or str(error), "see the file server's log"))
    where = {"path": os.fspath(path), "host": host(), "file_system": str(mount_of(path))}
    return cls(f"cannot {doing}: {meaning}", where=where, seen=errno.errorcode.get(number, str(error)), hint=hint)


class Backoff:
    """How often one operation may be tried again. Not shared between threads."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._deadline = time.monotonic() + patience_s
        self._tries = 0
        self._delay = 0.001

    def allows(self, error: OSError) -> bool:
        """True, after a pause, if trying again can help; False if it cannot or has been tried enough."""
        number = error.errno or 0
        if time.monotonic() > self._deadline:
            return False
        if number == errno.EINTR:
            return True
        if number in FAILED:
            self._tries += 1
            if self._tries >= FEW:
                return False
        elif number not in STALE and number != errno.EAGAIN:
            return False
        time.sleep(self._delay * random.uniform(0.5, 1.5))  # noqa: S311  (jitter, not a secret)
        self._delay = min(self._delay * 2, 1.0)
        return True


def retry_os_call(call: Callable[[], T], path: str | os.PathLike[str], doing: str) -> T:
    """Run an idempotent ``call``, again where that can help.

    Raises:
        FsError: the subclass that fits the errno, when it cannot be done.
    """
    retry = Backoff()
    while True:
        try:
            return call()
        except OSError as error:
            if not retry.allows(error):
                raise explain(error, path, doing) from error
