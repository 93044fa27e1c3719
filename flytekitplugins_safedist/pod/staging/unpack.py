"""A code archive into one private, empty directory: isal (or zlib) inflates and verifies, the rest is here.

How it is packed is told by its content and never by its name: ``flytectl register files`` un-gzips the archive while
it uploads it and keeps its name (flytectl/cmd/register/register_util.go, ``uploadFastRegisterArtifact``), so that a
plain tar is called ``.tar.gz``. Other readers of tar stop at the end mark and never look at the checksum behind it;
here the stream is read to its end, and CRC and length of every gzip member are verified.

Nothing can be written outside the directory, because no name leads out of it: names that climb are refused, and there
is no symbolic link in it until all else is written.
"""

# ruff: noqa: PTH101, PTH102, PTH108, PTH118, PTH120, PTH211
# text paths: Path costs more than the call

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArchiveError
from ...fs.atomic import NO_LINKS

_Gunzip: Any = gzip.GzipFile
_DAMAGE: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
with suppress(ImportError):  # no wheels for every platform; same interface, same checks, two to four times the speed
    from isal import igzip, isal_zlib

    _Gunzip = igzip.IGzipFile
    _DAMAGE = (*_DAMAGE, isal_zlib.error)  # type: ignore[arg-type]  # its stubs call the class an instance

GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to stage one archive. The defaults leave room for any real project and stop a bomb before the disk is full.

    Attributes:
        max_bytes: bytes of the unpacked stream, headers and padding included.
        max_files: files, links and directories.
        max_ratio: unpacked bytes per compressed byte, looked at only beyond ``ratio_from`` unpacked bytes: small
            archives of empty files compress far better than that and hurt nobody.
        ratio_from: unpacked bytes from which the ratio counts.
        deadline: seconds for all waiting for the store.
    """

    max_bytes: int = 64 << 30
    max_files: int = 1_000_000
    max_ratio: float = 200.0
    ratio_from: int = 1 << 28
    deadline: float = 1800.0


class Arriving(io.RawIOBase):
    """The bytes of an archive as they are stored, read in order.

    Args:
        read: gives some from a position on, as many as asked at most; none at the end.
        seen: told each piece.
    """

    def __init__(self, read: Callable[[int, int], bytes], seen: Callable[[bytes], object]) -> None:
        self._read, self._seen, self._position = read, seen, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes so far."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As of every raw stream."""
        data = self._read(self._position, len(buffer))
        self._seen(data)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class Stream:
    """The bytes of an archive, unpacked, verified and within the limits; read once, forward.

    Args:
        packed: the bytes as they are stored.
        label: the archive, for messages.
        options: its limits.
        gzipped: whether they are packed.

    Attributes:
        raw: bytes read so far.
        member: the one that is being read, for messages.
    """

    def __init__(self, packed: Arriving, label: str, options: Options, *, gzipped: bool) -> None:
        self.raw = 0
        self.member = ""
        self._packed, self._label, self._limits = packed, label, options
        buffered = io.BufferedReader(packed, _PIECE)
        self._file: Any = _Gunzip(fileobj=buffered, mode="rb") if gzipped else buffered

    def read(self, size: int) -> bytes:
        """So many bytes; less at the end.

        Raises:
            ArchiveError: they are damaged, truncated, or over the limits.
        """
        try:
            data: bytes = self._file.read(size)
        except EOFError as error:
            raise self.damaged("The archive is truncated: its gzip stream ends early", error) from error
        except _DAMAGE as error:
            what = "The archive is damaged: its gzip stream does not decode, fails its checksum, or has something else"
            raise self.damaged(f"{what} behind it", error) from error
        self.raw += len(data)
        if self.raw > self._limits.max_bytes or self.raw > self._limits.ratio_from:
            self._check()
        return data

    def exactly(self, size: int) -> bytes:
        """So many bytes.

        Raises:
            ArchiveError: as :meth:`read`; or there are less.
        """
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[bytes]:
        """So many bytes, in pieces.

        Raises:
            ArchiveError: as :meth:`read`; or there are less.
        """
        while size:
            data = self.read(min(size, _PIECE))
            if not data:
                raise self.damaged("The archive is truncated: it ends without its end mark")
            size -= len(data)
            yield data

    def through(self) -> None:
        """Read to the end of what is no tar archive.

        Raises:
            ArchiveError: as :meth:`read`; or there is nothing.
        """
        while self.read(_PIECE):
            pass
        if not self.raw:
            raise self.damaged("The archive is truncated: there is nothing in it")

    def end(self) -> None:
        """Read what is behind the end mark: nothing but zeros.

        Raises:
            ArchiveError: as :meth:`read`; or it is something.
        """
        while data := self.read(_PIECE):
            if data.count(0) != len(data):
                raise self.damaged("The archive is damaged: it has something behind its end mark")

    def damaged(self, what: str, error: object = None) -> ArchiveError:
        """The refusal of an archive that is not as it was made."""
        return self.refused(
            what,
            seen=str(error) if error else f"{self.raw} bytes",
            expected="tar, plain or packed with gzip",
            hint="register the task again; if it repeats, the upload or a proxy cuts objects short",
        )

    def refused(self, what: str, **facts: Any) -> ArchiveError:
        """A refusal of the archive, with the member where it is one's."""
        member = {"member": repr(self.member)} if self.member else {}
        facts.setdefault("hint", "leave that out of the code (.flyteignore)")
        return ArchiveError(what, where={"archive": self._label, **member, "host": os.uname().nodename}, **facts)

    def _check(self) -> None:
        limits, compressed = self._limits, self._packed.tell()
        if self.raw > limits.max_bytes:
            raise self.refused(
                "The archive unpacks to more than the limit",
                seen=f"more than {limits.max_bytes} bytes",
                hint="keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_BYTES",
            )
        if self.raw > limits.max_ratio * compressed:
            raise self.refused(
                "The archive unpacks to suspiciously much for its size",
                seen=f"{self.raw} bytes from {compressed}",
                expected=f"at most {limits.max_ratio:g} times",
                hint="if it is meant to be so, raise SAFEDIST_CODE_MAX_RATIO",
            )


