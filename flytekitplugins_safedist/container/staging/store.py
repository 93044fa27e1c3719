"""The node's store of staged trees: published by one rename, found again by content, never changed afterwards.

::

    <store>/                 0700, ours
      locks/                 who is working on what
      work/                  trees being made; nothing in here is ever used
      sources/<key>          which tree an object in a remote store became
      merged/<key>           what a destination looked like after a merge
      trees/<digest>[.n]/    code/ and manifest; complete from the moment it has its name; seen: what was read since

A tree is believed when its manifest says so: same boot (a crash of the machine may lose file contents that were not
yet on disk; asking for the boot is cheaper than fsync on every file), every directory and file with the mode it was
given, and every file with its time and its content (CRC-32: this finds accidents, and the directory is private). A
file that has not changed since it was read is not read again (:mod:`.seen`).
Somebody who writes into a tree in place only makes it unbelievable: the next process makes generation ``.1``.
"""

# ruff: noqa: PTH104, PTH115
# bytes paths and descriptors: names in archives need not be text, and Path costs more than the call

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from ...errors import StagingError
from ..archive import DIRECTORY, FILE, SYMLINK, TreeEntry, crc32
from .keeping import Keep, forget_sources, prune
from .locks import WorkDir, boot_id
from .seen import Seen

_VERSION = 2
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tree:
    """A published tree.

    Attributes:
        path: the directory that holds the code.
        digest: sha256 of the archive it came from.
        raw: bytes it was unpacked from.
        entries: path to what stands there.
    """

    path: Path
    digest: str
    raw: int
    entries: dict[bytes, TreeEntry]

    @property
    def key(self) -> str:
        """Names this tree within the store."""
        return self.path.parent.name


