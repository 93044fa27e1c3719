"""Members onto the disk, below one directory that belongs to us alone.

Safety does not rest on inspecting paths before each write. The directory is private (the caller made it, mode 0700),
every parent is a directory that this run made, every file is created with O_EXCL and O_NOFOLLOW, and no symbolic link
made here is ever followed: a member that lies below one is refused. Where a link leads is its author's business, as
with tar (``.venv/bin/python -> /usr/bin/python3``, ``data -> /mnt/data``): whose code runs next could go there anyway.
"""

# ruff: noqa: PTH101, PTH102, PTH108, PTH211
# bytes paths and descriptors: names in archives need not be text, and Path costs more than the call

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ArchiveError
from .feed import Feed
from .inflate import INFLATER, Inflate, crc32
from .limits import Limits
from .tar import BLOCK, DIRECTORY, FILE, HARDLINK, SYMLINK, Member, _shown, members

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
IMPLIED = -1
"""Mode of a directory that the archive does not name, but implies by what lies below it."""


class TreeEntry(NamedTuple):
    """What stands at one path of the finished tree; ``target`` is a symbolic link's text, ``crc`` a file's CRC-32."""

    kind: str
    size: int
    mtime_ns: int
    mode: int
    target: bytes
    crc: int = 0


@dataclass
class Unpacked:
    """The finished tree.

    Attributes:
        entries: path (bytes, relative) to what is there; directories come before what they hold.
        raw: bytes of the tar stream.
        compressed: bytes of the archive as it came.
    """

    entries: dict[bytes, TreeEntry] = field(default_factory=dict)
    raw: int = 0
    compressed: int = 0

    @property
    def files(self) -> int:
        """Entries that are not directories."""
        return sum(1 for entry in self.entries.values() if entry.kind != DIRECTORY)


def unpack(
    chunks: Iterable[bytes],
    into: Path,
    *,
    label: str,
    limits: Limits | None = None,
    inflater: str = INFLATER,
    on_member: Callable[[int], None] | None = None,
) -> Unpacked:
    """Unpack a tar archive, packed or plain, into the existing, empty, private directory ``into``.

    Args:
        chunks: the archive's bytes in order, in chunks of any size.
        label: how the archive is called in messages.
        on_member: called with the number of members done after each one.

    Raises:
        ArchiveError: the archive is refused, whole; what stands in ``into`` is to be thrown away.
        OSError: the disk is full, or cannot be written.
    """
    limits = limits or Limits()
    inflate = Inflate(label, limits, inflater)
    entries = unpack_tar(inflate.run(chunks), into, label=label, limits=limits, on_member=on_member)
    return Unpacked(entries, inflate.raw, inflate.compressed)


def unpack_tar(
    pieces: Iterator[bytes],
    into: Path,
    *,
    label: str,
    limits: Limits,
    on_member: Callable[[int], None] | None = None,
) -> dict[bytes, TreeEntry]:
    """As :func:`unpack`, from the raw tar stream; returns the entries."""
    feed = Feed(pieces, label)
    writer = _Writer(into, label)
    for count, member in enumerate(members(feed), 1):
        if count > limits.max_files:
            raise ArchiveError(
                "The archive holds more members than the limit",
                where={"archive": label, "member": _shown(member.name)},
                expected=f"at most {limits.max_files}",
                hint="keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_FILES",
            )
        writer.make(member, feed)
        if on_member is not None:
            on_member(count)
    writer.finish()
    return writer.entries