# --- tar (POSIX.1-2001 pax, "ustar Interchange Format"; GNU tar's long names and base-256 numbers) --------------------
_BLOCK = 512
_FILES, _LINK, _SYMLINK, _DIRECTORY, _SPARSE = (b"0", b"\0", b"7"), b"1", b"2", b"5", b"S"
_LONG_NAME, _LONG_TARGET, _RECORDS, _RECORDS_OF_ALL = b"L", b"K", b"x", b"g"
_LONGEST_HEADER = 1 << 20
"""Bytes of the names and attributes of one member: more is no path of a program's, but a way to fill memory."""
_RECORD = re.compile(rb"(\d{1,7}) ([^=]{1,200})=")


@dataclass(frozen=True)
class Member:
    """One member of a tar archive.

    Attributes:
        name: as it is written.
        kind: of its type, one byte.
        mode: permission bits.
        size: bytes of its content.
        target: of a link.
    """

    name: str
    kind: bytes
    mode: int
    size: int
    target: str


def members(stream: Stream) -> Iterator[Member]:
    """The members of a tar archive, up to its end mark. Of a file the content is to be read from the stream before the
    next one is asked for.

    Raises:
        ArchiveError: it is none, or damaged.
    """
    everywhere: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    while (header := stream.exactly(_BLOCK)).count(0) != _BLOCK:
        if sum(header) - sum(header[148:156]) + 8 * ord(" ") != _number(stream, header[148:156]):
            raise stream.damaged("The archive is no tar archive, or damaged: a header's sum is wrong")
        kind = header[156:157]
        if kind not in (_LONG_NAME, _LONG_TARGET, _RECORDS, _RECORDS_OF_ALL):
            member = _member(stream, header, everywhere | own)
            own = {}
            stream.member = member.name
            yield member
            stream.member = ""
            stream.exactly(-member.size % _BLOCK if member.kind in _FILES else 0)
            continue
        size = _number(stream, header[124:136])
        if size > _LONGEST_HEADER:
            raise stream.refused("A header of the archive is too long", seen=f"{size} bytes")
        text = stream.exactly(size + -size % _BLOCK)[:size]
        if kind in (_LONG_NAME, _LONG_TARGET):
            own[b"path" if kind == _LONG_NAME else b"linkpath"] = text
        else:
            (own if kind == _RECORDS else everywhere).update(_records(stream, text))


def _member(stream: Stream, header: bytes, records: dict[bytes, bytes]) -> Member:
    path, kind = header[:100], header[156:157]
    if header[257:263] == b"ustar\0" and header[345]:  # GNU has other things there
        path = header[345:500].partition(b"\0")[0] + b"/" + path
    name = _text(records.get(b"path", path))
    if any(key.startswith(b"GNU.sparse.") for key in records):
        kind = _SPARSE
    elif kind == b"\0" and name.endswith("/"):  # from before directories had a kind
        kind = _DIRECTORY
    size = records.get(b"size", b"")
    if size and not size.isdigit():
        raise stream.damaged("The archive is damaged: a header's record is no number")
    return Member(
        name=name,
        kind=kind,
        mode=_number(stream, header[100:108]) & 0o777,
        size=int(size) if size else _number(stream, header[124:136]),
        target=_text(records.get(b"linkpath", header[157:257])),
    )


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(stream: Stream, field: bytes) -> int:
    """Octal digits, or, where the first bit is set, what they have no room for, in binary."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise stream.damaged("The archive is damaged: a header's number is none")
    return int(digits or b"0", 8)


def _records(stream: Stream, text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a pax header: ``LENGTH KEY=VALUE\\n``."""
    at = 0
    while at < len(text):
        found = _RECORD.match(text, at)
        end = at + int(found[1]) if found else 0
        if found is None or end < found.end() or text[end - 1 : end] != b"\n":
            raise stream.damaged("The archive is damaged: a header's records cannot be read")
        yield found[2], text[found.end() : end - 1]
        at = end


