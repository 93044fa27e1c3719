"""From a private directory to where the code belongs: a rename for each file, or for each directory that was missing.

First everything is looked at and nothing is changed; a volume inside the destination gets its copies then. So what is
in the way is found before the first file changes, and no rename needs room on a disk.
"""

# ruff: noqa: PTH102, PTH103, PTH106, PTH114, PTH116, PTH118, PTH120, PTH208, PTH115, PTH104
# text paths: Path costs more than the call

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from ...errors import PathBlockedError, SafedistError, StagingError
from ...fs import ensure_dir
from .failures import disk_failed
from .private import Private

POINTS = ("waiting", "locked", "fetch", "unpacked", "place", "placed")
"""Named points that ``Options.at`` is told about, in order; "place" after each rename. Tests stop processes there."""

_MEANWHILE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
"""What a rename says where another process has changed what was looked at."""

_VISIBLE_SECONDS = 90.0
"""Time that a shared file system may take to show a directory that another node made (60 s have been reported)."""


def make_directory(path: Path) -> None:
    """Make ``path`` a directory that this client sees.

    Raises:
        PathBlockedError: something else is there.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):  # what is there may be a file, or what a network file system's cache does not show
        path.mkdir(parents=True, exist_ok=True)
    ensure_dir(path)


def keep_modules(tree: Path, files: Iterable[str], into: Path) -> None:
    """Link (or copy) the Python modules among ``files`` of ``tree`` into the empty directory ``into``."""
    made = {""}
    for name in files:
        if not name.endswith((".py", ".pyc")):
            continue
        parent = os.path.dirname(name)
        if parent not in made:
            os.makedirs(into / parent, exist_ok=True)
            made.add(parent)
        source, target = os.path.join(tree, name), os.path.join(into, name)
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # another disk, or one without links
            shutil.copy2(source, target, follow_symlinks=False)


class Placing:
    """Bring all of ``tree`` into ``dest``, as ``tar -x`` would: files are replaced, others are kept.

    Attributes:
        same: files that were there already, and stay as they are.
    """

    def __init__(self, tree: Path, dest: Path, at: Callable[[str], None]) -> None:
        self.same = 0
        self._tree, self._dest, self._at = str(tree), str(dest), at
        self._moved: list[str] = []
        self._carried = ExitStack()

    def run(self) -> None:
        """Look, then rename.

        Raises:
            PathBlockedError: something is in the way that tar would not replace either; nothing has changed.
            OSError: the destination is full, read-only or not ours; nothing has changed.
            StagingError: the same between two renames; it says what has changed.
        """
        with self._carried:
            steps = self._look(self._tree, self._dest)
            try:
                for step in steps:
                    self._move(*step)
            except (OSError, SafedistError) as error:
                if not self._moved:
                    raise
                raise self._told(error, len(steps)) from error

    def _look(self, source: str, target: str) -> list[tuple[str, str]]:
        """The renames that bring ``source`` to ``target``."""
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
        if there.st_dev != os.stat(source).st_dev:  # a volume
            source = _copied(source, self._carried.enter_context(Private(Path(target))))
        steps = []
        for name in sorted(os.listdir(source)):
            steps += self._look(os.path.join(source, name), os.path.join(target, name))
        return steps

    def _look_at_file(self, source: str, target: str) -> list[tuple[str, str]]:
        with suppress(FileNotFoundError):
            there = os.lstat(target)
            if stat.S_ISDIR(there.st_mode):
                if os.listdir(target):
                    raise _blocked(target, "A directory that is not empty stands where the code archive has a file")
            elif _alike(source, target, there):
                self.same += 1
                return []
        return [(source, target)]

    def _move(self, source: str, target: str) -> None:
        deadline, pause = time.monotonic() + _VISIBLE_SECONDS, 0.002
        while True:
            _make_later(source, target)
            try:
                os.rename(source, target)
            except OSError as error:
                if error.errno == errno.EXDEV:  # another mount of the same file system
                    with Private(Path(os.path.dirname(target))) as beside:
                        self._move(_copied(source, beside), target)
                    return
                if error.errno not in _MEANWHILE:
                    raise
            else:
                self._moved.append(target)
                self._at("place")
                return
            steps = self._look(source, target)  # another process was here since
            if steps != [(source, target)]:
                for step in steps:
                    self._move(*step)
                return
            with suppress(OSError):  # an empty directory makes room for a file; if it cannot, the next look says why
                if not stat.S_ISDIR(os.lstat(source).st_mode):
                    os.rmdir(target)
            if time.monotonic() > deadline:
                raise StagingError(
                    "The destination directory keeps changing",
                    where={"path": target},
                    expected=f"what one process makes there to stay, and to be seen within {_VISIBLE_SECONDS:g} s",
                    hint="give each task its own destination directory, or check the health of the shared volume",
                )
            with suppress(OSError):
                os.listdir(os.path.dirname(target))  # refreshes what a network file system has cached
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def _told(self, error: OSError | SafedistError, steps: int) -> SafedistError:
        """The error, with what has been changed before it."""
        if isinstance(error, OSError):
            error = disk_failed(error, Path(self._dest), "Putting the code into the destination directory")
        changed = f"{len(self._moved)} of {steps} renames, the last {self._moved[-1]}"
        return type(error)(
            error.what,
            where={**error.where, "changed": changed},
            seen=error.seen,
            expected=error.expected,
            hint=error.hint,
        )


def _make_later(source: str, target: str) -> None:
    """Give a file another second than the one that it replaces: Python takes a module's compiled code for that of a
    file of the same second and size."""
    with suppress(OSError):  # nothing is replaced
        before = os.lstat(target).st_mtime
        if int(os.lstat(source).st_mtime) <= int(before):
            os.utime(source, (before + 1, before + 1), follow_symlinks=False)


def _copied(source: str, beside: Private) -> str:
    made = str(beside.path / "copied")
    _copy(source, made)
    return made


def _copy(source: str, target: str) -> None:
    if not stat.S_ISDIR(os.lstat(source).st_mode):
        shutil.copy2(source, target, follow_symlinks=False)
        return
    os.mkdir(target)
    for name in os.listdir(source):
        _copy(os.path.join(source, name), os.path.join(target, name))


def _alike(source: str, target: str, there: os.stat_result) -> bool:
    """Whether a file is there already. It stays then, for whoever has it open on another machine."""
    ours = os.lstat(source)
    if (ours.st_mode, ours.st_size) != (there.st_mode, there.st_size):
        return False
    if stat.S_ISLNK(ours.st_mode):
        return os.readlink(source) == os.readlink(target)
    try:
        return filecmp.cmp(source, target, shallow=False)
    except OSError:
        return False  # not ours to read, or gone


def _blocked(path: str, what: str) -> PathBlockedError:
    return PathBlockedError(
        what,
        where={"path": path},
        hint="remove it from the image, or use another --dest-dir",
    )
