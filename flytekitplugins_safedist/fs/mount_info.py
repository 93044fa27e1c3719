"""What an error message needs to know about a place: its file system, its parent's entries, its clock."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

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
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


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
        handle = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            dated = os.fstat(handle).st_mtime
        finally:
            os.close(handle)
        after = time.time()
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
