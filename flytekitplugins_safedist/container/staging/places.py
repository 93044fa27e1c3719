"""Where a store of staged code may lie: nobody else can put theirs in its place, and code can be loaded from it."""

# ruff: noqa: PTH100, PTH116
# os.path keeps symbolic links as they are written, which resolve() does not

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import StagingError

USUAL = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108  (the usual places for temporary files, hier(7))


@dataclass(frozen=True)
class Place:
    """A directory for a store, and what speaks against it ("" for nothing)."""

    directory: Path
    against: str = ""


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` from the root, with ``~`` filled in: a task may change its working directory at any time.

    Raises:
        StagingError: there is no home directory, or no working directory.
    """
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except (RuntimeError, OSError) as error:
        raise StagingError(
            "A directory cannot be told from its name",
            where={"path": os.fspath(path)},
            seen=f"{type(error).__name__}: {error}",
            hint="name it from the root (/...), or set HOME and start in a directory that exists",
        ) from error


def choose(candidates: Iterable[Path]) -> Place:
    """The first directory that can be written and has nothing against it; else the first that can be written.

    Raises:
        StagingError: none can be written.
    """
    tried = list(dict.fromkeys(candidates))
    found = [Place(path, against(path)) for path in tried if _writable(path)]
    if not found:
        raise StagingError(
            "There is no directory for temporary files in which code could be staged",
            where={"host": os.uname().nodename, "user": os.geteuid()},
            seen=", ".join(f"{path}: {_why_not(path)}" for path in tried),
            expected="one that can be written",
            hint="mount a volume there (emptyDir), or name a directory with SAFEDIST_CODE_STORE",
        )
    return next((place for place in found if not place.against), found[0])


def against(path: Path) -> str:
    """What speaks against a store in or below ``path``."""
    return "; ".join(reason for reason in (_swappable(path), "mounted noexec" if noexec(path) else "") if reason)


def swappable(path: Path) -> str:
    """Who could rename what lies at ``path`` and put something else there; "" when only we and root can."""
    return _swappable(path.parent)


def noexec(path: Path) -> bool:
    """Whether the dynamic linker is kept from loading compiled extensions there."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def _swappable(directory: Path) -> str:
    real = Path(os.path.realpath(directory))
    for path in dict.fromkeys([real, *real.parents, directory, *directory.parents]):
        try:
            found = os.stat(path)
        except OSError:
            continue  # it is about to be made, by us
        if found.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {found.st_uid}"
        # A group is a grant: fsGroup makes volumes writable for the pod's own.
        if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
            return f"{path} can be written by others and has no sticky bit ({stat.filemode(found.st_mode)})"
    return ""


def _writable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _why_not(path: Path) -> str:
    if not path.is_dir():
        return "is not a directory"
    try:
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError as error:
        return error.strerror or str(error)
    return os.strerror(errno.EROFS if read_only else errno.EACCES)
