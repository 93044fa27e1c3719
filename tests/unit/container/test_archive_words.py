"""Every word of a refusal, and every entry of a tree."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.container.archive import Limits, unpack
from flytekitplugins_safedist.container.archive.limits import (
    MAX_DEPTH,
    MAX_EXTENDED_HEADER,
    MAX_EXTENDED_TOTAL,
    MAX_PATH,
)
from flytekitplugins_safedist.container.archive.tar import _MAX_SECONDS, safe_path
from flytekitplugins_safedist.container.archive.unpack import IMPLIED, TreeEntry
from flytekitplugins_safedist.errors import ArchiveError
from tests.harness.tarballs import directory, hardlink, member, symlink, tar


def raw(name: str = "m", data: bytes = b"", **fields: bytes) -> bytes:
    """A member whose header has these bytes in these fields, and a checksum that is right."""
    places = {"mode": (100, 8), "size": (124, 12), "mtime": (136, 12), "flag": (156, 1), "target": (157, 100)}
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    for field, text in fields.items():
        at, length = places[field]
        header[at : at + length] = text.ljust(length, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data.ljust(-(-len(data) // 512) * 512, b"\0")


def pax(*records: bytes) -> bytes:
    """An extended header of these records, and a member."""
    return raw("x", b"".join(records), size=b"%o" % len(b"".join(records)), flag=b"x") + raw()


END = bytes(1024)
REFUSED = {
    "absolute path": (
        tar([member("/etc/passwd", b"x")]),
        ("The archive holds an absolute path [archive=code.tar.gz, member='/etc/passwd'] (seen: '/etc/passwd')"),
    ),
    "parent directory": (
        tar([member("a/../../b", b"x")]),
        ("A path in the archive climbs with '..' [archive=code.tar.gz, member='a/../../b'] (seen: 'a/../../b')"),
    ),
    "no name": (tar([member("", b"x")]), ("A file in the archive has no name [archive=code.tar.gz, member='']")),
    "a NUL in a name": (
        tar([member("x", b"", pax_headers={"path": "a\0b"})]),
        ("A path in the archive holds a NUL byte [archive=code.tar.gz, member='a\\x00b']"),
    ),
    "too long a name": (
        tar([member("n/" * 2100 + "x", b"")]),
        ("A path in the archive is too long [archive=code.tar.gz, member='" + "n/" * 50 + "'] (seen: 4201 bytes)"),
    ),
    "too deep a name": (
        tar([member("n/" * 300 + "x", b"")]),
        ("A path in the archive is too deep [archive=code.tar.gz, member='" + "n/" * 50 + "'] (seen: 300 directories)"),
    ),
    "link to nothing": (
        tar([symlink("l", "")]),
        "The archive holds a symbolic link without a target [archive=code.tar.gz, member='l'] (seen: -> '')",
    ),
    "hard link to nothing": (
        tar([hardlink("h", "later")]),
        ("A hard link names nothing that the archive made before it [archive=code.tar.gz, member='h'] (seen: 'later')"),
    ),
    "hard link outside": (
        tar([hardlink("h", "../x")]),
        ("A path in the archive climbs with '..' [archive=code.tar.gz, member='h'] (seen: '../x')"),
    ),
    "hard link with a size": (
        raw("h", size=b"5", flag=b"1", target=b"h"),
        ("A hard link claims a size [archive=code.tar.gz, member='h'] (seen: 5 bytes)"),
    ),
    "symbolic link with a size": (
        raw("s", size=b"5", flag=b"2", target=b"h"),
        ("A symbolic link claims a size [archive=code.tar.gz, member='s'] (seen: 5 bytes)"),
    ),
    "file of a negative size": (
        raw("f", size=b"\xff" * 12),
        ("A file claims a size [archive=code.tar.gz, member='f'] (seen: -1 bytes)"),
    ),
    "device": (
        tar([member("d", type=tarfile.CHRTYPE)]),
        (
            "The archive holds a character device [archive=code.tar.gz, member='d'] (expected: files, "
            "directories, symbolic and hard links). Next step: leave it out of the code (.flyteignore)"
        ),
    ),
    "unknown type": (
        tar([member("u", type=b"Z")]),
        (
            "The archive holds a member of unknown type b'Z' [archive=code.tar.gz, member='u'] (expected: files, "
            "directories, symbolic and hard links). Next step: leave it out of the code (.flyteignore)"
        ),
    ),
    "setuid": (
        tar([member("s", b"x", mode=0o4755)]),
        (
            "The archive holds a setuid or setgid file [archive=code.tar.gz, member='s'] (seen: 0o4755). Next "
            "step: chmod ug-s it and register again"
        ),
    ),
    "below a file": (
        tar([member("f", b""), member("f/g", b"")]),
        ("A member lies below what the archive made a file [archive=code.tar.gz, member='f/g'] (seen: 'f')"),
    ),
    "below a link": (
        tar([symlink("f", "x"), member("f/a/g", b"")]),
        ("A member lies below what the archive made a symbolic link [archive=code.tar.gz, member='f/a/g'] (seen: 'f')"),
    ),
    "link over a file": (
        tar([member("f", b""), symlink("f", "x")]),
        ("A member replaces a file of the same name [archive=code.tar.gz, member='f'] (seen: symbolic link)"),
    ),
    "directory over a link": (
        tar([symlink("l", "x"), directory("l")]),
        ("A member replaces a symbolic link of the same name [archive=code.tar.gz, member='l'] (seen: directory)"),
    ),
    "size that is no number": (
        raw("m\0\0", size=b"9"),
        (
            "The archive is damaged: a header's size is not a number [archive=code.tar.gz, member='m'] (seen: "
            "b'9\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00')"
        ),
    ),
    "mode that is no number": (
        raw("m", mode=b"x"),
        (
            "The archive is damaged: a header's mode is not a number [archive=code.tar.gz, member='m'] (seen: "
            "b'x\\x00\\x00\\x00\\x00\\x00\\x00\\x00')"
        ),
    ),
    "time that is no number": (
        raw("m", mtime=b"x"),
        (
            "The archive is damaged: a header's mtime is not a number [archive=code.tar.gz, member='m'] (seen: "
            "b'x\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00')"
        ),
    ),
    "pax size that is no number": (
        pax(b"10 size=x\n"),
        ("The archive is damaged: a pax header's size is not a number [archive=code.tar.gz, member='m'] (seen: b'x')"),
    ),
    "pax size that is too long": (
        pax(b"29 size=12345678901234567890\n"),
        (
            "The archive is damaged: a pax header's size is not a number [archive=code.tar.gz, member='m'] (seen:"
            " b'12345678901234567890')"
        ),
    ),
    "pax time that is no number": (
        pax(b"11 mtime=x\n"),
        ("The archive is damaged: a pax header's mtime is not a number [archive=code.tar.gz, member='m']"),
    ),
    "sparse file": (
        pax(b"22 GNU.sparse.major=1\n"),
        (
            "The archive holds a sparse file, which safedist does not unpack [archive=code.tar.gz]. Next step: "
            "pack without tar's --sparse"
        ),
    ),
    "too large an extended header": (
        raw("x", size=b"7777777777", flag=b"x"),
        ("An extended header is too large [archive=code.tar.gz] (seen: 1073741823 bytes; expected: at most 1048576)"),
    ),
    "negative extended header": (
        raw("x", size=b"\xff" * 12, flag=b"L"),
        ("An extended header is too large [archive=code.tar.gz] (seen: -1 bytes; expected: at most 1048576)"),
    ),
    "global header for names": (
        raw("x", b"11 path=xx\n10 size=1\n", size=b"25", flag=b"g") + raw(),
        ("A global header gives every member the same name, link or size [archive=code.tar.gz] (seen: path, size)"),
    ),
    "extended header without its member": (
        pax(b"11 mtime=1\n")[:1024],
        ("The archive ends after an extended header without its member [archive=code.tar.gz]"),
    ),
    "no end mark": (
        raw()[:512] * 2 + b"x",
        (
            "The archive is truncated: the tar stream ends inside a member or without its end mark "
            "[archive=code.tar.gz]. Next step: register the task again"
        ),
    ),
    "checksum": (
        raw("a") + raw("b")[:-5] + b"12345",
        (
            "The archive is damaged: a header's checksum is wrong [archive=code.tar.gz, member='b']. Next step: "
            "register the task again"
        ),
    ),
    "not a tar archive": (
        b"<html>404</html>" * 40,
        (
            "The archive is not a tar archive [archive=code.tar.gz] (seen: first bytes b'<html>40'; expected: "
            "tar, plain or packed with gzip or zstd). Next step: the object is not a code archive; register the "
            "task again"
        ),
    ),
    "garbage behind the end": (
        raw() + END + b"x" * 512,
        ("The archive has trailing garbage behind its end mark [archive=code.tar.gz]"),
    ),
    "pax header that does not parse": (
        pax(b"8 size=x\n"),
        ("The archive is damaged: a pax header does not parse [archive=code.tar.gz]"),
    ),
    "pax header without a length": (
        pax(b"x size=1\n"),
        ("The archive is damaged: a pax header does not parse [archive=code.tar.gz]"),
    ),
    "pax header without a value": (
        pax(b"8 sizex\n"),
        ("The archive is damaged: a pax header does not parse [archive=code.tar.gz]"),
    ),
    "pax header that is too short for its length": (
        pax(b"99 size=1\n"),
        ("The archive is damaged: a pax header does not parse [archive=code.tar.gz]"),
    ),
}
"""What is refused, and every word that is said about it."""

PACKED = {
    "gzip that is cut": (
        gzip.compress(tar([member("a")]), mtime=0)[:-1],
        (
            "The archive is truncated: its gzip stream ends early [archive=code.tar.gz] (seen: 151 compressed "
            "bytes). Next step: register the task again; if it repeats, the upload or a proxy cuts objects short"
        ),
    ),
    "gzip that is damaged": (
        gzip.compress(tar([member("a")]), mtime=0)[:-8] + bytes(8),
        (
            "The archive is damaged: its gzip stream does not decode or fails its checksum [archive=code.tar.gz] "
            "(seen: Error -3 while decompressing data: incorrect data check). Next step: register the task again"
        ),
    ),
    "garbage behind gzip": (
        gzip.compress(tar([member("a")]), mtime=0) + b"garbage",
        ("The archive has trailing garbage behind its gzip stream [archive=code.tar.gz]"),
    ),
    "garbage behind padding": (
        gzip.compress(tar([member("a")]), mtime=0) + bytes(20) + b"garbage",
        ("The archive has trailing garbage behind its gzip stream [archive=code.tar.gz]"),
    ),
    "a page": (
        b"<html>404</html>",
        (
            "The archive is not a tar archive [archive=code.tar.gz] (seen: 16 bytes, the first b'<html>40'; "
            "expected: tar, plain or packed with gzip or zstd). Next step: the object is not a code archive; "
            "register the task again"
        ),
    ),
    "a bomb": (
        gzip.compress(bytes(300_000), mtime=0),
        (
            "The archive unpacks to suspiciously much for its size [archive=code.tar.gz] (seen: 65536 bytes from "
            "325; expected: at most 10 times). Next step: if it is meant to be so, raise SAFEDIST_CODE_MAX_RATIO"
        ),
    ),
    "a large one": (
        gzip.compress(tar([member("a", os.urandom(300_000))]), mtime=0),
        (
            "The archive unpacks to more than the limit [archive=code.tar.gz] (seen: more than 200000 bytes; "
            "expected: at most 200000 bytes). Next step: keep data out of the code archive (.flyteignore), or "
            "raise SAFEDIST_CODE_MAX_BYTES"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_archive_and_the_member_and_what_was_seen(tmp_path: Path, case: str) -> None:
    data, text = REFUSED[case]
    end = b"" if case == "no end mark" else END
    assert refusal(gzip.compress(data + end), tmp_path) == text


@pytest.mark.parametrize("case", PACKED)
def test_a_refusal_of_how_it_is_packed_says_what_was_seen_and_what_to_do(tmp_path: Path, case: str) -> None:
    data, text = PACKED[case]
    limits = Limits(max_bytes=200_000, max_ratio=10, ratio_from=50_000)
    assert refusal(data, tmp_path, limits=limits, inflater="zlib") == text


def refusal(data: bytes, into: Path, **how: Any) -> str:
    with pytest.raises(ArchiveError) as caught:
        unpack([data], into, label="code.tar.gz", **how)
    return str(caught.value)


def test_a_limit_is_what_is_still_allowed(tmp_path: Path) -> None:
    archive = tar([member("a", b"1"), member("b", b"2")])
    unpack([archive], tmp_path, label="x", limits=Limits(max_bytes=len(archive), max_files=2))
    assert len(list(tmp_path.iterdir())) == 2
    assert refusal(archive, tmp_path / "a", limits=Limits(max_files=0)) == (
        "The archive holds more members than the limit [archive=code.tar.gz, member='a'] (expected: at most 0). "
        "Next step: keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_FILES"
    )
    with pytest.raises(ArchiveError, match="more than the limit"):
        unpack([archive], tmp_path / "b", label="x", limits=Limits(max_bytes=len(archive) - 1))


def test_a_name_that_the_file_system_cannot_hold_is_named_with_its_answer(tmp_path: Path) -> None:
    long = "n" * 256
    for members in ([member(long)], [member(f"{long}/x")], [directory(long)]):
        assert refusal(tar(members), tmp_path) == (
            f"The file system cannot hold the name of a member [archive=code.tar.gz, member='{long}'] "
            "(seen: File name too long)"
        )


def test_names_that_are_one_name_here_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for a file system that folds case: the kernel's answer to O_EXCL.
    real = os.open

    def folding(path: bytes, *rest: int) -> int:
        head, _, leaf = path.rpartition(b"/")
        return real(head + b"/" + leaf.lower(), *rest)

    monkeypatch.setattr(os, "open", folding)
    assert refusal(tar([member("M"), member("m")]), tmp_path) == (
        "Two members of the archive have one name on this file system (upper and lower case, or Unicode forms) "
        "[archive=code.tar.gz, member='m']. Next step: rename one of them"
    )


# --- what is made -----------------------------------------------------------------------------------------------------
TIME = 315532800 * 10**9
EVERYTHING = [
    directory("d", 0o750),
    member("d/f", b"content", mode=0o640),
    member("implied/below/g", b"x" * 512, mode=0o755),
    symlink("l", "d/f"),
    hardlink("h", "d/f"),
    hardlink("hl", "l"),
    hardlink("h", "h"),
]
KINDS = ("file", "directory", "symbolic link", "hard link")


def test_what_stands_in_the_tree_is_told_entry_by_entry(tmp_path: Path) -> None:
    told: list[int] = []
    result = unpack([tar(EVERYTHING)], tmp_path, label="x", on_member=told.append)
    file, folder, link, hard = KINDS
    crc = zlib.crc32(b"content")
    assert result.entries == {
        b"d": TreeEntry(folder, 0, TIME, 0o750, b""),
        b"d/f": TreeEntry(file, 7, TIME, 0o640, b"", crc),
        b"implied": TreeEntry(folder, 0, 0, IMPLIED, b""),
        b"implied/below": TreeEntry(folder, 0, 0, IMPLIED, b""),
        b"implied/below/g": TreeEntry(file, 512, TIME, 0o755, b"", zlib.crc32(b"x" * 512)),
        b"l": TreeEntry(link, 0, TIME, 0o777, b"d/f"),
        b"h": TreeEntry(hard, 7, TIME, 0o640, b"d/f", crc),
        b"hl": TreeEntry(link, 0, TIME, 0o777, b"d/f"),
    }
    assert list(result.entries)[2:4] == [b"implied", b"implied/below"]
    assert told == [1, 2, 3, 4, 5, 6, 7]
    assert result.files == 5
    for name in ("d", "d/f", "l"):
        assert (tmp_path / name).lstat().st_mtime_ns == TIME
    assert os.readlink(tmp_path / "hl") == "d/f"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_where_there_are_no_hard_links_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    content = os.urandom((1 << 20) + 7)
    unpack([tar([member("f", content, mode=0o640), hardlink("h", "f")])], tmp_path, label="x")
    copy = (tmp_path / "h").stat()
    assert (tmp_path / "h").read_bytes() == content
    assert (stat.S_IMODE(copy.st_mode), copy.st_mtime_ns, copy.st_nlink) == (0o640, TIME, 1)


def test_a_disk_that_is_full_is_no_refusal_of_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        unpack([tar([member("f"), hardlink("h", "f")])], tmp_path, label="x")


def test_a_repeated_directory_has_the_last_mode_and_keeps_what_it_holds(tmp_path: Path) -> None:
    unpack([tar([directory("d", 0o755), member("d/f", b"1"), directory("d", 0o700)])], tmp_path, label="x")
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700
    assert (tmp_path / "d/f").read_bytes() == b"1"


def test_a_file_replaces_a_hard_link_and_a_hard_link_a_file(tmp_path: Path) -> None:
    members = [member("a", b"1"), hardlink("b", "a"), member("b", b"2"), member("c", b"3"), hardlink("c", "a")]
    unpack([tar(members)], tmp_path, label="x")
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"1", b"2", b"1"]


@pytest.mark.parametrize(
    ("records", "size", "mtime"),
    [
        (("size=3",), 3, 0),
        (("size=3", "size="), 0, 0),  # an empty value takes it back
        (("mtime=12.3456789",), 0, 12_345_678_900),
        (("mtime=7",), 0, 7_000_000_000),
        (("mtime=-1.5",), 0, -1_500_000_000),
        (("comment=x", "mtime=7"), 0, 7_000_000_000),
    ],
)
def test_what_an_extended_header_says_counts(tmp_path: Path, records: tuple[str, ...], size: int, mtime: int) -> None:
    said = [record.encode() for record in records]
    lengths = [len(record) + len(str(len(record) + 4)) + 2 for record in said]
    header = pax(*(b"%d %s\n" % (length, record) for length, record in zip(lengths, said, strict=True)))
    entries = unpack([header + (b"abc".ljust(512, b"\0") if size else b"") + END], tmp_path, label="x").entries
    assert (entries[b"m"].size, entries[b"m"].mtime_ns) == (size, mtime)


def test_names_and_targets_of_any_length_come_in_an_extended_header(tmp_path: Path) -> None:
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        name, target = "a" * 150, "b" * 180
        into = tmp_path / str(number)
        into.mkdir()
        members = [member(target, b"1"), symlink(name, target), hardlink("h", target)]
        unpack([tar(members, form)], into, label="x")
        assert os.readlink(into / name) == target
        assert (into / "h").read_bytes() == b"1"


def test_a_member_of_posix_has_its_directories_in_the_prefix(tmp_path: Path) -> None:
    name = "p" * 90 + "/" + "n" * 90
    unpack([tar([member(name, b"1")], tarfile.USTAR_FORMAT)], tmp_path, label="x")
    assert (tmp_path / name).read_bytes() == b"1"


def test_a_negative_time_and_a_time_of_another_millennium_are_kept_or_bounded(tmp_path: Path) -> None:
    before = b"\xff" * 11 + b"\x9c"
    data = raw("a", mtime=before) + raw("b", mtime=b"\x80" + b"\x7f" * 11)
    entries = unpack([data + END], tmp_path, label="x").entries
    assert entries[b"a"].mtime_ns == -100 * 10**9
    assert entries[b"b"].mtime_ns == _MAX_SECONDS * 10**9


@pytest.mark.parametrize("spelled", ["{}", "./{}", ".//{}"])
def test_a_path_may_be_as_deep_as_is_said_however_it_is_spelled(spelled):
    def path(directories: int) -> bytes:
        return spelled.format("d/" * directories + "f").encode()

    assert safe_path(path(MAX_DEPTH), "code", b"m") == b"d/" * MAX_DEPTH + b"f"
    with pytest.raises(ArchiveError, match=f"too deep.*{MAX_DEPTH + 1} directories"):
        safe_path(path(MAX_DEPTH + 1), "code", b"m")


def test_a_path_may_be_as_long_as_is_said():
    assert len(safe_path(b"x" * MAX_PATH, "code", b"m")) == MAX_PATH
    with pytest.raises(ArchiveError, match=f"too long.*{MAX_PATH + 1} bytes"):
        safe_path(b"x" * (MAX_PATH + 1), "code", b"m")


@pytest.mark.parametrize("size", [MAX_EXTENDED_HEADER, MAX_EXTENDED_HEADER + 1])
def test_an_extended_header_may_be_as_large_as_is_said(tmp_path, size):
    record = f"{size} comment=".encode().ljust(size - 1, b"c") + b"\n"
    data = pax(record) + bytes(1024)
    if size == MAX_EXTENDED_HEADER:
        assert list(unpack([data], tmp_path, label="code").entries) == [b"m"]
    else:
        with pytest.raises(ArchiveError, match="An extended header is too large"):
            unpack([data], tmp_path, label="code")


@pytest.mark.parametrize("more", [0, 1])
def test_a_member_may_have_as_many_extended_headers_as_is_said(tmp_path, more):
    size = MAX_EXTENDED_TOTAL // 4 - 512
    record = f"{size} comment=".encode().ljust(size - 1, b"c") + b"\n"
    header = raw("x", record, size=b"%o" % size, flag=b"x")
    data = header * 4 + pax(b"8 a=bcd\n") * more + raw() * (1 - more) + bytes(1024)
    if not more:
        assert list(unpack([data], tmp_path, label="code").entries) == [b"m"]
    else:
        with pytest.raises(ArchiveError, match="more extended headers than its members can need"):
            unpack([data], tmp_path, label="code")


@pytest.mark.parametrize("record", [b"4 =\n", b"0 a=b\n", b"3 \n", b"5 a=b"])
def test_a_record_that_is_shorter_than_any_record_can_be_does_not_parse(tmp_path, record):
    with pytest.raises(ArchiveError, match="pax header does not parse"):
        unpack([pax(record) + bytes(1024)], tmp_path, label="code")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["pax first", "GNU first"])
def test_of_two_long_names_that_of_pax_counts_in_whatever_order_they_come(tmp_path, order):
    record = b"12 path=pax\n"
    headers = [raw("x", record, size=b"%o" % len(record), flag=b"x"), raw("L", b"gnu\0", size=b"4", flag=b"L")]
    data = b"".join(headers[at] for at in order) + raw() + bytes(1024)
    assert list(unpack([data], tmp_path, label="code").entries) == [b"pax"]


@pytest.mark.parametrize("record", [b"10 path=x\n", b"14 linkpath=x\n", b"9 size=1\n"])
def test_no_global_header_gives_every_member_one_name_link_or_size(tmp_path, record):
    data = raw("g", record, size=b"%o" % len(record), flag=b"g") + raw() + bytes(1024)
    with pytest.raises(ArchiveError, match="gives every member the same name, link or size"):
        unpack([data], tmp_path, label="code")


def test_how_well_it_is_packed_counts_beyond_the_size_that_is_said(tmp_path):
    data = gzip.compress(tar([member("zeros", bytes(100_000))]))
    for name, more in (("at", 0), ("beyond", -1)):
        (tmp_path / name).mkdir()
        limits = Limits(max_ratio=1.0, ratio_from=len(gzip.decompress(data)) + more)
        if name == "at":
            assert unpack([data], tmp_path / name, label="code", limits=limits).files == 1
        else:
            with pytest.raises(ArchiveError, match="suspiciously much"):
                unpack([data], tmp_path / name, label="code", limits=limits)


def test_what_is_not_packed_at_all_is_as_large_as_it_comes(tmp_path):
    limits = Limits(max_ratio=1.0, ratio_from=0)
    assert unpack([tar([member("f", bytes(3000))])], tmp_path, label="code", limits=limits).files == 1


def test_nothing_comes_after_the_padding_of_a_stream_wherever_it_is_cut(tmp_path):
    packed = gzip.compress(tar([member("f", b"x")]))
    with pytest.raises(ArchiveError, match="trailing garbage behind its gzip stream"):
        unpack([packed + bytes(512), gzip.compress(bytes(512))], tmp_path, label="code")


def test_what_lies_between_the_end_mark_and_zeros_is_garbage_however_it_is_cut(tmp_path):
    with pytest.raises(ArchiveError, match="trailing garbage behind its end mark"):
        unpack([tar([member("f", b"x")]), b"x" * 512, bytes(512)], tmp_path, label="code")


@pytest.mark.parametrize("more", [b"\x1f", b"\x1f\x8b"])
def test_a_stream_that_ends_in_the_first_bytes_of_another_is_truncated(tmp_path, more):
    with pytest.raises(ArchiveError, match="truncated"):
        unpack([gzip.compress(tar([member("f", b"x")])) + more], tmp_path, label="code")
