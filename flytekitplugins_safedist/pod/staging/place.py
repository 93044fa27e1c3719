"""A private directory in the destination, and from there to where the code belongs: a rename for each file, or for each
directory that was missing.

First everything is looked at and nothing is changed; a volume inside the destination gets its copies then. So what is
in the way is found before the first file changes, and no rename needs room on a disk. What others change meanwhile is
looked at again, where a rename finds it.

A private directory belongs to one start alone, and says by itself whether that still lives. Nobody waits for another
start: each has to fetch the archive and look at every file itself.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH114, PTH115, PTH116, PTH118, PTH120, PTH208
# text paths: Path costs more than the call

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from ...errors import FsError, NoSpaceError, PathBlockedError, SafedistError, StagingError
from ...fs.oserrors import explain, mount_of, mount_points, nearest_dir
from ...rank_server.cleanup import remove
from . import points

_MEANWHILE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
"""What a rename says where another process has changed what was looked at."""

_VISIBLE_SECONDS = 90.0
"""Time that a shared file system may take to show a directory that another node made (60 s have been reported)."""

_PREFIX = ".safedist-"
_NAME = re.compile(r"\.safedist-([0-9a-f]{8}-)?[0-9a-f]{12}")
"""Earlier versions have put into it how far a lock reaches."""


def _try_lock(fd: int) -> bool | None:
    """True: ours. False: somebody else's. None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


class Private:
    """A new directory in ``parent`` for this process, removed by :meth:`close`.

    Its maker holds a lock on the directory itself. Whoever finds one and can take that lock knows that the maker is
    dead, whatever process ids say (a restarted container starts again at 1) and however clocks are skewed; the next
    start in the same parent removes it, where one kernel alone has that file system: elsewhere a lock may say nothing.

    Raises:
        OSError: ``parent`` cannot be written.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.path, self._fd = self._make()
        with suppress(OSError):  # what stays there harms nobody
            self._sweep()

    def _make(self) -> tuple[Path, int]:
        while True:
            path = self._parent / f"{_PREFIX}{secrets.token_hex(6)}"
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
        """Remove what dead starts have left."""
        if not mount_of(self._parent).is_local:
            return
        for path in self._parent.iterdir():
            if not _NAME.fullmatch(path.name) or path == self.path:
                continue  # others' directories may begin alike, and hold no lock
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _try_lock(fd) and _is_same(path, fd):
                        remove(path)
                finally:
                    os.close(fd)

    def close(self) -> None:
        """Remove the directory and release its lock."""
        try:
            remove(self.path)
        finally:
            os.close(self._fd)


def _is_same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False


class Placing:
    """Bring all of ``tree`` into ``dest``, as ``tar -x`` would: files are replaced, others are kept.

    Attributes:
        same: files that were there already, and stay as they are.
    """

    def __init__(self, tree: Path, dest: Path) -> None:
        self.same = 0
        self._tree, self._dest = str(tree), str(dest)
        self._done: list[str] = []
        self._aside = ExitStack()
        self._copies: dict[str, Private] = {}
        self._mounted = {point for point in mount_points() if point.startswith(f"{self._dest.rstrip('/')}/")}

    def run(self) -> None:
        """Look, then rename.

        Raises:
            PathBlockedError: something is in the way that tar would not replace either; nothing has changed.
            OSError: the destination is full, read-only or not ours; nothing has changed.
            StagingError: the same between two renames; it says what has changed.
        """
        with self._aside:
            renames = self._look(self._tree, self._dest)
            count = len(renames)
            try:
                self._carry_out(deque(renames))
            except (OSError, SafedistError) as error:
                if not self._done:
                    raise
                raise self._with_changes(error, count) from error

    def _look(self, source: str, target: str) -> list[tuple[str, str]]:
        """The renames that bring ``source`` to ``target``; into a volume of copies there, which are made now."""
        if not stat.S_ISDIR(os.lstat(source).st_mode):
            return self._look_at_file(source, target)
        try:
            there = os.stat(target)
        except FileNotFoundError:
            if os.path.islink(target):
                raise _blocked(target, "A link to nothing stands where a directory is needed") from None
            return [(source, target)]
        if not stat.S_ISDIR(there.st_mode):
            raise _blocked(target, "A file stands where a directory is needed")
        if there.st_dev != os.stat(source).st_dev:
            source = self._copied(source, target)
        renames = []
        for name in sorted(os.listdir(source)):
            renames += self._look(os.path.join(source, name), os.path.join(target, name))
        return renames

    def _look_at_file(self, source: str, target: str) -> list[tuple[str, str]]:
        with suppress(FileNotFoundError):
            there = os.lstat(target)
            if stat.S_ISDIR(there.st_mode):
                with suppress(NotADirectoryError):  # another start has put its file there
                    if os.listdir(target):
                        raise _blocked(target, "A directory that is not empty stands where the code archive has a file")
            elif _alike(source, target, there):
                self.same += 1
                return []
            if self._mounted and os.path.realpath(target) in self._mounted:
                what = "A volume is mounted where the code archive has another file"
                raise _blocked(target, what, "mount it elsewhere")
        return [(source, target)]

    def _carry_out(self, renames: deque[tuple[str, str]]) -> None:
        """Make the renames. What another process has changed since it was looked at is looked at again."""
        patience: dict[str, Iterator[float]] = {}
        while renames:
            source, target = renames.popleft()
            _make_later(source, target)
            try:
                os.rename(source, target)
            except OSError as error:
                if error.errno == errno.EXDEV and not self._is_copy(source):  # another mount of the same file system
                    renames.appendleft((self._copied(source, os.path.dirname(target)), target))
                    continue
                if error.errno not in _MEANWHILE:
                    raise
                again = self._look(source, target)
                renames.extendleft(reversed(again))
                if again == [(source, target)]:
                    _make_room(source, target)
                    time.sleep(next(patience.setdefault(target, _pauses(target))))
            else:
                self._done.append(target)
                points.at("place")

    def _copied(self, source: str, volume: str) -> str:
        """A copy of ``source``, in the private directory of a volume."""
        if volume not in self._copies:
            self._copies[volume] = self._aside.enter_context(closing(Private(Path(volume))))
        copy = str(self._copies[volume].path / f"copy-{secrets.token_hex(6)}")
        _copy(source, copy)
        return copy

    def _is_copy(self, source: str) -> bool:
        return any(source.startswith(f"{private.path}/") for private in self._copies.values())

    def _with_changes(self, error: OSError | SafedistError, count: int) -> SafedistError:
        """The error, with what has been changed before it."""
        if isinstance(error, OSError) and not isinstance(error, SafedistError):
            error = disk_failed(error, Path(self._dest), "put the code into the destination directory")
        changed = f"{len(self._done)} of {count} renames, the last {self._done[-1]}"
        return type(error)(
            error.what,
            where={**error.where, "changed": changed},
            seen=error.seen,
            expected=error.expected,
            hint=error.hint,
        )


def _make_room(source: str, target: str) -> None:
    """An empty directory makes room for a file; if it cannot, the next look says why."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.lstat(source).st_mode):
            os.rmdir(target)
    with suppress(OSError):
        os.listdir(os.path.dirname(target))  # refreshes what a network file system has cached


