"""A staged tree over a destination directory, as ``tar -x`` over it: existing files replaced, others kept.

Each file changes at one instant from the old one to the new one, and a directory that was not there at all appears
whole. A file is linked from the staged tree where the file system allows that, and copied where not.

What is in the way is looked for, and all that needs room on the disk is made beside the destination, before the first
of its files changes: a merge that fails has changed nothing. One that fails all the same between two renames says what
it has changed.
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH116, PTH120, PTH208, PTH211
# bytes paths and descriptors: names in archives need not be text, and Path costs more than the call

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path

from ...errors import SafedistError, StagingError
from ..archive import DIRECTORY, IMPLIED, SYMLINK, TreeEntry
from .failures import disk_failed
from .keeping import is_local
from .locks import WorkDir
from .obstacles import VISIBLE, filled, look, make_directory
from .store import Tree

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)
_NOT_FREE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_TRIES = 100
"""How often another process may undo what we just did before that is an error of its own."""


def merge(tree: Tree, dest: Path, *, at: Callable[[str], None]) -> None:
    """Bring ``dest`` to the state ``tar -x`` of the archive would leave, made if missing.

    Args:
        at: told each named point that is passed.

    Raises:
        PathBlockedError: what tar would not replace either is in the way.
        OSError: the destination is full, read-only or not ours.

    The destination is as it was then, unless the error says under ``changed`` what is not.
    """
    if _whole(tree, dest, at):
        return
    if not make_directory(os.fsencode(dest), os.stat, replace=False):
        raise StagingError("The destination directory cannot be seen", where={"path": dest})
    with ExitStack() as stack:
        merger = _Merger(tree, dest, stack)
        groups = list(_by_top(tree.entries))
        for top, below in groups:
            merger.prepare(top, below)
        try:
            for top, below in groups:
                if not merger.subtree(top, below):
                    for name in below:
                        merger.entry(name)
                at("merge")
            merger.finish()
        except (OSError, SafedistError) as error:
            if not merger.changed:
                raise
            raise merger.told(error) from error


def _whole(tree: Tree, dest: Path, at: Callable[[str], None]) -> bool:
    """Where there is no destination yet, it appears at once, complete."""
    if os.path.lexists(dest):
        return False
    dest.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        merger = _Merger(tree, dest.parent, stack)
        made = merger.work.path / "whole"
        made.mkdir(mode=0o777)
        for name in tree.entries:
            merger.fresh(name, os.fsencode(made) + b"/" + name)
        at("merge")
        try:
            os.rename(made, dest)
        except OSError as error:
            if error.errno not in _NOT_FREE:
                raise
            return False  # somebody else made it meanwhile: merge into theirs
        merger.settle(dest)
    return True


def fingerprint(tree: Tree, dest: Path) -> str | None:
    """What identifies the merged files as the very ones a merge left; None when one is missing.

    The change time cannot be set by anybody, so an edited file is noticed even when size and modification time are as
    before (flytekit gives every file the same modification time).
    """
    prefix = os.fsencode(dest) + b"/"
    facts = [tree.key]
    parents = {name.rpartition(b"/")[0] for name in tree.entries}
    try:
        for name, entry in tree.entries.items():
            if entry.kind != DIRECTORY:
                found = os.lstat(prefix + name)
                facts.append(f"{found.st_ino} {found.st_ctime_ns} {found.st_size}")
            elif name not in parents and not stat.S_ISDIR(os.stat(prefix + name).st_mode):
                return None  # one that holds something is there when that is
    except OSError:
        return None
    return hashlib.sha256(";".join(facts).encode()).hexdigest()


def _by_top(entries: dict[bytes, TreeEntry]) -> Iterable[tuple[bytes, list[bytes]]]:
    groups: dict[bytes, list[bytes]] = {}
    for name in entries:
        groups.setdefault(name.partition(b"/")[0], []).append(name)
    return groups.items()


class _Merger:
    """One merge: where temporary files go, and whether links work."""

    def __init__(self, tree: Tree, dest: Path, stack: ExitStack) -> None:
        self._entries = tree.entries
        self._source = os.fsencode(tree.path) + b"/"
        self._dest = os.fsencode(dest) + b"/"
        self._stack = stack
        self._copying = False
        self._serial = count()
        self._opened: set[bytes] = set()
        self._replaced: dict[bytes, set[bytes]] = {}
        self._made: dict[bytes, bytes] = {}
        self.changed: dict[bytes, None] = {}
        # Inside the destination: a rename is atomic only within one file system.
        self.work = stack.enter_context(WorkDir(dest))
        self.work.sweep(everybodys=is_local(dest))

    def prepare(self, top: bytes, names: list[bytes]) -> None:
        """Make what :meth:`subtree` and :meth:`entry` will put into the destination; nothing there changes.

        Raises:
            PathBlockedError: something is in the way that tar would not replace either.
            OSError: no room for it.
        """
        if self._entries[top].kind == DIRECTORY and not os.path.lexists(self._dest + top):
            self._made[top] = self._temporary()
            for name in names:
                self.fresh(name, self._made[top] + name[len(top) :])
            return
        for name in names:
            look(self._dest + name, self._entries[name])
        for name in names:
            if self._entries[name].kind != DIRECTORY:
                self._made[name] = self._temporary()
                self.fresh(name, self._made[name])

    def _temporary(self) -> bytes:
        return os.fsencode(self.work.path) + b"/" + str(next(self._serial)).encode()

    def told(self, error: OSError | SafedistError) -> SafedistError:
        """The error, with what has been changed before it."""
        dest = Path(os.fsdecode(self._dest))
        failed = disk_failed(error, dest, "", "Putting the code there") if isinstance(error, OSError) else error
        changed = (
            f"{len(self.changed)} of {len(self._entries)} entries, the last {os.fsdecode(next(reversed(self.changed)))}"
        )
        return type(failed)(
            failed.what,
            where={**failed.where, "changed": changed},
            seen=failed.seen,
            expected=failed.expected,
            hint=failed.hint,
        )

    def subtree(self, top: bytes, names: list[bytes]) -> bool:
        """Publish a directory that the destination lacks, with all that is below it, by one rename."""
        made = self._made.pop(top, None) if self._entries[top].kind == DIRECTORY else None
        if made is None:
            return False
        try:
            os.rename(made, self._dest + top)
        except OSError as error:
            if error.errno not in _NOT_FREE:
                raise
            return False
        self.changed |= dict.fromkeys(names)
        return True

    def fresh(self, name: bytes, path: bytes) -> None:
        """Make one entry at ``path``, in a directory that nobody else sees."""
        entry = self._entries[name]
        if entry.kind == DIRECTORY:
            os.mkdir(path)
            return
        if entry.kind != SYMLINK and not self._copying:
            try:
                os.link(self._source + name, path, follow_symlinks=False)
            except OSError as error:
                if error.errno == errno.EMLINK:
                    self._copy(name, entry, path)
                    return
                if error.errno not in _NO_LINKS:
                    raise
                self._copying = True
            else:
                return
        self._copy(name, entry, path)

    def entry(self, name: bytes) -> None:
        """Bring one entry into the live destination."""
        try:
            self._bring(name)
        except PermissionError:
            if not self._open_up(name):
                raise
            self._bring(name)

    def _bring(self, name: bytes) -> None:
        if self._entries[name].kind == DIRECTORY:
            self._directory(name)
        else:
            self._replace(name, self.work)
            if name.endswith(b".py"):
                parent, _, leaf = name.rpartition(b"/")
                self._replaced.setdefault(parent, set()).add(leaf[:-3])

    def _directory(self, name: bytes) -> None:
        # An implied directory may be the image's link to one, as with tar; a named one replaces the link.
        implied = self._entries[name].mode == IMPLIED
        seen_by, changed = os.stat if implied else os.lstat, partial(self.changed.setdefault, name)
        if not make_directory(self._dest + name, seen_by, replace=not implied, changed=changed):
            raise self._contended(name)

    def _contended(self, name: bytes) -> StagingError:
        return StagingError(
            "The destination directory keeps changing",
            where={"path": os.fsdecode(self._dest + name)},
            expected=f"what one process makes there to stay, and to be seen within {VISIBLE:g} s",
            hint="give each task its own destination directory, or check the health of the shared volume",
        )

    def _replace(self, name: bytes, work: WorkDir) -> None:
        path = self._dest + name
        for _ in range(_TRIES):
            temporary = self._made.pop(name, None)
            if temporary is None:
                temporary = os.fsencode(work.path) + b"/" + str(next(self._serial)).encode()
                self.fresh(name, temporary)
            try:
                os.rename(temporary, path)
            except OSError as error:
                os.unlink(temporary)
                if error.errno == errno.EXDEV:  # a volume is mounted below the destination
                    work = self._stack.enter_context(WorkDir(Path(os.fsdecode(os.path.dirname(path)))))
                elif error.errno in (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
                    self._remove_empty(name)
                else:
                    raise
            else:
                self.changed[name] = None
                # Renaming one hard link over another of the same file does nothing, by POSIX.
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
                return
        raise self._contended(name)

    def _open_up(self, name: bytes) -> bool:
        """Make the directory of ``name`` writable, if it is read-only by the archive's own will: an earlier merge left
        it so, and :meth:`settle` will do it again."""
        parent = name.rpartition(b"/")[0]
        entry = self._entries.get(parent)
        if entry is None or entry.mode == IMPLIED or entry.mode & 0o300 == 0o300 or parent in self._opened:
            return False
        self._opened.add(parent)
        os.chmod(self._dest + parent, entry.mode | 0o700)
        return True

    def _remove_empty(self, name: bytes) -> None:
        try:
            os.rmdir(self._dest + name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise filled(self._dest + name) from error

    def _copy(self, name: bytes, entry: TreeEntry, path: bytes) -> None:
        if entry.kind == SYMLINK:
            os.symlink(entry.target, path)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
            return
        shutil.copyfile(self._source + name, path)
        shutil.copystat(self._source + name, path)

    def finish(self) -> None:
        """What can only be done when every file is in place."""
        self.settle(Path(os.fsdecode(self._dest)))
        self._forget_bytecode()

    def settle(self, dest: Path) -> None:
        """Give directories that the archive names their modes: a read-only one could not have been filled."""
        prefix = os.fsencode(dest) + b"/"
        for name, entry in reversed(self._entries.items()):
            if entry.kind == DIRECTORY and entry.mode != IMPLIED:
                os.chmod(prefix + name, entry.mode)
                os.utime(prefix + name, ns=(entry.mtime_ns, entry.mtime_ns))

    def _forget_bytecode(self) -> None:
        """Remove compiled versions of replaced modules. Python takes bytecode for current when size and modification
        time match, and flytekit gives every file the same time: an edit of equal length would go unnoticed."""
        for parent, stems in self._replaced.items():
            cache = self._dest + (parent + b"/" if parent else b"") + b"__pycache__"
            with suppress(OSError):
                for name in os.listdir(cache):
                    if name.partition(b".")[0] in stems:
                        with suppress(OSError):
                            os.unlink(cache + b"/" + name)
