"""``ensure_dir``: a directory that is there for the caller, however many ranks and nodes make it at once.

``os.makedirs(exist_ok=True)`` asks ``isdir`` right after EEXIST, and a network client may still answer from a cache in
which the directory does not exist: FileExistsError for a directory that is there (facebookresearch/lingua#49). Here
mkdir arbitrates, and its EEXIST is believed: the directory is made, so the caller waits until it can see it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import PathBlockedError
from .calls import Backoff, explain, retry_os_call
from .context import timeout_s
from .mount_info import mount_of
from .waiting import job_pauses, refresh, waited_too_long


def ensure_dir(path: str | os.PathLike[str], *, mode: int = 0o777, timeout: float | None = None) -> Path:
    """Make a directory and its parents, or see that others have; return when the caller can use it.

    Args:
        path: the directory.
        mode: permission bits of ``path``, less the umask; parents get 0o777 less the umask.
        timeout: seconds for the directory to become visible; see ``wait_for``.

    Raises:
        PathBlockedError: a file, or a symbolic link to nothing, is in the way.
        FsAccessError, ReadOnlyFsError, NoSpaceError, StaleHandleError, FsIoError: as the errno says.
        FsTimeoutError: the server says that it exists, but it did not become visible.
    """
    target = os.fspath(path)
    try:
        os.mkdir(target, mode)  # noqa: PTH102  (the common case, at the price of one system call)
    except OSError as error:
        if not _is_dir_now(target, error):
            _settle(target, mode, error, timeout_s(timeout))
    return Path(target)


@dataclass(frozen=True)
class Listed:
    """One entry of a directory; a symbolic link is neither a directory nor a file."""

    path: Path
    is_dir: bool
    is_file: bool


def listed(directory: Path) -> list[Listed]:
    """The entries that the caller sees in a directory, by name.

    Raises:
        FsError: the subclass that fits; pathlib and os.walk would leave out what could not be asked.
    """

    def ask() -> list[Listed]:
        with os.scandir(directory) as entries:
            return [
                Listed(Path(entry.path), entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False))
                for entry in entries
            ]

    return sorted(retry_os_call(ask, directory, "list the directory"), key=lambda entry: entry.path.name)


def _settle(target: str, mode: int, error: OSError, limit: float) -> None:
    began = time.monotonic()
    pause = job_pauses()
    retry = Backoff()
    parents_made = 0
    while True:
        left = limit - (time.monotonic() - began)
        if error.errno == errno.ENOENT:
            _make_parent(target, error, left)
            parents_made += 1
        elif _is_dir_now(target, error):
            return
        elif error.errno == errno.EEXIST:
            if left <= 0:
                seen = "mkdir: it exists; stat: it does not"
                raise waited_too_long(Path(target), limit - left, seen, expected="a directory")
            refresh(target)
        elif not retry.allows(error):
            raise explain(error, target, "make the directory") from error
        if error.errno == errno.EEXIST or parents_made > 1:
            time.sleep(min(next(pause), max(0.0, left)))
        # Again from the top: it may have been removed meanwhile, and only mkdir can tell.
        try:
            os.mkdir(target, mode)  # noqa: PTH102
        except OSError as again:
            error = again
        else:
            return


def _make_parent(target: str, error: OSError, left: float) -> None:
    # As it is written, which is what mkdir follows: "link/../x" is beside what the link points to, not beside the link.
    parent = os.path.dirname(target.rstrip("/"))  # noqa: PTH120
    if not parent or parent == target:  # nothing above it that could be made: the working directory itself is gone
        raise explain(error, target, "make the directory") from error
    if left <= 0:
        raise waited_too_long(Path(target), -left, "its parent vanishes again and again", expected="a directory")
    ensure_dir(parent, timeout=left)


def _is_dir_now(target: str, error: OSError) -> bool:
    """Whether the caller sees a directory there, whatever mkdir said (EROFS, EACCES come for existing ones too)."""
    try:
        status = os.stat(target)  # noqa: PTH116
    except FileNotFoundError:
        if error.errno == errno.EEXIST and _is_link_to_nothing(target):
            raise PathBlockedError(
                "a symbolic link to nothing is in the way of a directory",
                where={"path": target},
                seen=f"-> {os.readlink(target)}",  # noqa: PTH115
                hint="make what it points to, or remove the link",
            ) from None
        return False
    except OSError:
        return False
    if stat.S_ISDIR(status.st_mode):
        return True
    if error.errno == errno.EEXIST:
        raise PathBlockedError(
            "a file is in the way of a directory",
            where={"path": target, "file_system": str(mount_of(target))},
            seen=f"mode {stat.filemode(status.st_mode)}, {status.st_size} bytes",
            expected="a directory, or nothing",
            hint="move it away, or choose another path",
        ) from None
    return False


def _is_link_to_nothing(target: str) -> bool:
    # Only where one kernel serves everything: elsewhere what the link points to may merely be late.
    try:
        return stat.S_ISLNK(os.lstat(target).st_mode) and mount_of(os.path.realpath(target)).is_local
    except OSError:
        return False
