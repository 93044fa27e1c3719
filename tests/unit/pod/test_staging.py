"""An archive becomes code in a directory, or is refused whole."""

from __future__ import annotations

import errno
import gzip
import io
import os
import pickle
import random
import re
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import ArchiveError, PathBlockedError, StagingError
from flytekitplugins_safedist.pod.staging import POINTS, Options, place, points, stage, unpack
from flytekitplugins_safedist.pod.staging.fetch import Download
from flytekitplugins_safedist.pod.staging.place import Private
from tests.harness.procs import until
from tests.harness.staging_actors import content
from tests.harness.tarballs import directory, hardlink, member, project, symlink, tar, targz

FILES = {"main.py": "import pkg", "pkg/__init__.py": "", "pkg/deep/data.bin": b"\0\1" * 700}


class Node:
    """An archive, a destination, and what was passed."""

    def __init__(self, root: Path) -> None:
        self.root, self.archive, self.dest = root, root / "fast.tar.gz", root / "dest"
        self.archive.write_bytes(project(FILES))
        self.points: list[str] = []

    def stage(self, *members, **changes):
        if members:
            self.archive.write_bytes(targz(members))
        return stage(str(self.archive), self.dest, Options(**changes))

    def refused(self, archive: bytes, kind=ArchiveError, **changes) -> str:
        """The error, "" where there is none; nothing has changed, and nothing is left behind."""
        before, caught = content(self.dest), None
        self.archive.write_bytes(archive)
        try:
            self.stage(**changes)
        except kind as error:
            caught = error
        if caught is None:
            return ""
        assert str(pickle.loads(pickle.dumps(caught))) == str(caught)
        assert content(self.dest) == before
        return str(caught)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    monkeypatch.setattr(points, "at", made.points.append)
    return made


# --- ordinary archives ---------------------------------------------------------------------------------------------
def test_code_lands_in_the_destination_and_the_points_are_passed(node):
    code = node.stage()
    assert {name for name, facts in content(node.dest).items() if facts[0] == "file"} == set(FILES)
    assert (node.dest / "pkg/deep/data.bin").read_bytes() == FILES["pkg/deep/data.bin"]
    assert (code.files, code.new) == (3, 3)
    assert list(dict.fromkeys(node.points)) == [*POINTS]


