"""Ordinary archives unpack as with GNU tar; mutated ones end with a clear message and touch nothing outside."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flytekitplugins_safedist.archive import Limits, unpack
from flytekitplugins_safedist.errors import ArchiveError
from tests.tarballs import directory, hardlink, member, snapshot, symlink, tar, targz

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Names of every kind that Linux allows: spaces, newlines, quotes, dashes, other scripts, bytes that are not UTF-8.
NAME = st.one_of(
    st.sampled_from(
        [
            "a",
            "b",
            "pkg",
            "__init__.py",
            "-rf",
            " x ",
            "new\nline",
            "'q'",
            "caf\u00e9",
            "cafe\u0301",
            "\u6a21\u578b",
            "..x",
            "x.",
        ]
    ),
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=8).filter(
        lambda name: name not in (".", "..")
    ),
    st.integers(95, 120).map(lambda length: "n" * length),
    st.just(b"\xff\xfe-latin".decode("utf-8", "surrogateescape")),
)
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join).filter(lambda path: len(os.fsencode(path)) < 700)
MODE = st.sampled_from([0o644, 0o600, 0o755, 0o444, 0o640, 0o777])
DATA = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"x" * 511, b"x" * 512, b"x" * 513, b"y" * 70_000]))
ITEM = st.one_of(
    st.tuples(st.just("file"), PATH, MODE, DATA),
    st.tuples(st.just("directory"), PATH, st.sampled_from([0o755, 0o700, 0o555]), st.just(b"")),
    st.tuples(st.just("symlink"), PATH, st.just(0), st.just(b"")),
    st.tuples(st.just("hardlink"), PATH, st.just(0), st.just(b"")),
)
FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def ordinary(items) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Members that a tar program could have written from one real directory, in an order it could have used."""
    members, kinds = [], {}
    for kind, path, mode, data in items:
        parents = [path[:at] for at, letter in enumerate(path) if letter == "/"]
        if path in kinds or any(kinds.get(parent, "directory") != "directory" for parent in parents):
            continue
        if kind == "hardlink":
            files = [name for name, other in kinds.items() if other == "file"]
            if not files:
                continue
            members.append(hardlink(path, files[-1]))
        elif kind == "symlink":
            members.append(symlink(path, "../" * path.count("/") + (next(iter(kinds), "nowhere"))))
        elif kind == "directory":
            members.append(directory(path, mode))
        else:
            members.append(member(path, data, mode=mode))
        for parent in parents:
            kinds[parent] = "directory"
        kinds[path] = kind
    return members


def by_tar(data: bytes, into: Path) -> None:
    into.mkdir()
    subprocess.run(["tar", "-xzf", "-", "-C", into], input=data, check=True, capture_output=True)


def by_us(data: bytes, into: Path) -> None:
    into.mkdir()
    unpack([data], into, label="x")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
@SETTINGS
@given(items=st.lists(ITEM, max_size=12), prefix=st.sampled_from(["", "./"]))
def test_ordinary_archives_unpack_as_with_gnu_tar(form, items, prefix):
    members = ordinary(items)
    for info, _ in members:
        info.name = prefix + info.name
        if info.islnk():
            info.linkname = prefix + info.linkname
    note(str([(info.name, info.type, info.linkname) for info, _ in members]))
    data = targz(members, form)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        by_tar(data, root / "theirs")
        by_us(data, root / "ours")
        assert snapshot(root / "ours") == snapshot(root / "theirs")


@SETTINGS
@given(items=st.lists(ITEM, max_size=12), form=st.sampled_from(["gnu", "pax", "ustar", "oldgnu", "v7"]))
def test_archives_that_gnu_tar_wrote_come_back_as_they_were(items, form):
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        by_us(targz(ordinary(items)), root / "source")
        packed = subprocess.run(
            ["tar", "--format", form, "-czf", "-", "-C", root / "source", "."], capture_output=True, check=False
        )
        if packed.returncode and form in ("ustar", "v7"):
            return  # these formats cannot hold every name, and tar says so
        assert packed.returncode == 0, packed.stderr
        by_us(packed.stdout, root / "ours")
        by_tar(packed.stdout, root / "theirs")
        assert snapshot(root / "ours") == snapshot(root / "theirs")
        assert snapshot(root / "ours") == snapshot(root / "source")


