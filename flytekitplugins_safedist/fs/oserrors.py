"""What an error says: of the place, its file system, its parent's entries, its clock; and of each errno, what it means
to a person, and whether trying again can help."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
from ..jitter import jittered

T = TypeVar("T")

LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs", "iso9660", "vfat"}
)
"""File systems that one kernel serves alone: what one process has made, every other process of that kernel sees at
once, and no other kernel sees at all."""


@dataclass(frozen=True)
class Mount:
    """The mount that a path lies on.

    Args:
        point: where it is mounted.
        fstype: ``ext4``, ``nfs4``, ``lustre``, ``fuse.gcsfuse``, …; "unknown" where /proc cannot say.
        source: device or server export.
        options: mount options, as in /proc/self/mountinfo.
    """

    point: str
    fstype: str
    source: str
    options: str

    @property
    def is_local(self) -> bool:
        """True if only this machine's kernel serves the file system."""
        return self.fstype in LOCAL_TYPES

    def __str__(self) -> str:
        return f"{self.fstype} from {self.source} at {self.point} ({self.options})"


MOUNTS = Path("/proc/self/mountinfo")
UNKNOWN = Mount(point="?", fstype="unknown", source="?", options="?")


def _unescape(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def parse_mountinfo(text: str, path: str) -> Mount:
    """The mount of the absolute ``path`` in the text of /proc/self/mountinfo (proc(5)). Pure."""
    best = UNKNOWN
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 6 or len(kind) < 2:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later line covers the earlier.
        if inside and (best is UNKNOWN or len(point) >= len(best.point)):
            options = ",".join(dict.fromkeys([*fields[5].split(","), *(kind[2].split(",") if len(kind) > 2 else [])]))
            best = Mount(point=point, fstype=kind[0], source=_unescape(kind[1]), options=options)
    return best


def mount_points() -> set[str]:
    """Where something is mounted, as this process sees it; never raises."""
    try:
        text = os.fsdecode(MOUNTS.read_bytes())
    except OSError:
        return set()
    return {_unescape(line.split(" ")[4]) for line in text.splitlines() if line.count(" ") > 4}


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """The mount that ``path`` (or its nearest existing parent) lies on; never raises."""
    try:
        # As os decodes names: some other mount's, of any bytes, must not end what has nothing to do with it.
        return parse_mountinfo(os.fsdecode(MOUNTS.read_bytes()), os.path.realpath(path))
    except OSError:  # no /proc, or a relative path in a working directory that is gone
        return UNKNOWN


def nearest_dir(path: str | os.PathLike[str]) -> Path:
    """The lowest directory above ``path`` that the caller can see."""
    try:
        place = Path(os.path.abspath(path)).parent  # noqa: PTH100  (a lexical parent; resolving links may fail here)
    except OSError:
        return Path(path).parent
    while not os.path.isdir(place) and place != place.parent:  # noqa: PTH112  (Path.is_dir raises on EIO, ESTALE)
        place = place.parent
    return place


def entries(path: str | os.PathLike[str], most: int = 10) -> str:
    """What a directory holds, as text for a message: up to ``most`` names and the count; never raises."""
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208
    except OSError as error:
        return f"cannot be listed ({error.strerror})"
    if not names:
        return "empty"
    listed = ", ".join(names[:most])
    return f"{len(names)} entries: {listed}" + (", …" if len(names) > most else "")


def clock_skew(directory: str | os.PathLike[str]) -> float | None:
    """Seconds by which the file server's clock is ahead of this host's; None where no file can be written.

    The server dates a new file, so one is made in ``directory`` and removed.
    """
    probe = Path(directory) / f".safedist-clock-{secrets.token_hex(8)}"
    try:
        before = time.time()
        probe.touch(0o600, exist_ok=False)
        dated, after = probe.stat().st_mtime, time.time()
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if before - 0.05 <= dated <= after + 0.05:  # kernels date files by the last tick
        return 0.0
    return round(dated - (before + after) / 2, 3)


def host() -> str:
    """This machine's name, for messages."""
    return socket.gethostname()


def describe(path: str | os.PathLike[str]) -> dict[str, object]:
    """Everything a timeout message says about the place of ``path``."""
    parent = nearest_dir(path)
    skew = clock_skew(parent)
    return {
        "host": host(),
        "file_system": str(mount_of(parent)),
        "nearest_parent": f"{parent}: {entries(parent)}",
        "server_clock_skew": "unknown (cannot write there)" if skew is None else f"{skew:+.3f} s",
    }


# --- errno ------------------------------------------------------------------------------------------------------------
AGAIN = frozenset({errno.EINTR, errno.EAGAIN})
"""Nothing was done and nothing is wrong. Python retries some calls by itself (PEP 475), but not mkdir, rename, link."""

STALE = frozenset({errno.ESTALE, errno.ETIMEDOUT})
"""The next look-up by name gets a fresh handle from the server, or the server is back. Worth up to PATIENCE_S."""

FAILED = frozenset({errno.EIO, errno.ENOTCONN, errno.EREMOTEIO, errno.ECONNRESET, errno.ENOLINK})
"""A soft-mounted or failing-over server says this once and then works; a broken disk says it always. A few tries."""

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
    errno.EBUSY: (PathBlockedError, "something is mounted there, or in use", "unmount it, or choose another name"),
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
        time.sleep(jittered(self._delay, 0.5, 1.5))
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