FORMS = {"pax": tarfile.PAX_FORMAT, "GNU": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_an_archive_may_hold_ends_as_with_tar(node, form):
    long = "/".join(["d" * 90, "e" * 90])
    members = [
        directory("empty"),
        member(long, b"long"),
        member("exe", b"#!", mode=0o755),
        member("caf\u00e9 \n.py", b"1"),
        symlink("alias", "exe"),
        hardlink("same", "exe"),
        member("zebra", b"2"),
        hardlink("ant", "zebra"),
        member("exe2", b"first"),
        member("exe2", b"second"),
        member("/absolute/x", b"below the destination"),
    ]
    node.archive.write_bytes(targz(members, form))
    expected = node.root / "expected"
    expected.mkdir()
    tar_xzf = ["tar", "-xzf", node.archive, "-C", expected]
    subprocess.run(tar_xzf, check=True, stderr=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"})
    node.stage()
    assert content(node.dest) == content(expected)


def test_a_file_of_which_only_the_mode_is_another_is_replaced(node):
    for mode in (0o644, 0o755):
        node.stage(member("run.sh", b"#!/bin/sh", mode=mode))
        assert (node.dest / "run.sh").stat().st_mode & 0o777 == mode


def test_a_size_that_is_written_in_binary_is_read(node):
    stream = bytearray(tar([member("x", b"1234567")], tarfile.USTAR_FORMAT))
    stream[124:136] = b"\x80" + (7).to_bytes(11, "big")
    stream[148:156] = b" " * 8
    stream[148:156] = b"%06o\0 " % sum(stream[:512])
    node.archive.write_bytes(gzip.compress(stream))
    node.stage()
    assert (node.dest / "x").read_bytes() == b"1234567"


def test_names_of_any_bytes_are_kept(node):
    info, data = member("x", b"1")
    info.name = os.fsdecode(b"\xff.py")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        archive.addfile(info, io.BytesIO(data))
    node.archive.write_bytes(gzip.compress(out.getvalue()))
    node.stage()
    assert os.listdir(os.fsencode(node.dest)) == [b"\xff.py"]


def test_links_that_leave_the_project_are_kept_and_nothing_is_written_where_they_lead(node):
    data = node.root / "mnt"
    data.mkdir()
    links = {".venv/bin/python": "/usr/bin/python3", "data": str(data), "up": "../.."}
    for _ in range(2):
        node.stage(member("main.py", b""), *(symlink(*link) for link in links.items()))
        assert {path: os.readlink(node.dest / path) for path in links} == links
    assert list(data.iterdir()) == []


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
@pytest.mark.parametrize("engine", ["isal", "zlib"])
def test_packed_or_not_in_one_member_or_several_and_padded_it_is_the_same(node, monkeypatch, engine, size):
    read = Download.read
    monkeypatch.setattr(Download, "read", lambda self, position, most: read(self, position, min(size, most)))
    if engine == "zlib":
        monkeypatch.setattr(unpack, "_Gunzip", gzip.GzipFile)
    raw = tar([member("a.py", b"1"), member("b.bin", random.Random(1).randbytes(3 << (20 if size > 7 else 10)))])
    half = len(raw) // 2
    expected = None
    for packed in (raw, gzip.compress(raw), gzip.compress(raw[:half]) + gzip.compress(raw[half:]) + bytes(300)):
        node.archive.write_bytes(packed)
        assert node.stage().raw == len(raw)
        expected = expected or content(node.dest)
        assert content(node.dest) == expected


def test_pickled_notebook_code_arrives_as_the_file_it_is_and_torn_it_is_refused(node):
    node.archive = node.root / "pkl.gz"
    whole = gzip.compress(pickle.dumps({"a": 1}))
    node.archive.write_bytes(whole)
    node.stage()
    assert (node.dest / "pkl.gz").read_bytes() == whole
    assert "truncated" in node.refused(whole[:-3])


def test_a_command_in_the_place_of_a_start_keeps_what_the_start_has_made(tmp_path):
    code = "import os, pathlib, sys\nfrom flytekitplugins_safedist.pod.staging.place import Private\n"
    code += "made = Private(pathlib.Path(sys.argv[1]))\nos.execv('/bin/cat', ['cat'])"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE) as start:
        until(lambda: Path(f"/proc/{start.pid}/comm").read_text() == "cat\n", "the command has taken its place")
        (made,) = tmp_path.iterdir()
        Private(tmp_path).close()
        assert list(tmp_path.iterdir()) == [made]
        start.stdin.close()
    Private(tmp_path).close()
    assert list(tmp_path.iterdir()) == [], "its end is the end of the lock"


def test_what_a_task_has_made_in_the_directory_of_its_start_goes_with_that_however_deep_it_is(tmp_path):
    start = Private(tmp_path)
    at = os.open(start.path, os.O_RDONLY)
    for _ in range(1100):  # deeper than Python recurses
        os.mkdir("deep", dir_fd=at)
        below = os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    start.close()
    assert list(tmp_path.iterdir()) == []


# --- refused -------------------------------------------------------------------------------------------------------
OUT = "/tmp/safedist-test-escaped"
HOSTILE = {
    "climbs": [member("../evil.py", b"1")],
    "climbs by a link": [symlink("l", ".."), member("l/evil.py", b"1")],
    "writes through a link": [symlink("l", OUT), member("l/evil.py", b"1")],
    "writes through a chain of links": [symlink("a", OUT), symlink("b", "a"), member("b/evil.py", b"1")],
    "makes a link of a file and writes through it": [member("l", b""), symlink("l", OUT), member("l/evil.py", b"1")],
    "links a file from outside": [hardlink("passwd", "/etc/passwd")],
    "links a file by climbing": [hardlink("passwd", "../../../../etc/passwd")],
    "lies below a file": [member("f", b"1"), member("f/x", b"1")],
    "holds a link where it holds a directory": [member("d/x", b"1"), symlink("d", OUT)],
    "holds a file where it holds a directory": [member("d/x", b"1"), member("d", b"1")],
    "links a file to itself by another way": [hardlink("a", "a/../a")],
    "links a directory": [directory("d"), hardlink("e", "d")],
    "is a file without a name": [member(".", b"1")],
    "is as deep as memory is": [member("d/" * 200 + "f", b"1")],
    "has a name too long for any disk": [member("x" * 300, b"1")],
    "holds a pipe": [member("fifo", type=tarfile.FIFOTYPE)],
    "holds a file with holes": [member("sparse", b"", type=tarfile.GNUTYPE_SPARSE)],
    "holds a device": [member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
}


def test_directories_may_be_199_deep(node):
    node.archive.write_bytes(targz([member("d/" * 199 + "f", b"1")]))
    node.stage()
    assert (node.dest / ("d/" * 199) / "f").read_text() == "1"


def test_hostile_members_are_refused_by_name_and_with_them_the_archive(node):
    node.stage()
    said = {what: node.refused(targz([member("first.py", b"1"), *HOSTILE[what]])) for what in HOSTILE}
    names = {what: members[-1][0].name for what, members in HOSTILE.items()}
    assert {what: text for what, text in said.items() if names[what] not in text.partition(", member=")[2]} == {}
    assert {what for what, text in said.items() if f"host={os.uname().nodename}" not in text} == set()
    assert not (node.root / "evil.py").exists()
    assert not os.path.lexists(OUT)


RAW = tar([member(f"m{number}.py", b"%d" % number * 300) for number in range(5)])
WHOLE = gzip.compress(RAW, mtime=0)
WRONG_SUM = RAW.replace(b"m2.py", b"m2,py", 1)
DAMAGED = {
    "nothing": b"",
    "no archive": b"<html>" * 100,
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(600),
    "gzip of something else": gzip.compress(b"hello" * 500),
    "cut within gzip": WHOLE[: len(WHOLE) // 2],
    "cut before the checksum": WHOLE[:-8],
    "cut within the length": WHOLE[:-1],
    "wrong checksum": WHOLE[:-8] + b"1234" + WHOLE[-4:],
    "wrong length": WHOLE[:-4] + b"1234",
    "garbage behind gzip": WHOLE + b"garbage",
    "second member damaged": WHOLE + WHOLE[:-8] + b"1234" + WHOLE[-4:],
    "plain and cut within a file": RAW[:700],
    "plain and cut between two files": RAW[:3072],
    "plain and cut between two files, packed again": gzip.compress(RAW[:3072]),
    "cut between two files, zeros in a member of their own": gzip.compress(RAW[:3072]) + gzip.compress(bytes(9)),
    "garbage behind the end mark": RAW + b"garbage",
    "a header's sum is wrong": WRONG_SUM,
    "a header's sum is wrong, packed": gzip.compress(WRONG_SUM),
    "a header is zeros": RAW[:1024] + bytes(512) + RAW[1536:3072] + b"x" * 512,
}


def crafted(size: bytes, kind: bytes) -> bytes:
    """A header whose size is these bytes."""
    header = bytearray(tar([member("m.py", b"1")], tarfile.USTAR_FORMAT)[:512])
    header[124:136], header[156:157] = size, kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


DAMAGED |= {
    "a size below nothing": crafted(b"\xff" * 11 + b"\x00", b"0") + RAW,
    "a size without end": crafted(b"\x80" + b"\x7f" * 11, b"0") + RAW,
    "a size that is no number": crafted(b"not a number", b"0") + RAW,
    "a header that fills the memory": crafted(b"77777777777\0", b"x") + RAW,
    "a name that fills the memory": crafted(b"77777777777\0", b"L") + RAW,
    "a second archive behind it": RAW + RAW,
}


def test_damaged_archives_are_refused(node):
    node.dest.mkdir()
    said = {what: node.refused(archive) for what, archive in DAMAGED.items()}
    fix = re.compile("register the task again|leave that out")
    assert {what: text for what, text in said.items() if not fix.search(text)} == {}


def test_any_flipped_byte_is_refused_or_changes_nothing(node):
    chance = random.Random(20261123)
    expected = node.stage(member("m.py", b"1" * 700)) and content(node.dest)
    whole = node.archive.read_bytes()
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        node.archive.write_bytes(damaged)
        with suppress(ArchiveError):
            node.stage()
        assert content(node.dest) == expected


def test_whatever_bytes_headers_are_made_of_nothing_is_written_elsewhere_and_the_error_is_the_archives(node):
    chance = random.Random(20261126)
    members = [directory("d", 0o755), member("d/m.py", b"1" * 700), symlink("l", "d"), hardlink("h", "d/m.py")]
    whole = tar([*members, member("n" * 120, b"2")], tarfile.GNU_FORMAT) + tar(members)
    for number in range(120):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(whole) // 512) * 512
            start = at + chance.choice((0, 100, 124, 156, 157, 257, 345)) + chance.randrange(8)
            damaged[start : start + 4] = chance.choice((b"../.", b"\xff" * 4, b"\0" * 4, b"7777", chance.randbytes(4)))
            header = damaged[at : at + 512]
            header[148:156] = b" " * 8
            if number % 2:
                damaged[at + 148 : at + 156] = b"%06o\0 " % sum(header)
        node.dest = node.root / f"dest-{number}"
        with suppress(ArchiveError):
            node.archive.write_bytes(damaged)
            node.stage()
    assert {path.name for path in node.root.iterdir() if not path.name.startswith("dest-")} == {"fast.tar.gz"}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_bytes": 5000}, "SAFEDIST_CODE_MAX_BYTES"),
        ({"max_files": 4}, "SAFEDIST_CODE_MAX_FILES"),
        ({"max_ratio": 2, "ratio_from": 5000}, "SAFEDIST_CODE_MAX_RATIO"),
    ],
)
def test_what_is_over_a_limit_is_refused_and_says_which(node, limits, words):
    node.dest.mkdir()
    assert words in node.refused(WHOLE, **limits)


def test_an_archive_that_changes_while_it_is_read_is_not_used(node, monkeypatch):
    node.dest.mkdir()

    def at(point: str) -> None:
        if point == "fetch":
            node.archive.write_bytes(project({"main.py": "another"}))

    monkeypatch.setattr(points, "at", at)
    with pytest.raises(StagingError, match="changed while it was fetched"):
        node.stage()
    assert content(node.dest) == {}


# --- over an image -------------------------------------------------------------------------------------------------
def test_the_destination_ends_as_with_tar_over_the_image(node):
    image = {"main.py": "image", "kept.py": "image", "pkg/old.py": "image", "sub/x": "image"}
    expected = node.root / "expected"
    elsewhere = node.root / "elsewhere"
    elsewhere.mkdir()
    for dest in (node.dest, expected):
        for name, text in image.items():
            (dest / name).parent.mkdir(parents=True, exist_ok=True)
            (dest / name).write_text(text)
        (dest / "linked").symlink_to(elsewhere)
        (dest / "room").mkdir()
    node.archive.write_bytes(
        project({**FILES, "linked/by_the_image.py": "1", "room": "a file, and there an empty directory"})
    )
    subprocess.run(["tar", "-xzf", node.archive, "-C", expected], check=True)
    node.stage()
    assert content(node.dest) == content(expected)
    assert (elsewhere / "by_the_image.py").read_text() == "1"


def test_what_is_there_already_stays_as_it_is_and_what_was_edited_is_put_back(node):
    node.stage()
    (node.dest / "main.py").write_text("import pkq")
    before = {path: path.stat().st_ino for path in node.dest.rglob("*")}
    assert node.stage().new == 1
    assert (node.dest / "main.py").read_text() == "import pkg"
    changed = {path.name for path, inode in before.items() if path.stat().st_ino != inode}
    assert changed == {"main.py"}


def test_a_file_that_is_appended_to_in_the_destination_changes_nothing_of_a_later_staging(node):
    for _ in range(2):
        node.stage()
        assert (node.dest / "main.py").read_text() == "import pkg"
        with open(node.dest / "main.py", "a") as file:
            file.write("\n# appended")


def test_an_edit_of_equal_length_is_imported_though_flytekit_gives_all_files_one_time(node):
    import sys

    program = ["-c", "import m; print(m.V)"]
    for value in ("1", "2"):
        node.archive.write_bytes(project({"m.py": f"V = {value}"}))
        node.stage()
        done = subprocess.run([sys.executable, *program], cwd=node.dest, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == value


BLOCKED = {
    "a file": (lambda dest: (dest / "pkg").write_text("image"), "A file stands where a directory is needed"),
    "a link to nothing": (lambda dest: (dest / "pkg").symlink_to("nothing"), "A link to nothing stands"),
    "a full directory": (lambda dest: (dest / "zz.py/full").mkdir(parents=True), "A directory that is not empty"),
}


@pytest.mark.parametrize(("make", "words"), BLOCKED.values(), ids=BLOCKED)
def test_what_is_in_the_way_is_named_before_anything_changes(node, make, words):
    node.dest.mkdir()
    (node.dest / "main.py").write_text("image")
    make(node.dest)
    said = node.refused(project({**FILES, "zz.py": "1"}), PathBlockedError)
    assert words in said
    assert f"host={os.uname().nodename}" in said


@pytest.mark.parametrize("was", ["an empty directory", "a link"])
def test_what_another_start_puts_into_a_files_place_while_one_looks_there_is_taken_for_what_it_is(
    node, monkeypatch, was
):
    target = node.dest / "main.py"
    node.dest.mkdir()
    if was == "a link":
        node.archive.write_bytes(targz([symlink("main.py", "elsewhere")]))
        target.symlink_to("elsewhere")
    else:
        target.mkdir()
    name = "readlink" if was == "a link" else "listdir"
    look = getattr(os, name)

    def meanwhile(path, **more):
        if Path(path) == target:
            monkeypatch.setattr(os, name, look)
            target.unlink() if was == "a link" else target.rmdir()
            target.write_text("of another start")
        return look(path, **more)

    monkeypatch.setattr(os, name, meanwhile)
    node.stage()
    assert target.read_text() == "import pkg" if was != "a link" else target.readlink() == Path("elsewhere")


def test_a_file_that_is_mounted_in_the_way_is_to_be_mounted_elsewhere(node, monkeypatch):
    node.dest.mkdir()
    (node.dest / "main.py").write_text("mounted")
    monkeypatch.setattr(place, "mount_points", lambda: {str(node.dest / "main.py")})
    assert "Fix: mount it elsewhere, or use another --dest-dir" in node.refused(project(FILES), PathBlockedError)


def test_a_destination_that_is_a_file_is_refused_and_kept(node):
    node.dest.write_text("image")
    with pytest.raises(PathBlockedError, match="dest"):
        node.stage()
    assert node.dest.read_text() == "image"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rename_that_fails_says_what_has_changed_before_it(node, monkeypatch, failing):
    rename = os.rename
    calls = []

    def fails(source, target):
        calls.append(target)
        if len(calls) > failing:
            raise OSError(errno.EIO, "Input/output error", source, None, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StagingError, match="EIO") as caught:
        node.stage(member("a.py"), member("b/c.py"), member("d.py"))
    assert ("changed=2 of 3 renames, the last " + str(node.dest / "b") in str(caught.value)) == bool(failing)
    assert sorted(os.listdir(node.dest)) == (["a.py", "b"] if failing else [])