class CodeStore:
    """See the module. ``root`` is made if need be.

    Raises:
        StagingError: the root belongs to somebody else or others can write to it: they could give us their code.
        OSError: it cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = os.lstat(root)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StagingError(
                "The store for staged code cannot be trusted",
                where={"path": root},
                seen=f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}",
                expected=f"a directory of user {os.geteuid()} that nobody else can write",
                hint="remove it, or name another directory with SAFEDIST_CODE_STORE",
            )
        for name in ("locks", "work", "sources", "merged", "trees"):
            with suppress(FileExistsError):
                (root / name).mkdir(mode=0o700)

    @staticmethod
    def default_root(temporary: Path) -> Path:
        """One per user and machine, in a directory for temporary files."""
        return temporary / f"safedist-code-{os.geteuid()}"

    def lock(self, key: str) -> Path:
        """The lock file for work on ``key``."""
        return self.root / "locks" / key

    def work(self) -> WorkDir:
        """A private place on the store's file system."""
        return WorkDir(self.root / "work")

    # --- trees ---------------------------------------------------------------------------------------------------
    def by_source(self, key: str) -> Tree | None:
        """The tree that the object ``key`` became, if it is here and believed."""
        digest = self._read(f"sources/{key}")
        return self.by_digest(digest) if digest and digest.isalnum() else None

    def by_digest(self, digest: str) -> Tree | None:
        """The first believed generation of the archive ``digest``."""
        for place in self._generations(digest):
            tree = _read_tree(place, self.work)
            if tree is not None:
                return tree
            if not os.path.lexists(place):
                return None
        return None

    def publish(self, made: Path, tree: Tree) -> Tree:
        """Give the finished directory ``made`` its name, at once and whole.

        Rename, not copy: a process that imports while a copy runs sees half a package. Rename, not "exists?" and then
        rename: two processes that got past the lock both arrive here, and the kernel lets one of them win.

        Raises:
            OSError: the file system cannot rename directories, or is full.
        """
        for place in self._generations(tree.digest):
            try:
                os.rename(made, place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                winner = _read_tree(place, self.work)
                if winner is not None:
                    return winner
                continue
            return Tree(place / "code", tree.digest, tree.raw, tree.entries)
        raise AssertionError("unreachable: generations do not end")  # pragma: no cover

    def remember_source(self, key: str, digest: str) -> None:
        """From now on :meth:`by_source` finds it."""
        self._write(f"sources/{key}", digest)

    def prune(self, keep: Keep) -> None:
        """Remove what nobody uses and is not to be kept (:mod:`.keeping`), as far as it can be removed."""
        with suppress(OSError), self.work() as work:
            removed = prune(self.root, work, keep)
            if removed:
                forget_sources(self.root, removed)

    # --- merges --------------------------------------------------------------------------------------------------
    def merged(self, key: str) -> str | None:
        """The fingerprint last remembered under ``key``."""
        return self._read(f"merged/{key}")

    def remember_merged(self, key: str, fingerprint: str) -> None:
        """See :meth:`merged`."""
        self._write(f"merged/{key}", fingerprint)

    # -------------------------------------------------------------------------------------------------------------
    def _generations(self, digest: str) -> Iterator[Path]:
        for generation in count():
            yield self.root / "trees" / (f"{digest}.{generation}" if generation else digest)

    def _read(self, name: str) -> str | None:
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except OSError:
            return None  # not there, or not readable: a note that only saves work

    def _write(self, name: str, text: str) -> None:
        with self.work() as work:
            note = work.path / "note"
            note.write_text(text, encoding="utf-8")
            os.rename(note, self.root / name)  # replaced whole: a reader has the old one or the new one


def describe(made: Path, digest: str, raw: int, entries: dict[bytes, TreeEntry]) -> Tree:
    """Write the manifest of the tree in ``made / "code"``; the last step before :meth:`CodeStore.publish`.

    Times and modes are noted as the file system reports them, not as the archive gives them: some keep seconds only,
    some no modes. What it makes of one combination is asked once: flytekit gives every file the same.
    """
    code = made / "code"
    prefix = os.fsencode(code) + b"/"
    kept: dict[tuple[str, int, int], tuple[int, int]] = {}
    seen: dict[bytes, TreeEntry] = {}
    rows = []
    for name, entry in entries.items():
        kind, size, mtime_ns, mode, target, crc = entry
        same = (kind, mtime_ns, mode)
        if same not in kept:
            found = os.lstat(prefix + name)
            kept[same] = found.st_mtime_ns, stat.S_IMODE(found.st_mode)
        mtime_ns, real_mode = kept[same]
        seen[name] = TreeEntry(kind, size, mtime_ns, mode, target, crc)
        rows.append((name.decode("latin-1"), kind, size, mtime_ns, mode, target.decode("latin-1"), crc, real_mode))
    content = {"version": _VERSION, "boot": boot_id(), "digest": digest, "raw": raw, "entries": rows}
    (made / "manifest").write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    return Tree(code, digest, raw, seen)


def _read_tree(place: Path, work: Callable[[], WorkDir]) -> Tree | None:
    """The tree at ``place`` when it is there and to be believed, else None."""
    try:
        content = json.loads((place / "manifest").read_bytes())
        if content["version"] != _VERSION or content["boot"] != boot_id():
            return None
        entries, modes = {}, []
        for name, kind, size, mtime_ns, mode, target, crc, real_mode in content["entries"]:
            entries[name.encode("latin-1")] = TreeEntry(kind, size, mtime_ns, mode, target.encode("latin-1"), crc)
            modes.append(real_mode)
        tree = Tree(place / "code", content["digest"], content["raw"], entries)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tree if _intact(tree, modes, Seen(place, len(entries), work)) else None


def _intact(tree: Tree, modes: list[int], seen: Seen) -> bool:
    prefix = os.fsencode(tree.path) + b"/"
    try:
        for index, ((name, entry), mode) in enumerate(zip(tree.entries.items(), modes, strict=True)):
            found = os.lstat(prefix + name)
            if not _as_made(prefix + name, entry, mode, found):
                return False
            if entry.kind == FILE and not seen.holds(index, found, partial(_has, prefix + name, entry.crc)):
                return False
    except OSError:
        return False
    seen.keep()
    return True


def _as_made(path: bytes, entry: TreeEntry, mode: int, found: os.stat_result) -> bool:
    """As far as that can be told without reading it."""
    if entry.kind == SYMLINK:
        return os.readlink(path) == entry.target
    if stat.S_IMODE(found.st_mode) != mode:
        return False
    if entry.kind == DIRECTORY:
        return stat.S_ISDIR(found.st_mode)
    return stat.S_ISREG(found.st_mode) and found.st_mtime_ns == entry.mtime_ns and found.st_size == entry.size


def _has(path: bytes, crc: int) -> bool:
    return _crc_of(path) == crc


def _crc_of(path: bytes) -> int:
    crc = 0
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while block := os.read(fd, _BLOCK):
            crc = crc32(block, crc)
    finally:
        os.close(fd)
    return crc


def key_of(*parts: object) -> str:
    """A file name for a combination of values."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:40]
