"""A strict reader of tar headers: ustar, pax (POSIX.1-2001) and GNU.

Why not :mod:`tarfile`: with the strict filter and isal it takes five times the processor time (benchmarks/archive.py;
figures in CONTRIBUTING.md), and it forgives what a damaged or forged archive looks like (it ends silently at a bad
header). Formats: POSIX pax(1) "ustar Interchange Format" and "pax Extended Header"; the GNU tar manual, "Basic Tar
Format" and "Large or Negative Values". tests/unit/container/test_archive_properties.py compares every ordinary archive
with GNU tar's own result.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import adler32

from ...errors import ArchiveError
from .feed import Feed
from .limits import EXTENDED_PER_MEMBER, MAX_DEPTH, MAX_EXTENDED_HEADER, MAX_EXTENDED_TOTAL, MAX_PATH

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)

FILE, DIRECTORY, SYMLINK, HARDLINK = "file", "directory", "symbolic link", "hard link"

_KIND = {b"0": FILE, b"\0": FILE, b"7": FILE, b"5": DIRECTORY, b"2": SYMLINK, b"1": HARDLINK}
_REFUSED = {
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
    b"S": "a sparse file",
    b"M": "the continuation of a multi-volume archive",
    b"V": "a volume label",
    b"D": "an incremental dump's directory",
}
_FIELDS = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12s")
_SPACES = b" \0"
_LONG = {b"L": "GNU long name", b"K": "GNU long link"}
_KNOWN = {"path", "linkpath", "size", "mtime"}
"""Keywords of pax that mean something here: owners, comments and extended attributes are not kept."""

_MAX_SECONDS = 1 << 34  # the year 2514: beyond it some file systems refuse, and no clock was right


class Member(NamedTuple):
    """One thing to make, with every extended header applied. ``name`` and ``target`` are relative, ``/``-separated
    bytes without ``.`` or empty parts; for a symbolic link ``target`` is as written."""

    name: bytes
    kind: str
    size: int
    mode: int
    mtime_ns: int
    target: bytes


def members(feed: Feed) -> Iterator[Member]:
    """Every member in order. The consumer must read exactly the padded size of each file from ``feed`` before it asks
    for the next.

    Raises:
        ArchiveError: whatever is not an ordinary archive, naming the member.
    """
    first = True
    allowance = MAX_EXTENDED_TOTAL
    overrides: dict[str, bytes] = {}
    defaults: dict[str, bytes] = {}
    while True:
        block = feed.take(BLOCK)
        if block == ZERO_BLOCK:
            _end(feed, dangling=bool(overrides))
            return
        fields = _FIELDS.unpack(block)
        _verify_checksum(block, fields[6], feed.label, first=first)
        first = False
        flag = fields[7]
        if flag in b"xXgLK":
            size = _number(fields[4], "size", fields[0], feed.label)
            allowance -= size + BLOCK
            if allowance < 0 and size <= MAX_EXTENDED_HEADER:
                raise ArchiveError(
                    "The archive holds more extended headers than its members can need",
                    where={"archive": feed.label},
                    expected=f"at most {MAX_EXTENDED_TOTAL} bytes, and {EXTENDED_PER_MEMBER} for each member",
                )
            _extend(feed, flag, size, overrides, defaults)
            continue
        allowance += EXTENDED_PER_MEMBER
        yield _member(fields, {**defaults, **overrides} if defaults else overrides, feed.label)
        if overrides:
            overrides = {}


def _end(feed: Feed, *, dangling: bool) -> None:
    where = {"archive": feed.label}
    if dangling:
        raise ArchiveError("The archive ends after an extended header without its member", where=where)
    # Two zero blocks are the end; tar takes one for it too where nothing follows.
    if not feed.rest_is_zero():
        raise ArchiveError("The archive has trailing garbage behind its end mark", where=where)


def _sum(block: bytes) -> int:
    """``sum(block)``, five times as fast: the low half of Adler-32 is 1 + the sum of the bytes, modulo 65521, which the
    sum of 256 bytes does not reach (RFC 1950)."""
    return (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF) - 2


@lru_cache(1024)
def _stored(field: bytes) -> tuple[int, int]:
    """The checksum in a header, and what the sum lacks for its own field, which counts as spaces."""
    digits = field.strip(_SPACES)
    stored = int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else -1
    return stored, 8 * 0x20 - sum(field)


def _verify_checksum(block: bytes, field: bytes, label: str, *, first: bool) -> None:
    stored, spaces = _stored(field)
    if _sum(block) + spaces == stored:
        return
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:]) + 8 * 0x20
    if signed == stored:  # SunOS tar summed signed characters; GNU tar accepts both
        return
    if first:
        raise ArchiveError(
            "The archive is not a tar archive",
            where={"archive": label},
            seen=f"first bytes {block[:8]!r}",
            expected="tar, plain or packed with gzip or zstd",
            hint="the object is not a code archive; register the task again",
        )
    raise ArchiveError(
        "The archive is damaged: a header's checksum is wrong",
        where={"archive": label, "member": _shown(block[:100].rstrip(b"\0"))},
        hint="register the task again",
    )


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "surrogateescape")).encode("utf-8", "backslashreplace").decode()


def _bad(what: str, name: bytes, label: str, **facts: Any) -> ArchiveError:
    return ArchiveError(what, where={"archive": label, "member": _shown(name)}, **facts)


def _number(field: bytes, which: str, name: bytes, label: str) -> int:
    value = _value(field)
    if value is None:
        raise _bad(f"The archive is damaged: a header's {which} is not a number", name.rstrip(b"\0"), label, seen=field)
    return value


@lru_cache(1024)  # one mode, one time, few sizes: the same fields over and over
def _value(field: bytes) -> int | None:
    """An octal field, or GNU's base-256 one (first bit set) for what octal cannot hold."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40:  # negative, two's complement
            value -= 1 << (8 * len(field) - 1)
        return value
    digits = field.strip(_SPACES)
    if not digits:
        return 0
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:
        return None


