"""An archive becomes a directory: fetched once, published whole, merged as tar would, refused with facts."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import subprocess
import threading
import types
from pathlib import Path

import pytest

from flytekitplugins_safedist.container.staging import (
    POINTS,
    CodeNotFoundError,
    CodeStore,
    Options,
    Retry,
    StagingProgress,
    places,
    stage,
    store,
)
from flytekitplugins_safedist.container.staging.ahead import Ahead
from flytekitplugins_safedist.container.staging.locks import WorkDir, one_at_a_time
from flytekitplugins_safedist.container.staging.seen import Seen
from flytekitplugins_safedist.container.staging.source import public
from flytekitplugins_safedist.errors import ArchiveError, PathBlockedError, StagingError
from tests.harness.tarballs import directory, member, project, snapshot, symlink, targz

FILES = {"main.py": "import pkg", "pkg/__init__.py": "", "pkg/deep/data.bin": b"\0\1" * 700}


@pytest.fixture
def node(tmp_path):
    """A node: a store, an archive, a destination, and a way to stage."""
    return Node(tmp_path)


class Node:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store"
        self.dest = root / "dest"
        self.archive = root / "fast.tar.gz"
        self.archive.write_bytes(project(FILES))
        self.points: list[str] = []

    def options(self, **changes) -> Options:
        fields = {"store": self.store, "retry": Retry(attempts=3, sleep=lambda _: None), "at": self.points.append}
        return Options(**{**fields, **changes})

    def stage(self, **changes):
        return stage(str(self.archive), self.dest, self.options(**changes))

    def refused(self, kind=StagingError, **changes) -> str:
        with pytest.raises(kind) as caught:
            self.stage(**changes)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert list((self.store / "trees").iterdir()) == [], "nothing is published"
        assert list((self.store / "work").iterdir()) == [], "nothing is left behind"
        return str(caught.value)


def no_leftovers(root: Path) -> bool:
    return not any(".safedist-" in name for name in snapshot(root))


def test_code_lands_in_the_tree_and_in_the_destination(node):
    code = node.stage()
    for place in (code.tree, code.dest):
        assert (place / "pkg/deep/data.bin").read_bytes() == b"\0\1" * 700
    assert code.fetched
    assert code.files == 3
    assert no_leftovers(node.dest)


def test_every_named_point_is_passed_in_order(node):
    node.stage()
    assert node.points == [point for point in POINTS if point != "waiting"]


def test_links_that_leave_the_project_are_staged_as_they_are_and_nothing_is_written_where_they_lead(node):
    data = node.root / "mnt"
    data.mkdir()
    links = [symlink(".venv/bin/python", "/usr/bin/python3"), symlink("data", str(data)), symlink("up", "../..")]
    node.archive.write_bytes(targz([member("main.py", b""), *links]))
    node.dest.mkdir()
    for _ in range(2):
        node.stage()
        found = {path: os.readlink(node.dest / path) for path in (".venv/bin/python", "data", "up")}
        assert found == {".venv/bin/python": "/usr/bin/python3", "data": str(data), "up": "../.."}
    assert list(data.iterdir()) == []


def test_a_restart_fetches_nothing_and_changes_nothing(node):
    first = node.stage()
    before = snapshot(node.dest)
    stamps = {path: path.stat().st_ctime_ns for path in node.dest.rglob("*")}
    node.points.clear()
    second = node.stage()
    assert (second.tree, second.fetched) == (first.tree, False)
    assert snapshot(node.dest) == before
    assert {path: path.stat().st_ctime_ns for path in node.dest.rglob("*")} == stamps
    assert "fetch" not in node.points


def test_a_new_container_with_an_empty_destination_gets_the_files_without_a_fetch(node):
    node.stage()
    shutil.rmtree(node.dest)
    assert not node.stage().fetched
    assert (node.dest / "main.py").read_text() == "import pkg"


def test_an_empty_directory_that_went_from_the_destination_is_put_back(node):
    node.archive.write_bytes(targz([directory("empty"), directory("full"), member("full/x", b"1")]))
    node.stage()
    (node.dest / "empty").rmdir()
    node.stage()
    assert (node.dest / "empty").is_dir()


def test_a_file_edited_in_the_destination_is_put_back(node):
    node.stage()
    (node.dest / "main.py").write_text("broken py")
    node.stage()
    assert (node.dest / "main.py").read_text() == "import pkg"


def test_a_damaged_tree_is_not_believed_and_not_repaired_in_place(node):
    first = node.stage()
    (first.tree / "main.py").write_text("damaged!!!")
    second = node.stage()
    assert second.tree != first.tree
    assert second.fetched
    assert (second.tree / "main.py").read_text() == "import pkg"
    assert (first.tree / "main.py").exists(), "somebody may be importing from it"


def test_a_tree_from_before_a_crash_of_the_machine_is_not_believed(node, monkeypatch):
    node.stage()
    monkeypatch.setattr("flytekitplugins_safedist.container.staging.store.boot_id", lambda: "another boot")
    assert node.stage().fetched


def test_files_of_different_times_are_believed_where_the_file_system_keeps_whole_seconds(node, monkeypatch):
    real = os.utime

    def whole_seconds(path, ns, **more):  # as ext4 with small inodes, or ext3, does
        real(path, ns=(ns[0] // 10**9 * 10**9, ns[1] // 10**9 * 10**9), **more)

    monkeypatch.setattr(os, "utime", whole_seconds)
    times = [1.25, 1.5, 2.75, 1.25]
    node.archive.write_bytes(targz([member(f"m{n}.py", b"1", mtime=mtime) for n, mtime in enumerate(times)]))
    first = node.stage()
    second = node.stage()
    assert (second.tree, second.fetched) == (first.tree, False)


def test_the_same_bytes_under_another_name_share_one_tree(node):
    first = node.stage()
    node.archive = node.archive.rename(node.root / "other.tar.gz")
    second = node.stage()
    assert second.tree == first.tree


def test_an_overwritten_archive_is_fetched_again(node):
    first = node.stage()
    node.archive.write_bytes(project({**FILES, "main.py": "import two"}))
    second = node.stage()
    assert second.digest != first.digest
    assert (node.dest / "main.py").read_text() == "import two"


def test_a_large_archive_that_changes_while_it_is_read_is_not_used(node):
    node.archive.write_bytes(project({f"{n}.bin": os.urandom(1 << 20) for n in range(20)}))

    def overwrite(point):  # the reading thread is only a few pieces ahead
        if point == "unpack":
            os.utime(node.archive, ns=(1, 1))

    assert "changed while it was fetched" in node.refused(at=overwrite)


def test_an_archive_that_changes_while_it_is_read_is_not_used(node):
    def overwrite(point):
        if point == "unpack":
            node.archive.write_bytes(project({"other.py": "1"}))

    assert "changed while it was fetched" in node.refused(at=overwrite)
    assert not node.dest.exists()


def test_pickled_notebook_code_arrives_as_the_file_it_is(node):
    import gzip

    node.archive = node.root / "pkl.gz"
    node.archive.write_bytes(gzip.compress(b"pickle"))
    node.dest.mkdir()
    code = node.stage()
    assert gzip.decompress((node.dest / "pkl.gz").read_bytes()) == b"pickle"
    assert code.files == 1


def test_torn_pickled_code_is_refused(node):
    import gzip

    node.archive = node.root / "pkl.gz"
    node.archive.write_bytes(gzip.compress(b"pickle" * 99)[:-3])
    assert "truncated" in node.refused(ArchiveError)


# --- the destination ---------------------------------------------------------------------------------------------
IMAGE = {
    "main.py": "the image's",
    "kept.txt": "kept",
    "pkg/built.so": "kept",
    "assets/model.bin": "kept",
    "pkg/__init__.py": "older",
}


def image(root: Path) -> None:
    for name, text in IMAGE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "elsewhere").mkdir()
    (root / "linked").symlink_to("elsewhere")
    (root / "named").symlink_to("elsewhere")
    (root / "filelink").symlink_to("kept.txt")
    (root / "afile").write_text("x")
    (root / "emptydir").mkdir()
    for path in root.rglob("*"):
        # Two images are compared, and the second may begin between making them.
        os.utime(path, (1_700_000_000, 1_700_000_000), follow_symlinks=False)


OVER_IMAGE = [
    member("main.py", b"archive's"),
    member("pkg/__init__.py", b"new"),
    member("pkg/sub/x.py", b"new", mode=0o755),
    member("linked/through.txt", b"implied directories follow the image's link"),
    directory("named", 0o750),
    member("named/inside.txt", b"a named directory replaces it"),
    member("filelink", b"replaces the link, not what it points to"),
    directory("afile"),
    member("afile/now.txt", b"a directory replaces a file"),
    member("emptydir", b"a file replaces an empty directory"),
    directory("fresh", 0o700),
    symlink("fresh/link", "../main.py"),
    member("fresh/a", b"1"),
    (member("fresh/b", b"1")[0], b"1"),
]


def no_link(*_args, **_kwargs):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


@pytest.mark.parametrize("copying", [False, True], ids=["links", "copies"])
def test_the_destination_ends_as_with_tar_over_the_image(node, copying, monkeypatch):
    if copying:
        monkeypatch.setattr(os, "link", no_link)
    node.archive.write_bytes(targz(OVER_IMAGE))
    expected = node.root / "expected"
    for place in (node.dest, expected):
        place.mkdir()
        image(place)
    subprocess.run(["tar", "-xzf", node.archive, "-C", expected], check=True)
    node.stage()
    assert snapshot(node.dest) == snapshot(expected)


def test_a_full_directory_in_the_place_of_a_file_is_an_error(node):
    (node.dest / "main.py/full").mkdir(parents=True)
    with pytest.raises(PathBlockedError, match=r"directory that is not empty.*main\.py"):
        node.stage()


def test_stale_bytecode_of_replaced_modules_goes(node):
    (node.dest / "pkg/__pycache__").mkdir(parents=True)
    (node.dest / "pkg/__init__.py").write_text("old")
    for name in ("__init__.cpython-311.pyc", "other.cpython-311.pyc"):
        (node.dest / "pkg/__pycache__" / name).write_bytes(b"old")
    node.stage()
    assert os.listdir(node.dest / "pkg/__pycache__") == ["other.cpython-311.pyc"]


def test_a_directory_that_was_missing_appears_whole(node, monkeypatch):
    node.dest.mkdir()
    seen = []
    real = os.rename

    def looking(source, target, **kwargs):
        seen.append((node.dest / "pkg").exists())
        real(source, target, **kwargs)
        if os.fsencode(target).endswith(b"/pkg"):
            assert (node.dest / "pkg/deep/data.bin").exists()

    monkeypatch.setattr(os, "rename", looking)
    node.stage()
    assert False in seen


def test_the_destination_is_made_when_missing_and_only_then_visible(node):
    node.dest = node.root / "a/b/c"
    node.stage()
    assert (node.dest / "main.py").exists()
    assert os.listdir(node.root / "a/b") == ["c"]


# --- errors ------------------------------------------------------------------------------------------------------
def test_an_archive_that_is_refused_names_the_host(node):
    node.archive.write_bytes(targz([member("../x", b"")]))
    assert f"host={os.uname().nodename}" in node.refused(ArchiveError)


def test_missing_code_says_to_register_again(node):
    node.archive.unlink()
    message = node.refused(CodeNotFoundError)
    assert "was not found" in message
    assert "register the task again" in message
    assert str(node.archive) in message


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["the disk is full", "at least", "bytes", "free in", "SAFEDIST_CODE_STORE"]),
        (errno.EDQUOT, ["the quota is used up", "free"]),
        (errno.EROFS, ["read-only"]),
        (errno.EACCES, ["permission denied", "container's user"]),
        (errno.EIO, ["input/output error", "Flyte will retry"]),
    ],
)
def test_a_disk_that_refuses_is_one_clear_error(node, monkeypatch, number, words):
    # The kernel's refusal in the middle of unpacking; tests/agents has the real full disk and the real failing device.
    real = os.write

    def failing(fd, data):
        if len(data) == 1400:
            raise OSError(number, os.strerror(number))
        return real(fd, data)

    monkeypatch.setattr(os, "write", failing)
    message = node.refused()
    for word in [*words, errno.errorcode[number], "Unpacking the code archive"]:
        assert word in message
    assert not node.dest.exists()


def test_a_store_that_others_can_write_is_not_trusted(node):
    node.store.mkdir()
    node.store.chmod(0o777)
    with pytest.raises(StagingError, match="cannot be trusted"):
        node.stage()


def test_a_store_of_another_user_is_not_trusted(node, monkeypatch):
    node.store.mkdir(mode=0o700)
    belongs_to_another(node.store, monkeypatch)
    with pytest.raises(StagingError, match=r"cannot be trusted.*seen: owner \d+, mode drwx------"):
        node.stage()


def test_a_place_that_another_user_could_swap_is_not_chosen(tmp_path, monkeypatch):
    theirs, open_to_all, ours = (tmp_path / name for name in ("theirs", "open", "ours"))
    for each in (theirs, open_to_all, ours):
        each.mkdir(mode=0o755)
    open_to_all.chmod(0o777)
    assert places.choose([open_to_all, ours]) == places.Place(ours)
    assert "no sticky bit" in places.against(open_to_all)
    open_to_all.chmod(0o1777)
    assert places.choose([open_to_all, ours]) == places.Place(open_to_all)
    belongs_to_another(theirs, monkeypatch)
    assert f"{theirs} belongs to user {theirs.stat().st_uid}" in places.against(theirs / "store")
    if os.geteuid() == 0:
        assert places.choose([theirs, ours]) == places.Place(ours)


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's for this process: by chown where that is allowed, else by another idea of who this one is."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def test_a_store_that_is_a_link_is_not_trusted(node):
    (node.root / "real").mkdir()
    node.store.symlink_to(node.root / "real")
    with pytest.raises(StagingError, match="cannot be trusted"):
        node.stage()


def test_addresses_in_messages_carry_no_secrets():
    assert public("https://me:pw@host/b/fast.tar.gz?X-Amz-Signature=abc") == "https://host/b/fast.tar.gz?..."
    assert public("s3://bucket/key") == "s3://bucket/key"


# --- locks and leftovers -----------------------------------------------------------------------------------------
def test_work_of_the_dead_is_swept_and_work_of_the_living_is_not(tmp_path):
    dead = WorkDir(tmp_path)
    os.close(dead._fd)  # what the kernel does to a killed process
    with WorkDir(tmp_path) as living, WorkDir(tmp_path) as sweeper:
        assert sweeper.sweep() == 1
        assert living.path.exists()
        assert not dead.path.exists()
    assert os.listdir(tmp_path) == []


def test_where_locks_are_always_granted_nothing_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with WorkDir(tmp_path) as living, WorkDir(tmp_path) as sweeper:
        assert sweeper.sweep() == 0
        assert living.path.exists()


def test_work_of_another_kernel_is_not_swept(tmp_path, monkeypatch):
    module = "flytekitplugins_safedist.container.staging.locks.boot_id"
    monkeypatch.setattr(module, lambda: "another node")
    other = WorkDir(tmp_path)
    os.close(other._fd)
    monkeypatch.undo()
    with WorkDir(tmp_path) as sweeper:
        assert sweeper.sweep() == 0
    assert other.path.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_without_locks_staging_goes_on(node, monkeypatch, number):
    def no_locks(*_args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert node.stage().fetched
    assert (node.dest / "main.py").exists()


def test_a_frozen_holder_does_not_stop_others_for_ever(tmp_path):
    told = []
    with (
        one_at_a_time(tmp_path / "lock", patience=9, waiting=lambda *_: None) as first,
        one_at_a_time(tmp_path / "lock", patience=0.0, waiting=lambda owner, _: told.append(owner)) as second,
    ):
        assert (first, second) == (True, False)


def test_waiters_are_told_whom_they_wait_for(tmp_path):
    told = []

    class Enough(Exception):
        pass

    def waiting(owner, _):
        told.append(owner)
        raise Enough

    lock = tmp_path / "lock"
    with (
        one_at_a_time(lock, patience=9, waiting=waiting),
        pytest.raises(Enough),
        one_at_a_time(lock, patience=9, waiting=waiting),
    ):
        pass
    assert told == [f"process {os.getpid()} on {os.uname().nodename}"]


# --- progress ----------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reported(stream, seconds):
    now = [0.0]
    progress = StagingProgress(stream, lambda: now[0], say=lambda text: print(text, file=stream))
    for second in range(seconds):
        now[0] = float(second)
        progress.fetching(second * 10_000_000, 2_000_000_000, second * 7)
    progress.end()
    return stream.getvalue()


def test_short_stagings_say_nothing():
    assert reported(io.StringIO(), 3) == ""


def test_a_log_gets_sparse_lines_with_size_rate_and_files():
    lines = reported(io.StringIO(), 120).splitlines()
    assert 3 <= len(lines) <= 8
    assert lines[0] == "code: 30.0 MB of 2.0 GB (1%), 10.0 MB/s, 21 files, 3 s"


def test_a_terminal_gets_one_line_that_is_redrawn_and_left_at_the_end():
    text = reported(Terminal(), 30)
    assert text.count("\r") == 27
    assert text.count("\n") == 1


# --- where the store lies -------------------------------------------------------------------------------------------
def test_the_stores_default_place_is_private_to_the_user():
    assert CodeStore.default_root(Path("/tmp")).name == f"safedist-code-{os.geteuid()}"


@pytest.fixture
def shared_by_all(tmp_path):
    """As Kubernetes makes emptyDir volumes."""
    place = tmp_path / "emptyDir"
    place.mkdir()
    place.chmod(0o777)
    return place


def test_a_store_that_another_user_could_swap_is_refused(node, shared_by_all):
    for root in (shared_by_all / "store", shared_by_all / "below" / "store"):
        with pytest.raises(StagingError, match="could be replaced by another user") as caught:
            node.stage(store=root)
        assert str(shared_by_all) in str(caught.value)
    assert list(shared_by_all.iterdir()) == []


def test_a_link_to_a_place_that_another_user_could_swap_is_refused(node, shared_by_all):
    (node.root / "link").symlink_to(shared_by_all)
    with pytest.raises(StagingError, match="could be replaced by another user"):
        node.stage(store=node.root / "link" / "store")


def test_a_sticky_directory_keeps_others_from_swapping(node, shared_by_all):
    shared_by_all.chmod(0o1777)
    assert node.stage(store=shared_by_all / "store").fetched


def test_the_default_store_avoids_places_that_others_could_swap(node, shared_by_all, tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    code = node.stage(store=None, temporary=(tmp_path / "missing", shared_by_all, tmp_path / "own"))
    assert code.tree.is_relative_to(tmp_path / "own")


def test_where_there_is_no_better_place_the_log_says_what_is_wrong_with_it(node, shared_by_all):
    said = []
    code = node.stage(store=None, temporary=(shared_by_all,), retry=Retry(say=said.append))
    assert code.tree.is_relative_to(shared_by_all)
    assert "has no sticky bit" in said[0]


def test_without_any_directory_to_write_in_every_one_is_named(node, tmp_path):
    with pytest.raises(StagingError, match="no directory for temporary files") as caught:
        node.stage(store=None, temporary=(tmp_path / "missing", node.archive))
    assert "missing: is not a directory" in str(caught.value)
    assert "fast.tar.gz: is not a directory" in str(caught.value)
    assert not node.dest.exists()


def test_a_relative_store_is_told_from_the_working_directory_at_the_start(node, monkeypatch):
    monkeypatch.chdir(node.root)
    code = node.stage(store=Path("relative/../store"))
    assert code.tree.is_relative_to(node.store)


def test_a_store_in_the_home_directory(node, monkeypatch):
    monkeypatch.setenv("HOME", str(node.root))
    assert node.stage(store=Path("~/store")).tree.is_relative_to(node.store)


def test_a_home_directory_that_nobody_knows_is_named(node):
    with pytest.raises(StagingError, match="cannot be told from its name"):
        node.stage(store=Path("~no-such-user/store"))


def test_a_store_that_is_mounted_noexec_is_named_when_the_archive_has_extensions(node, monkeypatch):
    said = []
    monkeypatch.setattr(os, "statvfs", lambda _path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    node.stage(retry=Retry(say=said.append))
    assert said == []
    node.archive.write_bytes(project({**FILES, "pkg/fast.cpython-311.so": b"\x7fELF"}))
    node.stage(retry=Retry(say=said.append))
    assert "mounted noexec: pkg/fast.cpython-311.so" in said[0]


# --- what is in the way -----------------------------------------------------------------------------------------------
def test_a_destination_that_is_a_file_is_refused_and_kept(node):
    node.dest.write_text("precious")
    with pytest.raises(PathBlockedError, match="A file stands where a directory is needed"):
        node.stage()
    assert node.dest.read_text() == "precious"


def test_a_file_in_place_of_an_implied_directory_is_refused_and_kept_as_with_tar(node):
    node.dest.mkdir()
    (node.dest / "pkg").write_text("precious")
    with pytest.raises(PathBlockedError, match="A file stands where a directory is needed") as caught:
        node.stage()
    assert str(node.dest / "pkg") in str(caught.value)
    assert (node.dest / "pkg").read_text() == "precious"


IN_THE_WAY = {
    "a file for a directory": ("zz", "precious"),
    "a full directory for a file": ("main.py/full", "precious"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_a_merge_that_something_is_in_the_way_of_changes_nothing(node, what):
    node.archive.write_bytes(project({"aa.py": "new", "bb/c.py": "new", "main.py": "new", "zz/x.py": "new"}))
    node.dest.mkdir()
    (node.dest / "aa.py").write_text("older")
    path, text = IN_THE_WAY[what]
    (node.dest / path).parent.mkdir(exist_ok=True)
    (node.dest / path).write_text(text)
    before = snapshot(node.dest)
    with pytest.raises(PathBlockedError, match="stands where"):
        node.stage()
    assert snapshot(node.dest) == before


@pytest.mark.parametrize("fails_at", range(3))
def test_a_merge_for_which_the_disk_is_too_small_changes_nothing(node, fails_at, monkeypatch):
    """With a store on another file system, so that files are copied."""
    node.archive.write_bytes(project({"aa.py": "new", "bb/c.py": "new", "zz.py": "new"}))
    node.dest.mkdir()
    for name in ("aa.py", "zz.py"):
        (node.dest / name).write_text("older")
    before = snapshot(node.dest)
    copied, real = [], shutil.copyfile

    def fill(source, target, **more):
        copied.append(target)
        if len(copied) > fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        return real(source, target, **more)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(StagingError, match="the disk is full"):
        node.stage()
    assert snapshot(node.dest) == before


@pytest.mark.parametrize("before", ["nothing", "a file"])
def test_a_merge_that_fails_behind_a_directory_that_it_made_says_so(node, monkeypatch, before):
    node.archive.write_bytes(targz([directory("aa"), directory("aa/bb"), member("zz.py", b"new")]))
    (node.dest / "aa").mkdir(parents=True)
    (node.dest / "zz.py").write_text("older")
    if before == "a file":
        (node.dest / "aa/bb").write_text("the image's")
    real = os.rename

    def rename(source, target, **more):
        if os.fsencode(target) == os.fsencode(node.dest / "zz.py"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        real(source, target, **more)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StagingError, match=r"\[.*changed=1 of 3 entries, the last aa/bb\]"):
        node.stage()


def test_a_merge_that_fails_between_two_renames_says_what_it_has_changed(node, monkeypatch):
    node.archive.write_bytes(project({"aa.py": "new", "bb.py": "new", "zz.py": "new"}))
    node.dest.mkdir()
    for name in ("aa.py", "bb.py", "zz.py"):
        (node.dest / name).write_text("older")
    real = os.rename

    def rename(source, target, **more):
        if os.fsencode(target) == os.fsencode(node.dest / "zz.py"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        real(source, target, **more)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StagingError, match=r"input/output error \[.*changed=2 of 3 entries, the last bb\.py\]"):
        node.stage()
    assert [(node.dest / name).read_text() for name in ("aa.py", "bb.py", "zz.py")] == ["new", "new", "older"]


def test_a_merge_that_fails_at_its_first_rename_is_raised_from_the_disks_error_alone(node, monkeypatch):
    node.archive.write_bytes(project({"aa.py": "new"}))
    node.dest.mkdir()
    (node.dest / "aa.py").write_text("older")
    real = os.rename

    def rename(source, target, **more):
        if os.fsencode(target) == os.fsencode(node.dest / "aa.py"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        real(source, target, **more)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StagingError, match="input/output error") as caught:
        node.stage()
    disks = caught.value.__cause__
    assert isinstance(disks, OSError)
    assert disks.__cause__ is None, "its own cause: who looks for the first one would look for ever"


def test_a_file_in_place_of_a_named_directory_makes_room_as_with_tar(node):
    node.archive.write_bytes(targz([directory("pkg"), member("pkg/x", b"1")]))
    node.dest.mkdir()
    (node.dest / "pkg").write_text("in the way")
    node.stage()
    assert (node.dest / "pkg/x").read_bytes() == b"1"


def test_a_link_to_nothing_is_called_that(node):
    node.dest.mkdir()
    (node.dest / "pkg").symlink_to("nowhere")
    with pytest.raises(PathBlockedError, match="A link to nothing stands where a directory is needed"):
        node.stage()


# --- what a staged tree must be to be believed ------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["mode of a file", "mode of a directory", "content", "link", "manifest"])
def test_a_tree_that_is_not_as_it_was_made_is_not_believed(node, what):
    node.archive.write_bytes(targz([directory("d"), member("d/f", b"12345"), symlink("l", "d")]))
    first = node.stage().tree
    file = first / "d/f"
    before = file.stat()
    if what == "mode of a file":
        file.chmod(0)
    elif what == "mode of a directory":
        (first / "d").chmod(0)
    elif what == "content":
        file.write_bytes(b"54321")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif what == "link":
        (first / "l").unlink()
        (first / "l").symlink_to("d/f")
    else:
        (first.parent / "manifest").unlink()
    again = node.stage()
    assert again.fetched
    assert again.tree != first
    assert (again.tree / "d/f").read_bytes() == b"12345"
    assert not node.stage().fetched, "and the new one is found again"


def ticked(root: Path) -> None:
    """Wait until the file system's clock shows a later time than any change so far."""
    before = max(path.stat(follow_symlinks=False).st_ctime_ns for path in root.rglob("*"))
    probe = root.parent / "probe"
    while True:
        probe.touch()
        if probe.stat().st_ctime_ns > before:
            return
        probe.unlink()