@pytest.mark.parametrize("form", ["gnu", "pax", "posix", "oldgnu"])
def test_names_of_every_length_come_back(tmp_path, form):
    source = tmp_path / "source"
    for length in (1, 98, 99, 100, 101, 154, 155, 156, 200, 255):
        (source / ("d" * length)).mkdir(parents=True)
        (source / ("d" * length) / ("f" * length)).write_text(str(length))
        os.symlink("t" * length, source / f"link{length}")
    packed = subprocess.run(["tar", "--format", form, "-czf", "-", "-C", source, "."], capture_output=True, check=True)
    by_us(packed.stdout, tmp_path / "ours")
    assert snapshot(tmp_path / "ours") == snapshot(source)


def test_flytekits_own_archives_come_back(tmp_path):
    from flytekit.constants import CopyFileDetection
    from flytekit.tools.fast_registration import FastPackageOptions, fast_package

    source = tmp_path / "project"
    (source / "pkg/deep").mkdir(parents=True)
    (source / "pkg/deep/mod.py").write_text("x = 1")
    (source / "pkg/tool.sh").write_text("#!/bin/sh")
    (source / "pkg/tool.sh").chmod(0o755)
    (source / "pkg/link.py").symlink_to("deep/mod.py")
    options = FastPackageOptions([], copy_style=CopyFileDetection.ALL)
    for number, chosen in enumerate((options, None)):
        (tmp_path / f"out{number}").mkdir()
        data = Path(fast_package(source, tmp_path / f"out{number}", options=chosen)).read_bytes()
        by_us(data, tmp_path / f"ours{number}")
        by_tar(data, tmp_path / f"theirs{number}")
        assert snapshot(tmp_path / f"ours{number}") == snapshot(tmp_path / f"theirs{number}")
        assert (tmp_path / f"ours{number}/pkg/deep/mod.py").read_text() == "x = 1"


# --- fuzz --------------------------------------------------------------------------------------------------------
SEEDS = [
    tar(
        [
            member("a/b.py", b"x" * 700, mode=0o755),
            directory("d"),
            symlink("d/l", "../a/b.py"),
            hardlink("h", "a/b.py"),
        ],
        form,
    )
    for form in FORMATS.values()
] + [tar([member("n" * 150 + "/x", b"1"), member("caf\u00e9" * 30, b"2", pax_headers={"comment": "c" * 600})])]

EDIT = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 1 << 16), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 1 << 16), st.integers(1, 1200)),
    st.tuples(st.just("repeat"), st.integers(0, 1 << 16), st.integers(1, 1200)),
    st.tuples(st.just("field"), st.integers(0, 40), st.integers(0, 9)),
)
FIELDS = [
    b"../../x\0",
    b"/abs\0",
    b"\xff" * 8,
    b"\x80" + b"\xff" * 11,
    b"9" * 12,
    b"77777777777\0",
    b"-1\0",
    b"\0" * 8,
    b"2",
    b"L",
]
PLACES = [0, 100, 124, 136, 156, 157, 257, 263, 345]


