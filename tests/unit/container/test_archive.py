"""Ordinary archives unpack; damaged and hostile ones are refused whole, naming the member."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import sys
import tarfile
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest
from backports import zstd

from flytekitplugins_safedist.container.archive import INFLATER, Inflate, Limits, unpack
from flytekitplugins_safedist.container.archive.tar import _sum
from flytekitplugins_safedist.errors import ArchiveError
from tests.harness.tarballs import directory, hardlink, member, project, snapshot, symlink, tar, targz


def chunked(data: bytes, size: int = 1 << 18):
    return [data[at : at + size] for at in range(0, len(data), size)]


def unpacked(data: bytes, into: Path, **kwargs):
    return unpack(chunked(data, kwargs.pop("chunk", 1 << 18)), into, label="code.tar.gz", **kwargs)


def refused(data: bytes, into: Path, **kwargs) -> str:
    with pytest.raises(ArchiveError) as caught:
        unpacked(data, into, **kwargs)
    assert "archive=code.tar.gz" in str(caught.value)
    return str(caught.value)


def test_a_project_as_flytekit_packs_it_arrives_whole(tmp_path):
    result = unpacked(project({"main.py": "print(1)", "pkg/__init__.py": "", "pkg/data/x.bin": bytes(3000)}), tmp_path)
    assert (tmp_path / "main.py").read_text() == "print(1)"
    assert (tmp_path / "pkg/__init__.py").read_bytes() == b""
    assert (tmp_path / "pkg/data/x.bin").read_bytes() == bytes(3000)
    assert (tmp_path / "main.py").stat().st_mtime == 315532800
    assert result.files == 3


def test_the_platforms_accelerated_inflater_is_the_one_in_use():
    import platform

    expected = "isal" if platform.machine() in ("x86_64", "aarch64") else "zlib"
    assert expected == INFLATER


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
@pytest.mark.parametrize("chunk", [1, 7, 512, 1 << 20])
def test_chunk_sizes_do_not_matter(tmp_path, inflater, chunk):
    data = project({f"f{n}": os.urandom(n * 37) for n in range(12)})
    unpacked(data, tmp_path, inflater=inflater, chunk=chunk)
    assert len(list(tmp_path.iterdir())) == 12


def test_files_larger_than_any_buffer_pass_through(tmp_path):
    content = os.urandom(5_000_001)
    unpacked(targz([member("big", content), member("after", b"x")]), tmp_path)
    assert (tmp_path / "big").read_bytes() == content
    assert (tmp_path / "after").read_bytes() == b"x"


def test_directories_keep_modes_that_would_forbid_filling_them(tmp_path):
    unpacked(targz([directory("ro", 0o555), member("ro/inner", b"1", mode=0o444)]), tmp_path)
    assert stat.S_IMODE((tmp_path / "ro").stat().st_mode) == 0o555
    assert stat.S_IMODE((tmp_path / "ro/inner").stat().st_mode) == 0o444


def test_a_directory_is_the_makers_alone_until_all_of_it_is_there(tmp_path, monkeypatch):
    real, made = os.mkdir, []
    monkeypatch.setattr(os, "mkdir", lambda path, mode=0o777, **how: made.append(mode) or real(path, mode, **how))
    unpacked(targz([directory("closed", 0o055), member("closed/f", b"x")]), tmp_path)
    assert made == [0o700]
    assert stat.S_IMODE((tmp_path / "closed").stat().st_mode) == 0o055


def test_a_file_that_the_disk_takes_piece_by_piece_is_whole(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    unpacked(project({"main.py": "print('in pieces')"}), tmp_path)
    assert (tmp_path / "main.py").read_text() == "print('in pieces')"


def test_links_that_lead_to_each_other_lead_nowhere_and_are_kept(tmp_path):
    unpacked(targz([symlink("a", "b"), symlink("b", "a"), symlink("c", "c/c")]), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_entries_come_in_an_order_in_which_they_can_be_made_again(tmp_path):
    again = [member("f", b"old"), member("g", b""), member("f", b"new")]
    assert list(unpacked(targz(again), tmp_path).entries) == [b"g", b"f"]


def test_links_inside_the_tree_are_kept(tmp_path):
    unpacked(
        targz([member("a/x", b"1"), symlink("b/l", "../a/x"), symlink("c", "b/l"), hardlink("a/y", "a/x")]), tmp_path
    )
    assert os.readlink(tmp_path / "b/l") == "../a/x"
    assert (tmp_path / "c").read_bytes() == b"1"
    assert (tmp_path / "a/x").stat().st_ino == (tmp_path / "a/y").stat().st_ino


def test_links_that_leave_the_tree_are_kept_as_tar_keeps_them(tmp_path):
    """A project's unignored ``.venv``, and its link to where the data are."""
    there = tmp_path / "mnt"
    (there / "data").mkdir(parents=True)
    (there / "python").write_text("#!")
    out = tmp_path / "tree"
    out.mkdir()
    links = [symlink("l/python", str(there / "python")), symlink("data", str(there / "data")), symlink("up", "../mnt")]
    unpacked(targz([*links, hardlink("again", "data")]), out)
    assert (out / "l/python").read_text() == "#!"
    assert [os.readlink(out / name) for name in ("data", "again", "up")] == [str(there / "data")] * 2 + ["../mnt"]
    assert sorted(os.listdir(there)) == ["data", "python"]
    assert os.listdir(there / "data") == []