def _umask() -> int:
    """This process's umask, read without changing it: other threads create files too."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    return 0o022


class _Writer:
    """Makes members and remembers what stands where."""

    def __init__(self, into: Path, label: str) -> None:
        self.label = label
        self.entries: dict[bytes, TreeEntry] = {}
        self._root = os.fsencode(into) + b"/"
        self._directories: set[bytes] = {b""}
        self._late: dict[bytes, tuple[int, int]] = {}
        # As GNU tar: root keeps the archive's modes, everybody else's umask applies (--preserve-permissions).
        umask = _umask()
        self._cut = 0 if os.geteuid() == 0 else umask
        self._needs_chmod = umask & ~self._cut

    def make(self, member: Member, feed: Feed) -> None:
        """Create one member, reading its data and padding from ``feed``."""
        parent = member.name.rpartition(b"/")[0]
        if parent not in self._directories:
            self._parents(parent, member)
        try:
            if member.kind == FILE:
                self._file(member, feed)
            elif member.kind == DIRECTORY:
                self._directory(member)
            elif member.kind == SYMLINK:
                self._symlink(member)
            else:
                self._hardlink(member)
        except OSError as error:
            self._explain(error, member)
            raise

    def finish(self) -> None:
        """Give directories their modes: a read-only one could not have been filled."""
        for name, (mode, mtime_ns) in reversed(self._late.items()):
            path = self._root + name
            os.chmod(path, mode)
            os.utime(path, ns=(mtime_ns, mtime_ns))

    def _explain(self, error: OSError, member: Member) -> None:
        """Turn what the kernel says about a name into what it means for the archive; return when it is not that."""
        if error.errno == errno.EEXIST:
            # O_EXCL hit a name that is not in our table: the file system takes two different names for one.
            raise self.refuse(
                "Two members of the archive have one name on this file system (upper and lower case, or Unicode forms)",
                member,
                hint="rename one of them",
            ) from error
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
            raise self.refuse(
                "The file system cannot hold the name of a member", member, seen=error.strerror
            ) from error

    def _parents(self, parent: bytes, member: Member) -> None:
        """Directories that the archive implies without naming them."""
        missing = []
        while parent not in self._directories:
            if parent in self.entries:
                raise self.refuse(
                    f"A member lies below what the archive made a {self.entries[parent].kind}",
                    member,
                    seen=_shown(parent),
                )
            missing.append(parent)
            parent = parent.rpartition(b"/")[0]
        for name in reversed(missing):
            try:
                os.mkdir(self._root + name)
            except OSError as error:
                self._explain(error, member._replace(name=name, kind=DIRECTORY))
                raise
            self._directories.add(name)
            self.entries[name] = TreeEntry(DIRECTORY, 0, 0, IMPLIED, b"")

    def _clear(self, member: Member) -> None:
        """Make room for a repeated member: ``tar --append`` repeats files, and the last one counts. Only like
        replaces like: a link that becomes a directory is how archives write through links."""
        earlier = self.entries.get(member.name)
        if earlier is None:
            return
        if earlier.kind != member.kind and not {earlier.kind, member.kind} == {FILE, HARDLINK}:
            raise self.refuse(f"A member replaces a {earlier.kind} of the same name", member, seen=member.kind)
        os.unlink(self._root + member.name)
        # Re-inserted at the end, so that the order of entries is the order in which they can be made again.
        del self.entries[member.name]

    def _file(self, member: Member, feed: Feed) -> None:
        if member.name in self.entries:
            self._clear(member)
        mode = member.mode & ~self._cut
        crc = 0
        fd = os.open(self._root + member.name, _CREATE, mode)
        try:
            for view in feed.views(member.size):
                crc = crc32(view, crc)
                written = os.write(fd, view)
                while written < len(view):
                    written += os.write(fd, view[written:])
            if mode & self._needs_chmod:
                os.fchmod(fd, mode)
            os.utime(fd, ns=(member.mtime_ns, member.mtime_ns))
        finally:
            os.close(fd)
        if padding := -member.size % BLOCK:
            feed.take(padding)
        self.entries[member.name] = TreeEntry(FILE, member.size, member.mtime_ns, mode, b"", crc)

    def _directory(self, member: Member) -> None:
        if not member.name:  # "./": the tree's own root, whose mode is the caller's
            return
        mode = member.mode & ~self._cut
        earlier = self.entries.get(member.name)
        if earlier is None:
            os.mkdir(self._root + member.name, 0o700)
            self._directories.add(member.name)
        elif earlier.kind != DIRECTORY:
            raise self.refuse(f"A member replaces a {earlier.kind} of the same name", member, seen=DIRECTORY)
        self._late[member.name] = (mode, member.mtime_ns)
        self.entries[member.name] = TreeEntry(DIRECTORY, 0, member.mtime_ns, mode, b"")

    def _symlink(self, member: Member) -> None:
        if not member.target or b"\0" in member.target:
            raise self.refuse(
                "The archive holds a symbolic link without a target", member, seen=f"-> {_shown(member.target)}"
            )
        self._clear(member)
        path = self._root + member.name
        os.symlink(member.target, path)
        os.utime(path, ns=(member.mtime_ns, member.mtime_ns), follow_symlinks=False)
        self.entries[member.name] = TreeEntry(SYMLINK, 0, member.mtime_ns, 0o777, member.target)

    def _hardlink(self, member: Member) -> None:
        original = self.entries.get(member.target)
        if original is None or original.kind == DIRECTORY:
            raise self.refuse(
                "A hard link names nothing that the archive made before it", member, seen=_shown(member.target)
            )
        if member.target == member.name:  # "tar -c f f" stores the second f as a link to the first
            return
        if original.kind == SYMLINK:
            self._symlink(member._replace(kind=SYMLINK, target=original.target))
            return
        self._clear(member)
        source, path = self._root + member.target, self._root + member.name
        try:
            os.link(source, path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            self._copy(source, path, original)  # a file system without hard links
        self.entries[member.name] = original._replace(kind=HARDLINK, target=member.target)

    @staticmethod
    def _copy(source: bytes, path: bytes, original: TreeEntry) -> None:
        with open(source, "rb") as reader, open(os.open(path, _CREATE, 0o600), "wb") as writer:
            while block := reader.read(1 << 20):
                writer.write(block)
            writer.flush()
            os.fchmod(writer.fileno(), original.mode)
            os.utime(writer.fileno(), ns=(original.mtime_ns, original.mtime_ns))

    def refuse(self, what: str, member: Member, **facts: Any) -> ArchiveError:
        """A refusal that names the member."""
        return ArchiveError(what, where={"archive": self.label, "member": _shown(member.name)}, **facts)
