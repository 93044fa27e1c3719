"""Ordinary archives unpack as with GNU tar; mutated ones end with a clear message and touch nothing outside."""

from __future__ import annotations

import contextlib
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

from flytekitplugins_safedist.container.archive import Limits, unpack
from flytekitplugins_safedist.errors import ArchiveError
from tests.harness.archives_made import EDIT, FORMATS, ITEM, PATH, SEEDS, mutated, ordinary
from tests.harness.tarballs import directory, member, snapshot, symlink, targz

pytestmark = pytest.mark.processes

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
    ),
    absolute=st.booleans(),
    files=st.lists(PATH, max_size=6),
)
def test_nothing_is_written_through_a_symbolic_link_wherever_it_leads(links, absolute, files):
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(os.path.realpath(scratch)) / "a" / "b" / "in"
        root.mkdir(parents=True)
        start = f"{root.parent}/" if absolute else ""
        members = [directory("a/b"), directory("pkg")]
        members += [symlink(path, start + "/".join(parts)) for path, parts in links]
        members += [member(path, b"x") for path in files]
        with contextlib.suppress(ArchiveError):
            unpack([targz(members)], root, label="x")
        outside = [path for path in Path(scratch).rglob("*") if root not in (path, *path.parents)]
        assert sorted(path.name for path in outside) == ["a", "b"]


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