def test_a_repeated_file_counts_as_its_last_version(tmp_path):
    unpacked(targz([member("a", b"old"), hardlink("kept", "a"), member("a", b"new")]), tmp_path)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "kept").read_bytes() == b"old"


def test_several_gzip_members_and_zero_padding_are_one_stream(tmp_path):
    raw = tar([member("a", b"1" * 3000)])
    unpacked(gzip.compress(raw[:700]) + gzip.compress(raw[700:]) + bytes(100), tmp_path)
    assert (tmp_path / "a").read_bytes() == b"1" * 3000


def test_an_empty_archive_is_fine(tmp_path):
    assert unpacked(targz([]), tmp_path).entries == {}


# --- hostile -----------------------------------------------------------------------------------------------------
HOSTILE = {
    "absolute path": ([member("/etc/passwd", b"x")], "absolute path", "/etc/passwd"),
    "parent directory": ([member("a/../../b", b"x")], "climbs with '..'", "a/../../b"),
    "just dots": ([member("..", b"x")], "climbs with '..'", ".."),
    "no name": ([member("", b"x")], "has no name", ""),
    "write through an absolute link": ([symlink("l", "/tmp"), member("l/f", b"1")], "lies below", "l/f"),
    "write through a link upwards": ([symlink("a/l", "../.."), member("a/l/f", b"1")], "lies below", "a/l/f"),
    "write over an absolute link": ([symlink("l", "/tmp/x"), member("l", b"1")], "replaces a symbolic", "l"),
    "hard link through a link": ([symlink("l", "/etc"), hardlink("h", "l/passwd")], "names nothing", "h"),
    "hard link outside": ([hardlink("h", "/etc/passwd")], "absolute path", "h"),
    "hard link upwards": ([hardlink("h", "../x")], "climbs with '..'", "h"),
    "hard link to nothing": ([hardlink("h", "later"), member("later", b"")], "names nothing", "h"),
    "hard link to a directory": ([directory("d"), hardlink("h", "d")], "names nothing", "h"),
    "character device": ([member("d", type=tarfile.CHRTYPE)], "a character device", "d"),
    "block device": ([member("d", type=tarfile.BLKTYPE)], "a block device", "d"),
    "pipe": ([member("p", type=tarfile.FIFOTYPE)], "a named pipe", "p"),
    "setuid": ([member("s", b"x", mode=0o4755)], "setuid", "s"),
    "setgid": ([member("s", b"x", mode=0o2755)], "setuid or setgid", "s"),
    "write through a link": ([directory("x"), symlink("l", "x"), member("l/f", b"1")], "lies below", "l/f"),
    "link becomes directory": ([symlink("l", "x"), directory("l"), member("l/f", b"1")], "replaces a symbolic", "l"),
    "directory becomes link": ([directory("d"), symlink("d", "x")], "replaces a directory", "d"),
    "file becomes link": ([member("f", b""), symlink("f", "x")], "replaces a file", "f"),
    "link becomes file": ([symlink("f", "x"), member("f", b"")], "replaces a symbolic", "f"),
    "file as parent": ([member("f", b""), member("f/g", b"")], "lies below", "f/g"),
    "unknown type": ([member("u", type=b"Z")], "unknown type", "u"),
    "multi-volume": ([member("u", type=b"M")], "multi-volume", "u"),
    "name too long": ([member("n/" * 2100 + "x", b"")], "too long", "n/"),
    "too deep": ([member("n/" * 300 + "x", b"")], "too deep", "n/"),
}