# --- on the disk ------------------------------------------------------------------------------------------------------
_DEEPEST = 200
"""Directories above a member."""

_OF_A_NAME = (errno.ENAMETOOLONG, errno.EEXIST)
"""What the kernel says of a member's name, where nobody but this archive has made anything: it is too long, or for this
file system the same as another one's."""


class Unpacking:
    """One archive on its way into an empty, private directory.

    Args:
        stream: of the archive.
        into: the directory, as it was made: its mode says which bits the user's umask leaves.
        most: files, links and directories at most.

    Attributes:
        files: paths of all files and links, relative to the directory.
    """

    def __init__(self, stream: Stream, into: Path, most: int) -> None:
        self.files: set[str] = set()
        self._stream, self._into, self._most = stream, str(into), most
        self._allowed = stat.S_IMODE(into.stat().st_mode)
        self._directories = {""}
        self._links: dict[str, str] = {}
        """Symbolic ones, made last."""

    def run(self) -> None:
        """Unpack all of it.

        Raises:
            ArchiveError: it is refused, whole; what stands in the directory is to be thrown away.
            OSError: of the disk.
        """
        for member in members(self._stream):
            if len(self.files) + len(self._links) + len(self._directories) > self._most:
                self._stream.member = ""
                raise self._stream.refused(
                    "The archive holds more files than the limit",
                    expected=f"at most {self._most}",
                    hint="keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_FILES",
                )
            try:
                self._make(self._inside(member.name), member)
            except OSError as error:
                if error.errno not in _OF_A_NAME:
                    raise
                why = error.strerror
                raise self._stream.refused("The archive holds a name that is none here", seen=why) from error
        for path, target in self._links.items():
            os.symlink(target, os.path.join(self._into, path))
        self._stream.end()
        self.files |= self._links.keys()

    def _make(self, path: str, member: Member) -> None:
        """Make a member, in the place of what an earlier one has made of the path: the last one counts."""
        at = os.path.join(self._into, path)
        if member.kind == _DIRECTORY:
            self._make_directories(path)
            if path:
                os.chmod(at, member.mode & self._allowed | stat.S_IRWXU)
            return
        self._make_directories(os.path.dirname(path))
        if path in self._directories:
            raise self._stream.refused("The archive holds a file or a link where it holds a directory, too")
        target = self._inside(member.target) if member.kind == _LINK else ""
        if target and target == path:
            return
        self._links.pop(path, None)
        if path in self.files:
            os.unlink(at)
            self.files.discard(path)
        if member.kind == _SYMLINK:
            self._links[path] = member.target
        elif member.kind == _LINK and target in self._links:
            self._links[path] = self._links[target]
        elif member.kind == _LINK:
            self._link(path, target)
        elif member.kind in _FILES:
            self._write(member, at)
            self.files.add(path)
        else:
            raise self._stream.refused("The archive holds a device, a pipe, or a file with holes")

    def _inside(self, name: str) -> str:
        """The path of a member below the directory: absolute names are taken for relative ones, as tar does."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self._stream.refused("The archive holds a name that leads out of the directory")
        if len(parts) > _DEEPEST:
            raise self._stream.refused("The archive holds directories in directories without end", seen=len(parts))
        return "/".join(parts)

    def _make_directories(self, path: str) -> None:
        missing = []
        while path not in self._directories:
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            if each in self._links or each in self.files:
                raise self._stream.refused("The archive holds a directory where it holds a file or a link, too")
            os.mkdir(os.path.join(self._into, each), self._allowed | stat.S_IRWXU)
            self._directories.add(each)

    def _write(self, member: Member, at: str) -> None:
        file = os.open(at, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, member.mode)
        try:
            for piece in self._stream.pieces(member.size):
                written = os.write(file, piece)
                while written < len(piece):
                    written += os.write(file, piece[written:])
        finally:
            os.close(file)

    def _link(self, path: str, target: str) -> None:
        """A hard link to a file of the archive; a copy where the file system has none."""
        if target not in self.files:
            raise self._stream.refused("The archive holds a hard link to what is not in it", seen=repr(target))
        source, at = (os.path.join(self._into, name) for name in (target, path))
        try:
            os.link(source, at)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            shutil.copy2(source, at)
        self.files.add(path)