@pytest.fixture
def read(monkeypatch) -> list[bytes]:
    """Names of the files whose content is compared from now on."""
    names: list[bytes] = []
    real = store._crc_of
    monkeypatch.setattr(store, "_crc_of", lambda path: names.append(os.path.basename(path)) or real(path))
    return names


@pytest.mark.parametrize("copying", [False, True])
def test_a_tree_is_read_once_after_a_change_and_not_again(node, monkeypatch, read, copying):
    if copying:
        monkeypatch.setattr(os, "link", no_link)
    first = node.stage()
    assert read == [], "nobody reads what was just unpacked"
    ticked(node.store)
    assert not node.stage().fetched
    assert sorted(read) == [b"__init__.py", b"data.bin", b"main.py"]
    read.clear()
    ticked(node.store)
    assert node.stage().tree == first.tree
    assert read == []
    shutil.rmtree(node.dest)
    assert not node.stage().fetched, "a new destination: files are linked into it, or copied"
    assert sorted(read) == ([] if copying else [b"__init__.py", b"data.bin", b"main.py"]), "so was a link removed"


def test_only_what_changed_is_read_again(node, read):
    first = node.stage()
    ticked(node.store)
    node.stage()
    read.clear()
    os.link(first.tree / "main.py", node.root / "elsewhere")
    ticked(node.store)
    assert not node.stage().fetched
    assert read == [b"main.py"]


