"""What an error says: of the place, its file system and its parent's entries; and of each errno, what it means
to a person, and whether trying again can help."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import TypeVar

from .. import errors
from ..errors import FsError
from ..failures import Errno, Tries, of_errno
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


def _mounts(text: str) -> Iterator[Mount]:
    """All that the text of /proc/self/mountinfo (proc(5)) names."""
    # A name may hold any other space or end of a line: the kernel spells out but these two.
    for line in text.split("\n"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(kind) >= 2:
            options = dict.fromkeys(",".join([fields[5], *kind[2:3]]).split(","))
            yield Mount(_unescape(fields[4]), kind[0], _unescape(kind[1]), ",".join(options))


def parse_mountinfo(text: str, path: str) -> Mount:
    """The mount of the absolute ``path`` in that text. Pure."""
    inside = [each for each in _mounts(text) if f"{path}/".startswith(f"{each.point.rstrip('/')}/")]
    # Of two mounts on one point the later line covers the earlier.
    return max(reversed(inside), key=lambda each: len(each.point), default=UNKNOWN)


def mount_points() -> set[str]:
    """Where something is mounted, as this process sees it; never raises."""
    try:
        return {each.point for each in _mounts(os.fsdecode(MOUNTS.read_bytes()))}
    except OSError:
        return set()


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


# --- errno ------------------------------------------------------------------------------------------------------------
PATIENCE_S = 30.0
"""For what may take long to pass (:class:`..failures.Tries`)."""

FEW = 8


def may_pass(error: OSError) -> bool:
    """Whether trying again can help at all."""
    known = of_errno(error.errno)
    return known is not None and known.tries is not Tries.NONE


def explain(error: OSError, path: str | os.PathLike[str], doing: str) -> FsError:
    """The FsError that says what ``error`` means for ``path``, with host and file system."""
    known = of_errno(error.errno) or Errno(error.strerror or str(error), "see the file server's log")
    where = {"path": os.fspath(path), "host": gethostname(), "file_system": str(mount_of(path))}
    if error.errno == errno.ENOTDIR:
        where.update(("file", str(each)) for each in Path(path).absolute().parents if os.path.isfile(each))  # noqa: PTH113
    seen = errno.errorcode.get(error.errno or 0, str(error))
    kind: type[FsError] = getattr(errors, known.error)
    return kind(f"cannot {doing}: {known.meaning}", where=where, seen=seen, hint=known.hint)


class Backoff:
    """How often one operation may be tried again. Not shared between threads."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._deadline = time.monotonic() + patience_s
        self._tries = 0
        self._delay = 0.001

    def allows(self, error: OSError) -> bool:
        """True, after a pause, if trying again can help; False if it cannot or has been tried enough."""
        known = of_errno(error.errno)
        tries = Tries.NONE if known is None or time.monotonic() > self._deadline else known.tries
        self._tries += tries is Tries.FEW
        if tries is Tries.NONE or (tries is Tries.FEW and self._tries >= FEW):
            return False
        if tries is Tries.AT_ONCE:
            return True
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
