"""What went wrong on a disk, in facts, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import FsError, NoSpaceError, StagingError
from ...fs.oserrors import explain, nearest_dir


def disk_failed(error: OSError | FsError, place: Path, doing: str, needed: str = "") -> StagingError:
    """The one error for a file system that would not take the code.

    Args:
        error: what it said.
        place: where, if the error does not say.
        doing: what was to be done there.
        needed: how much room, where that may be missing.
    """
    if isinstance(error, FsError):
        told = error
    else:
        place = Path(os.fsdecode(error.filename2 or error.filename or place))
        told = explain(error, place, doing)
    is_full = isinstance(told, NoSpaceError)
    return StagingError(
        f"{told.what[:1].upper()}{told.what[1:]}",
        where=told.where,
        seen=f"{told.seen}, {_free(place)}" if is_full else told.seen,
        expected=needed if is_full and needed else None,
        hint=f"{told.hint} (--dest-dir names the directory for the code)",
    )


def _free(place: Path) -> str:
    standing = place if place.is_dir() else nearest_dir(place)
    space = os.statvfs(standing)
    files = f" and {space.f_favail} files" if space.f_files else ""
    return f"{space.f_bavail * space.f_frsize} bytes{files} free in {standing}"