def test_what_changed_in_the_clocks_present_tick_is_read_again(node, monkeypatch, read):
    """It may change once more within it, and show the same time."""
    monkeypatch.setattr(os, "link", no_link)  # a link would be one more change
    tree = node.stage().tree
    last = max(path.stat().st_ctime_ns for path in tree.rglob("*"))
    (tree / "main.py").chmod(0o644)  # a change, if only of its time
    with monkeypatch.context() as patched:
        patched.setattr(Seen, "_ticked", lambda _: last)
        node.stage()
    read.clear()
    ticked(node.store)
    node.stage()
    assert b"main.py" in read


def test_an_edit_with_the_old_time_after_a_tree_was_read_is_noticed(node):
    first = node.stage().tree
    for _ in range(2):
        ticked(node.store)
        node.stage()
    file = first / "main.py"
    before = file.stat()
    file.write_text("import bad")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert node.stage().fetched


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[null, null]"])
def test_a_damaged_note_of_what_was_read_is_as_good_as_none(node, text):
    first = node.stage().tree
    ticked(node.store)
    node.stage()
    (first.parent / "seen").write_text(text)
    assert not node.stage().fetched


def test_where_nothing_can_be_noted_trees_are_found_all_the_same(node, read):
    first = node.stage().tree
    (first.parent / "seen").mkdir()
    ticked(node.store)
    node.stage()
    read.clear()
    assert not node.stage().fetched
    assert len(read) == 3