@pytest.mark.parametrize(("members", "reason", "named"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_members_are_refused_by_name(tmp_path, members, reason, named):
    into = tmp_path / "in"
    into.mkdir()
    (tmp_path / "canary").write_text("as it was")
    message = refused(targz([member("innocent.py", b"1"), *members]), into)
    assert reason in message
    assert "member='" + named[:2] in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary", "in"]
    assert (tmp_path / "canary").read_text() == "as it was"


def test_a_nul_byte_smuggled_in_by_a_pax_header_is_refused(tmp_path):
    message = refused(targz([member("x", b"", pax_headers={"path": "a\0b"})]), tmp_path)
    assert "NUL" in message


def test_setgid_directories_lose_the_bit_and_nothing_else(tmp_path):
    unpacked(targz([directory("d", 0o2775)]), tmp_path)
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) & 0o7000 == 0


def test_names_that_the_file_system_takes_for_one_are_refused(tmp_path, monkeypatch):
    # A stand-in for a file system that folds case (this kernel has none to mount): the kernel's answer to O_EXCL.
    real = os.open

    def folding(path, flags, *rest, **kwargs):
        if isinstance(path, bytes):
            head, _, leaf = path.rpartition(b"/")
            path = head + b"/" + leaf.lower()
        return real(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", folding)
    message = refused(targz([member("Model.py", b"1"), member("model.py", b"2")]), tmp_path)
    assert "one name on this file system" in message
    assert "'model.py'" in message


# --- damaged -----------------------------------------------------------------------------------------------------
def good() -> bytes:
    return targz([member("a.py", os.urandom(4000)), member("b.py", b"2" * 4000)])


def test_a_truncated_stream_is_refused_wherever_it_is_cut(tmp_path):
    data = good()
    for cut in [0, 1, 5, 10, 11, len(data) // 2, len(data) - 9, len(data) - 8, len(data) - 4, len(data) - 1]:
        into = tmp_path / str(cut)
        into.mkdir()
        assert "truncated" in refused(data[:cut], into)


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_a_wrong_checksum_behind_a_complete_archive_is_noticed(tmp_path, inflater):
    data = bytearray(good())
    data[-6] ^= 1  # the CRC; tarfile and "tar" in a pipe that ends early never look at it
    assert "fails its checksum" in refused(bytes(data), tmp_path, inflater=inflater)


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_a_wrong_length_behind_a_complete_archive_is_noticed(tmp_path, inflater):
    data = bytearray(good())
    data[-2] ^= 1
    assert "fails its checksum" in refused(bytes(data), tmp_path, inflater=inflater)


def test_garbage_behind_the_gzip_stream_is_refused(tmp_path):
    assert "trailing garbage" in refused(good() + b"garbage", tmp_path)


def test_garbage_behind_zero_padding_is_refused(tmp_path):
    assert "trailing garbage" in refused(good() + bytes(20) + b"garbage", tmp_path)


def test_garbage_behind_the_tar_end_mark_is_refused(tmp_path):
    assert "trailing garbage" in refused(gzip.compress(tar([member("a", b"1")]) + b"x" * 512), tmp_path)


def test_a_second_archive_behind_the_first_is_refused(tmp_path):
    assert "trailing garbage" in refused(gzip.compress(tar([member("a")]) + tar([member("b")])), tmp_path)


def test_an_archive_without_its_end_mark_is_truncated(tmp_path):
    assert "end mark" in refused(gzip.compress(tar([member("a", b"1")])[:1024]), tmp_path)


@pytest.mark.parametrize("length", [16, 511, 512, 5000])
def test_something_else_than_an_archive_is_named(tmp_path, length):
    message = refused(b"<html>404</html>".ljust(length, b"x"), tmp_path)
    assert "not a tar archive" in message
    assert "<html>40" in message


# --- what tar accepts --------------------------------------------------------------------------------------------
def test_the_root_that_tarfile_writes_for_an_empty_name_is_the_tree_itself(tmp_path):
    (tmp_path / "project/pkg").mkdir(parents=True)
    (tmp_path / "project/pkg/m.py").write_text("1")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        archive.add(tmp_path / "project", arcname="")
    (tmp_path / "into").mkdir()
    unpacked(out.getvalue(), tmp_path / "into")
    assert (tmp_path / "into/pkg/m.py").read_text() == "1"


@pytest.mark.parametrize("mtime", [5e-05, 1e9, 1e-9, -1.5, -100, -100.25])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_times_before_1970_and_with_an_exponent_are_kept(tmp_path, mtime, form):
    unpacked(targz([member("a", mtime=mtime), directory("d")], form), tmp_path)
    kept = mtime if form == tarfile.PAX_FORMAT else int(mtime)
    assert abs((tmp_path / "a").stat().st_mtime_ns - kept * 1e9) <= 1


def test_one_zero_block_at_the_very_end_is_an_end_mark(tmp_path):
    raw = tar([member("a", b"1")])
    unpacked(gzip.compress(raw[: 3 * 512 + 1024]), tmp_path)
    (tmp_path / "2").mkdir()
    unpacked(gzip.compress(raw.rstrip(b"\0").ljust(2560, b"\0")[:2560]), tmp_path / "2")


def test_of_several_long_names_the_last_counts(tmp_path):
    def long(name: str) -> bytes:
        return tar([member(name, b"")], tarfile.GNU_FORMAT)[:1024]

    raw = tar([member("n" * 200, b"1")], tarfile.GNU_FORMAT)
    unpacked(gzip.compress(long("m" * 200) + raw), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 200]


# --- bombs of another kind ---------------------------------------------------------------------------------------
def header_of(flag: bytes, data: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = flag, len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data.ljust(-(-len(data) // 512) * 512, b"\0")


def test_global_headers_take_no_memory(tmp_path):
    record = b"".join(b"%d k%07d=%s\n" % (21, n, b"v" * 8) for n in range(40_000))
    headers = [header_of(b"g", record) for _ in range(3)]
    tracemalloc.start()
    try:
        unpacked(gzip.compress(b"".join(headers) + tar([member("a")])), tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10 << 20


def test_more_extended_headers_than_members_need_are_refused(tmp_path):
    header = header_of(b"x", b"6 a=b\n" * 170_000)
    assert "more extended headers" in refused(gzip.compress(header * 5, 1), tmp_path)


# --- how it is packed --------------------------------------------------------------------------------------------
PACKED = {"gzip": gzip.compress, "zstd": zstd.compress, "plain": lambda raw: raw}


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize("chunk", [1, 3, 4, 512, 1 << 20])
def test_how_an_archive_is_packed_is_told_by_its_content(tmp_path, pack, chunk):
    raw = tar([member("(a", b"1" * 3000), member("b", b"2")])
    result = unpacked(pack(raw), tmp_path, chunk=chunk)
    assert (tmp_path / "(a").read_bytes() == b"1" * 3000
    assert (result.raw, result.files) == (len(raw), 2)
    assert result.compressed == len(pack(raw))


@pytest.mark.parametrize("first", ["\x1f", "(", "(\N{MICRO SIGN}"])
def test_a_plain_archive_may_begin_as_a_packed_one(tmp_path, first):
    unpacked(tar([member(first, b"1")], tarfile.GNU_FORMAT), tmp_path, chunk=1)
    assert (tmp_path / first).read_bytes() == b"1"


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
def test_limits_hold_however_an_archive_is_packed(tmp_path, pack):
    raw = tar([member("zeros", bytes(1 << 20))])
    assert "more than the limit" in refused(pack(raw), tmp_path, limits=Limits(max_bytes=1 << 19))
    (tmp_path / "files").mkdir()
    many = tar([member(f"m{n}") for n in range(11)])
    assert "more members than the limit" in refused(pack(many), tmp_path / "files", limits=Limits(max_files=10))


def test_a_plain_archive_that_is_cut_anywhere_is_truncated(tmp_path):
    raw = tar([member("a", b"1" * 1000), member("b", b"2")], tarfile.GNU_FORMAT)
    for cut in (512, 513, 1000, 1536, 2048, 2049, 2560):
        into = tmp_path / str(cut)
        into.mkdir()
        assert "truncated" in refused(raw[:cut], into)


def test_zstd_that_is_cut_damaged_or_followed_by_something_is_refused(tmp_path):
    options = {zstd.CompressionParameter.checksum_flag: 1}
    data = zstd.compress(tar([member("a", os.urandom(5000))]), options=options)
    wrong = bytearray(data)
    wrong[-2] ^= 1
    cases = {"truncated": data[:-1], "fails its checksum": bytes(wrong), "trailing garbage": data + b"garbage"}
    for number, (said, broken) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        assert said in refused(broken, tmp_path / str(number))


def test_several_zstd_frames_and_skipped_ones_are_one_stream(tmp_path):
    raw = tar([member("a", b"1" * 3000)])
    skipped = struct.pack("<II", 0x184D2A50, 4) + b"note"
    unpacked(skipped + zstd.compress(raw[:700]) + skipped + zstd.compress(raw[700:]), tmp_path, chunk=1)
    assert (tmp_path / "a").read_bytes() == b"1" * 3000


def test_zstd_without_its_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    message = refused(zstd.compress(tar([member("a")])), tmp_path)
    assert "packed with zstd" in message
    assert "flytekitplugins-safedist[zstd]" in message


def test_gzip_of_something_else_than_tar_is_named(tmp_path):
    assert "not a tar archive" in refused(gzip.compress(b"print('hello')\n" * 100), tmp_path)


def test_a_damaged_header_names_its_member(tmp_path):
    raw = bytearray(tar([member("a", b"1"), member("second.py", b"2")], tarfile.GNU_FORMAT))
    raw[1024 + 120] ^= 1
    message = refused(gzip.compress(bytes(raw)), tmp_path)
    assert "checksum" in message
    assert "'second.py'" in message


def test_a_member_that_claims_more_than_there_is(tmp_path):
    info, _ = member("a", b"")
    info.size = 10_000
    raw = info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    assert "truncated" in refused(gzip.compress(raw), tmp_path)


def test_an_extended_header_without_its_member_is_refused(tmp_path):
    raw = tar([member("a", b"", pax_headers={"comment": "x"})], tarfile.PAX_FORMAT)
    assert "without its member" in refused(gzip.compress(raw[:1024] + bytes(1024)), tmp_path)


def test_a_global_header_that_names_every_member_is_refused(tmp_path):
    import io

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "x"}) as archive:
        archive.addfile(member("a")[0])
    assert "global header" in refused(gzip.compress(out.getvalue()), tmp_path)


def test_the_global_comment_that_git_archive_writes_is_ignored(tmp_path):
    import io

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "abc"}) as archive:
        archive.addfile(member("a")[0])
    unpacked(gzip.compress(out.getvalue()), tmp_path)
    assert (tmp_path / "a").exists()


def test_sparse_files_are_refused(tmp_path):
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    assert "sparse" in refused(targz([member("s", b"0\n", pax_headers=headers)]), tmp_path)


# --- limits ------------------------------------------------------------------------------------------------------
def test_a_bomb_stops_at_the_byte_limit_not_at_the_end_of_the_disk(tmp_path):
    message = refused(targz([member("zeros", bytes(3 << 20))]), tmp_path, limits=Limits(max_bytes=1 << 20))
    assert "more than the limit" in message
    assert "SAFEDIST_CODE_MAX_BYTES" in message
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 << 20


def test_a_bomb_stops_at_the_ratio(tmp_path):
    limits = Limits(max_ratio=100, ratio_from=1 << 20)
    assert "suspiciously much" in refused(targz([member("zeros", bytes(8 << 20))]), tmp_path, limits=limits)


def test_the_ratio_does_not_hurt_small_archives_of_empty_files(tmp_path):
    unpacked(targz([member(f"empty{n}") for n in range(3000)]), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3000


def test_a_flood_of_members_stops_at_the_limit(tmp_path):
    message = refused(targz([member(f"f{n}") for n in range(20)]), tmp_path, limits=Limits(max_files=10))
    assert "'f10'" in message
    assert len(list(tmp_path.iterdir())) == 10


def test_a_huge_extended_header_is_refused_before_it_is_read(tmp_path):
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = b"L", 1 << 30
    assert "too large" in refused(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)), tmp_path)


def test_a_deflate_stream_that_never_ends_is_cut_by_the_limit(tmp_path):
    engine = zlib.compressobj(9, zlib.DEFLATED, 31)

    def endless():
        yield engine.compress(tar([member("a", b"")], tarfile.GNU_FORMAT)[:512])
        block = bytes(1 << 20)
        while True:
            yield engine.compress(block)

    with pytest.raises(ArchiveError, match="more than the limit"):
        unpack(endless(), tmp_path, label="x", limits=Limits(max_bytes=8 << 20))


def test_unpacking_uses_no_threads(tmp_path):
    before = threading.active_count()
    seen = []
    unpacked(project({"a": "1", "b": "2"}), tmp_path, on_member=lambda _: seen.append(threading.active_count()))
    assert seen == [before, before]


def test_old_headers_with_signed_checksums_are_read(tmp_path):
    info = tarfile.TarInfo("caf\u00e9")
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT, "utf-8"))
    raw[148:156] = b" " * 8
    signed = sum(struct.unpack("512b", raw))
    raw[148:156] = b"%06o\0 " % signed
    unpacked(gzip.compress(bytes(raw) + bytes(1024)), tmp_path)
    assert snapshot(tmp_path).keys() == {"caf\u00e9"}


@pytest.mark.parametrize("block", [bytes(512), b"\xff" * 512, bytes(range(256)) * 2, b"\xff" * 256 + bytes(256)])
def test_the_fast_sum_of_a_header_is_its_sum(block):
    assert _sum(block) == sum(block)


def test_a_writer_need_not_wait_for_a_whole_piece():
    raw = os.urandom(3 << 20)
    sizes = [len(piece) for piece in Inflate("x", Limits()).run([gzip.compress(raw, 1)])]
    assert sizes[0] < 1 << 17
    assert max(sizes) == 1 << 20
    assert sum(sizes) == len(raw)
