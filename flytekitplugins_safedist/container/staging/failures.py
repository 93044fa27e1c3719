"""What went wrong, in facts, and what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from ...errors import CodeNotFoundError, MissingDependencyError, SafedistError, StagingError
from ...flyte.storage_errors import Outlook, judge, one_line


def fetch_failed(error: BaseException, label: str, attempts: int) -> SafedistError:
    """The one error for a fetch that will not be tried again."""
    if isinstance(error, SafedistError):
        return error
    seen = one_line(error)
    where = {"uri": label, "host": os.uname().nodename}
    verdict = judge(error)
    if verdict is Outlook.MISSING:
        return CodeNotFoundError(
            "The task's code archive was not found",
            where=where,
            seen=seen,
            hint="register the task again (the archive was deleted, has expired, or is in another bucket)",
        )
    if verdict is Outlook.DENIED:
        return StagingError(
            "The store refused access to the task's code archive",
            where=where,
            seen=seen,
            hint="check that the pod's credentials exist, are not expired and may read this bucket"
            " (service account, FLYTE_AWS_*, AWS_*); a signed URL may have run out",
        )
    if verdict is Outlook.UNSUPPORTED:
        return MissingDependencyError(
            "This image cannot reach the store that holds the task's code archive",
            where=where,
            seen=seen,
            hint="install the store's fsspec package in the image (s3fs, gcsfs, adlfs, aiohttp)",
        )
    return StagingError(
        f"Fetching the task's code archive failed {attempts} time{'' if attempts == 1 else 's'}",
        where=where,
        seen=seen,
        hint="Flyte will retry; if it repeats, check the store's health and the pod's network",
    )


def disk_failed(error: OSError, directory: Path, needed: str, doing: str) -> StagingError:
    """The one error for a file system that would not take the code.

    Args:
        directory: where it was to be written.
        needed: how many bytes of what, as far as known.
    """
    number = error.errno or 0
    name = errno.errorcode.get(number, "error")
    place = error.filename2 or error.filename or directory
    where: dict[str, Any] = {"path": os.fsdecode(place) if isinstance(place, bytes) else place}
    where |= {"host": os.uname().nodename}
    what, hint = _MEANING.get(number, (f"{doing} failed", "see the error; Flyte will retry"))
    seen = f"{name}: {os.strerror(number) if number else error}"
    expected = None
    if number in (errno.ENOSPC, errno.EDQUOT):
        expected = f"at least {needed}" if needed else "more space"
        seen = f"{seen}, {_free(directory)} in {directory}"
    return StagingError(f"{doing}: {what}", where=where, seen=seen, expected=expected, hint=hint)


_MEANING = {
    errno.ENOSPC: (
        "the disk is full",
        "free space, raise the pod's ephemeral storage, or name a larger directory with SAFEDIST_CODE_STORE",
    ),
    errno.EDQUOT: ("the quota is used up", "raise the quota, or name another directory with SAFEDIST_CODE_STORE"),
    errno.EROFS: (
        "the file system is read-only",
        "mount it writable, or use another --dest-dir or SAFEDIST_CODE_STORE",
    ),
    errno.EACCES: (
        "permission denied",
        "let the container's user write there (chown in the image, fsGroup in the pod), or use another directory",
    ),
    errno.EPERM: ("not permitted", "let the container's user write there, or use another directory"),
    errno.EIO: ("the device reports an input/output error", "the volume or the node is unhealthy; Flyte will retry"),
    errno.ESTALE: ("the network file system lost the directory", "Flyte will retry; check the volume"),
    errno.EXDEV: (
        "the file system cannot rename within itself",
        "name a directory on a local disk with SAFEDIST_CODE_STORE",
    ),
    errno.ENOTDIR: ("something that is not a directory is in the way", "remove it, or use another directory"),
}


def _free(directory: Path) -> str:
    standing = next((parent for parent in (directory, *directory.parents) if parent.is_dir()), Path("/"))
    space = os.statvfs(standing)
    files = f", {space.f_favail} files" if space.f_files else ""
    return f"{space.f_bavail * space.f_frsize} bytes{files} free"