def mutated(seed: bytes, edits, *, fix_checksums: bool) -> bytes:
    data = bytearray(seed)
    for kind, position, amount in edits:
        at = position % max(len(data), 1)
        if kind == "set" and data:
            data[at] = amount
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + amount]
        elif kind == "repeat":
            data[at:at] = data[at : at + amount]
        elif kind == "field":
            header = (position * 512) % max(len(data) - 511, 1) // 512 * 512
            place = header + PLACES[amount % len(PLACES)]
            data[place : place + len(FIELDS[amount])] = FIELDS[amount]
    if fix_checksums:  # so that the mutation is seen by what lies behind the checksum
        for start in range(0, len(data) - 511, 512):
            block = data[start : start + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(data)


def survives(data: bytes, root: Path) -> None:
    """Unpacked or refused with a message; never anything else, never anything outside."""
    (root / "in").mkdir()
    (root / "canary").write_text("as it was")
    message = "[archive=fuzzed]"
    try:
        unpack([data], root / "in", label="fuzzed", limits=Limits(max_bytes=1 << 22, max_files=200))
    except ArchiveError as refusal:
        message = str(refusal)
    assert "archive=fuzzed" in message
    message.encode()
    assert sorted(path.name for path in root.iterdir()) == ["canary", "in"]
    assert (root / "canary").read_text() == "as it was"


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.sampled_from(SEEDS), edits=st.lists(EDIT, min_size=1, max_size=4), fix=st.booleans())
def test_mutated_tar_streams_are_unpacked_or_refused_and_nothing_else(seed, edits, fix):
    data = gzip.compress(mutated(seed, edits, fix_checksums=fix), 1)
    with tempfile.TemporaryDirectory() as scratch:
        survives(data, Path(scratch))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.sampled_from(SEEDS), edits=st.lists(EDIT, min_size=1, max_size=3))
def test_mutated_gzip_streams_are_unpacked_or_refused_and_nothing_else(seed, edits):
    with tempfile.TemporaryDirectory() as scratch:
        survives(mutated(gzip.compress(seed), edits, fix_checksums=False), Path(scratch))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=3000))
def test_arbitrary_bytes_are_refused(data):
    with tempfile.TemporaryDirectory() as scratch:
        survives(data, Path(scratch))
        (Path(scratch) / "2").mkdir()
        survives(gzip.compress(data), Path(scratch) / "2")


@SETTINGS
@given(
    links=st.lists(
        st.tuples(PATH, st.lists(st.sampled_from(["..", ".", "a", "b", "pkg"]), min_size=1, max_size=6)), max_size=6
    )
)
def test_no_symbolic_link_that_is_accepted_leads_out_of_the_tree(links):
    members = [directory("a/b"), directory("pkg")]
    members += [symlink(path, "/".join(parts)) for path, parts in links]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(os.path.realpath(scratch)) / "in"
        root.mkdir()
        try:
            unpack([targz(members)], root, label="x")
        except ArchiveError:
            return
        for path in root.rglob("*"):
            if path.is_symlink():
                assert Path(os.path.realpath(path)).is_relative_to(root)


def test_gnu_tars_own_sparse_and_multi_member_streams_are_judged(tmp_path):
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
    for form in ("gnu", "posix"):
        packed = subprocess.run(
            ["tar", "--sparse", "--format", form, "-czf", "-", "-C", tmp_path, "holes"], capture_output=True, check=True
        ).stdout
        with pytest.raises(ArchiveError, match="sparse"):
            by_us(packed, tmp_path / form)


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_one_byte_wrong_anywhere_in_the_compressed_stream_never_changes_what_arrives(tmp_path, inflater):
    data = targz([member("a", bytes(range(256)))])
    by_us(data, tmp_path / "right")
    accepted = []
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        into = tmp_path / str(at)
        into.mkdir()
        try:
            unpack([bytes(damaged)], into, label="x", inflater=inflater)
        except ArchiveError:
            continue
        accepted.append(at)
        assert snapshot(into) == snapshot(tmp_path / "right")
    # Times and system in the gzip header (bytes 4 to 9) mean nothing for the content, and a run of zeros may be copied
    # from any of the zeros before it.
    assert set(range(4, 10)) <= set(accepted)
    assert len(accepted) < 6 + len(data) // 20


def test_pax_times_with_fractions_are_kept(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member("a", b"", mtime=1700000000.123456)[0])
    unpack([gzip.compress(out.getvalue())], tmp_path, label="x")
    assert abs((tmp_path / "a").stat().st_mtime_ns - 1700000000123456000) < 1000
