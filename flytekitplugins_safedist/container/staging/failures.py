"""What went wrong on a disk, in facts, and what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ...errors import StagingError

_OTHER = "use another --dest-dir"
_MEANING = {
    errno.ENOSPC: ("the disk is full", "free space, raise the pod's ephemeral storage, or " + _OTHER),
    errno.EDQUOT: ("the quota is used up", "raise the quota, or " + _OTHER),
    errno.EROFS: ("the file system is read-only", "mount it writable, or " + _OTHER),
    errno.EACCES: (
        "permission denied",
        "let the container's user write there (chown in the image, fsGroup in the pod), or " + _OTHER,
    ),
    errno.EPERM: ("not permitted", "let the container's user write there, or " + _OTHER),
    errno.EIO: ("the device reports an input/output error", "the volume or the node is unhealthy; Flyte will retry"),
    errno.ESTALE: ("the network file system lost the directory", "Flyte will retry; check the volume"),
    errno.ENOTDIR: ("something that is not a directory is in the way", "remove it, or " + _OTHER),
}
DISK = tuple(number for number in _MEANING if number != errno.ENOTDIR)
"""What a disk says for itself: an archive cannot cause it."""


def disk_failed(error: OSError, directory: Path, doing: str) -> StagingError:
    """The one error for a file system that would not take the code.

    Args:
        directory: where it was to be written.
    """
    number = error.errno or 0
    what, hint = _MEANING.get(number, ("it failed", "see the error; Flyte will retry"))
    place = error.filename2 or error.filename or directory
    seen = f"{errno.errorcode.get(number, 'error')}: {os.strerror(number) if number else error}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        seen += f", {_free(directory)}"
    return StagingError(
        f"{doing}: {what}", where={"path": os.fsdecode(place), "host": os.uname().nodename}, seen=seen, hint=hint
    )


def _free(directory: Path) -> str:
    standing = next((parent for parent in (directory, *directory.parents) if parent.is_dir()), Path("/"))
    space = os.statvfs(standing)
    files = f" and {space.f_favail} files" if space.f_files else ""
    return f"{space.f_bavail * space.f_frsize} bytes{files} free in {standing}"