# --- working ahead -----------------------------------------------------------------------------------------------
def running() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("safedist-inflate", "safedist-fetch"))
    ]


def test_pieces_come_in_order_and_the_thread_is_gone_afterwards():
    with Ahead(iter([b"%d" % n for n in range(100)])) as pieces:
        assert b"".join(pieces) == b"".join(b"%d" % n for n in range(100))
        assert next(pieces, None) is None, "the end stays the end"
    assert running() == []


def test_an_error_in_the_thread_is_the_readers():
    def failing():
        yield b"1"
        raise ArchiveError("damaged")

    with Ahead(failing()) as pieces, pytest.raises(ArchiveError, match="damaged"):
        list(pieces)
    assert running() == []


def test_a_reader_that_gives_up_leaves_no_thread_behind():
    with Ahead(iter(lambda: b"endless", None)) as pieces:
        assert next(pieces) == b"endless"
    assert running() == []


def test_no_more_than_a_few_pieces_are_held():
    made = []

    def pieces():
        for number in range(1000):
            made.append(number)
            yield b"x"

    with Ahead(pieces()) as ahead:
        next(ahead)
        for _ in range(100):
            os.sched_yield()
        assert len(made) < 20


def test_large_archives_are_unpacked_beside_fetching_with_the_same_result(node, monkeypatch):
    node.archive.write_bytes(project({"blob": os.urandom(6 << 20), **FILES}))
    node.stage()
    assert (node.dest / "blob").stat().st_size == 6 << 20
    assert running() == []