def _extend(feed: Feed, flag: bytes, size: int, overrides: dict[str, bytes], defaults: dict[str, bytes]) -> None:
    """Read a header that speaks about the next member (x, L, K) or all that follow (g)."""
    if not 0 <= size <= MAX_EXTENDED_HEADER:
        raise ArchiveError(
            "An extended header is too large",
            where={"archive": feed.label},
            seen=f"{size} bytes",
            expected=f"at most {MAX_EXTENDED_HEADER}",
        )
    data = feed.take(-(-size // BLOCK) * BLOCK)[:size]
    if flag in b"LK":
        overrides[_LONG[flag]] = data.partition(b"\0")[0]
    elif flag == b"g":
        found = _pax_records(data, feed.label)
        if forged := found.keys() & {"path", "linkpath", "size"}:
            raise ArchiveError(
                "A global header gives every member the same name, link or size",
                where={"archive": feed.label},
                seen=", ".join(sorted(forged)),
            )
        defaults.update(found)
    else:
        overrides.update(_pax_records(data, feed.label))


def _pax_records(data: bytes, label: str) -> Mapping[str, bytes]:
    # flytekit's archives repeat one record, a time, before every file; what is large is not kept.
    return _short_records(data, label) if len(data) <= BLOCK else _parsed_records(data, label)


@lru_cache(16)
def _short_records(data: bytes, label: str) -> Mapping[str, bytes]:
    return _parsed_records(data, label)


def _parsed_records(data: bytes, label: str) -> Mapping[str, bytes]:
    """``"%d %s=%s\\n" % (length, keyword, value)``, over and over; length counts the whole record."""
    records: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        end = at + length
        equals = data.find(b"=", space, end)
        if length < 5 or end > len(data) or equals < 0 or data[end - 1] != 0x0A:
            raise ArchiveError("The archive is damaged: a pax header does not parse", where={"archive": label})
        keyword = data[space + 1 : equals].decode("utf-8", "replace")
        if keyword.startswith("GNU.sparse"):
            raise ArchiveError(
                "The archive holds a sparse file, which safedist does not unpack",
                where={"archive": label},
                hint="pack without tar's --sparse",
            )
        if keyword in _KNOWN:
            records[keyword] = data[equals + 1 : end - 1]
        at = end
    return records


def _member(fields: tuple[bytes, ...], extended: dict[str, bytes], label: str) -> Member:
    name = fields[0].partition(b"\0")[0]
    if fields[9] == b"ustar\0" and fields[15][0]:  # POSIX magic: GNU's own uses the prefix area for times
        name = fields[15].partition(b"\0")[0] + b"/" + name
    target = fields[8].partition(b"\0")[0]
    size = _number(fields[4], "size", name, label)
    if extended:
        # An empty value takes a keyword back. Whatever their order, pax counts before GNU's, and of those the last.
        name = extended.get("path") or extended.get(_LONG[b"L"]) or name
        target = extended.get("linkpath") or extended.get(_LONG[b"K"]) or target
        if extended.get("size"):
            size = _pax_size(extended["size"], name, label)
    flag = fields[7]
    kind = _KIND.get(flag)
    if kind is None:
        raise _bad(
            f"The archive holds {_REFUSED.get(flag, f'a member of unknown type {flag!r}')}",
            name,
            label,
            expected="files, directories, symbolic and hard links",
            hint="leave it out of the code (.flyteignore)",
        )
    if kind == FILE and name.endswith(b"/"):  # before POSIX had directories
        kind = DIRECTORY
    if size < 0 or (size and kind in (SYMLINK, DIRECTORY)):
        raise _bad(f"A {kind} claims a size", name, label, seen=f"{size} bytes")
    mode = _mode(_number(fields[1], "mode", name, label), kind, name, label)
    clean = safe_path(name, label, name)
    if not clean and kind != DIRECTORY:
        raise _bad(f"A {kind} in the archive has no name", name, label)
    if kind == HARDLINK:
        target = safe_path(target, label, name)
        if size:  # pax allows a linked member to carry its data again; nobody needs it, and it hides a second file
            raise _bad("A hard link claims a size", name, label, seen=f"{size} bytes")
    return Member(clean, kind, size, mode, _mtime(fields[5], extended, name, label), target)


def _pax_size(value: bytes, name: bytes, label: str) -> int:
    if not value.isdigit() or len(value) > 19:
        raise _bad("The archive is damaged: a pax header's size is not a number", name, label, seen=value[:32])
    return int(value)


def _mode(mode: int, kind: str, name: bytes, label: str) -> int:
    if kind == FILE and mode & 0o6000:
        raise _bad(
            "The archive holds a setuid or setgid file",
            name,
            label,
            seen=oct(mode & 0o7777),
            hint="chmod ug-s it and register again",
        )
    return mode & 0o777


def _mtime(field: bytes, extended: dict[str, bytes], name: bytes, label: str) -> int:
    if "mtime" not in extended:
        return min(max(_number(field, "mtime", name, label), -_MAX_SECONDS), _MAX_SECONDS) * 1_000_000_000
    value = _nanoseconds(extended["mtime"][:40])
    if value is None:
        raise _bad("The archive is damaged: a pax header's mtime is not a number", name, label)
    return value


@lru_cache(64)
def _nanoseconds(text: bytes) -> int | None:
    seconds, _, fraction = text.partition(b".")
    if seconds.isdigit() and (not fraction or fraction.isdigit()):
        return min(int(seconds[:20]), _MAX_SECONDS) * 1_000_000_000 + int(fraction[:9].ljust(9, b"0"))
    # Before 1970; or with an exponent: tarfile writes what str() makes of a float.
    try:
        value = Decimal(text.decode("ascii"))
        return int(max(min(value, Decimal(_MAX_SECONDS)), Decimal(-_MAX_SECONDS)) * 1_000_000_000)
    except (UnicodeDecodeError, InvalidOperation, ValueError):
        return None


def safe_path(path: bytes, label: str, member: bytes) -> bytes:
    """``path`` without ``.`` and empty parts; b"" is the root of the tree itself.

    Raises:
        ArchiveError: absolute, with ``..`` or NUL, too long or too deep.
    """
    if path[:1] == b"/":
        if not path.strip(b"/"):  # tarfile's arcname="": the tree's own root
            return b""
        raise _bad("The archive holds an absolute path", member, label, seen=_shown(path))
    if len(path) > MAX_PATH:
        raise _bad("A path in the archive is too long", member[:100], label, seen=f"{len(path)} bytes")
    # The common case costs three searches and no list.
    if b".." in path or b"./" in path or b"//" in path or path[-1:] in b"/." or b"\0" in path:
        if b"\0" in path:
            raise _bad("A path in the archive holds a NUL byte", member, label)
        kept = [part for part in path.split(b"/") if part not in (b"", b".")]
        if b".." in kept:
            raise _bad("A path in the archive climbs with '..'", member, label, seen=_shown(path))
        path = b"/".join(kept)
    if (parts := path.count(b"/")) > MAX_DEPTH:
        raise _bad("A path in the archive is too deep", member[:100], label, seen=f"{parts} directories")
    return path