def _pauses(target: str) -> Iterator[float]:
    """Seconds before each next try.

    Raises:
        StagingError: it has been tried for long enough.
    """
    deadline, pause = time.monotonic() + _VISIBLE_SECONDS, 0.002
    while time.monotonic() <= deadline:
        yield pause
        pause = min(2 * pause, 0.25)
    raise StagingError(
        "The destination directory keeps changing",
        where={"path": target, "host": os.uname().nodename},
        expected=f"what one process makes there to stay, and to be seen within {_VISIBLE_SECONDS:g} s",
        hint="give each task its own destination directory, or check the health of the shared volume",
    )


def _make_later(source: str, target: str) -> None:
    """Give a file another second than the one that it replaces: Python takes a module's compiled code for that of a
    file of the same second and size."""
    with suppress(OSError):  # nothing is replaced
        before = os.lstat(target).st_mtime
        if int(os.lstat(source).st_mtime) <= int(before):
            os.utime(source, (before + 1, before + 1), follow_symlinks=False)


def _copy(source: str, target: str) -> None:
    if not stat.S_ISDIR(os.lstat(source).st_mode):
        shutil.copy2(source, target, follow_symlinks=False)
        return
    os.mkdir(target)
    for name in os.listdir(source):
        _copy(os.path.join(source, name), os.path.join(target, name))
    shutil.copymode(source, target)  # last: it may forbid to write


def _alike(source: str, target: str, there: os.stat_result) -> bool:
    """Whether a file is there already. It stays then, for whoever has it open on another machine."""
    ours = os.lstat(source)
    if (ours.st_mode, ours.st_size) != (there.st_mode, there.st_size):
        return False
    try:
        if stat.S_ISLNK(ours.st_mode):
            return os.readlink(source) == os.readlink(target)
        return filecmp.cmp(source, target, shallow=False)
    except OSError:
        return False  # not ours to read, gone, or another start's by now


def _blocked(path: str, what: str, mend: str = "remove it from the image") -> PathBlockedError:
    where = {"path": path, "host": os.uname().nodename}
    return PathBlockedError(what, where=where, hint=f"{mend}, or use another --dest-dir")


# --- what went wrong on a disk, in facts, and what to do about it -----------------------------------------------------
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
