from __future__ import annotations

import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from flytekitplugins_safedist.errors import (
    FsAccessError,
    FsError,
    FsTimeoutError,
    FsUnsupportedError,
    NoSpaceError,
    PathBlockedError,
    ReadOnlyFsError,
)
from flytekitplugins_safedist.fs import ensure_dir, oserrors
from flytekitplugins_safedist.fs.oserrors import Mount
from tests.fs.ranks import Process
from tests.harness.fusefs import FuseMount, require
from tests.harness.procs import DEADLINE, until


def test_relative_paths_and_odd_endings_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ensure_dir("x/y/")
    ensure_dir("x/y/.")
    ensure_dir("x/../z")
    ensure_dir(".")
    assert sorted(os.listdir()) == ["x", "z"]


def test_the_mode_is_the_last_directorys(tmp_path):
    for _ in range(2):
        assert ensure_dir(tmp_path / "a" / "b", mode=0o700) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a").stat().st_mode & 0o700 == 0o700


def test_a_parent_that_vanishes_again_and_again_is_told_when_the_time_is_up(tmp_path, monkeypatch):
    mkdir, target = os.mkdir, str(tmp_path / "parent" / "dir")

    def vanish(path, *args):
        if path == target:
            os.rmdir(tmp_path / "parent")
            raise FileNotFoundError(errno.ENOENT, "gone again")
        mkdir(path, *args)

    monkeypatch.setattr(os, "mkdir", vanish)
    with pytest.raises(FsTimeoutError, match="its parent vanishes again and again"):
        ensure_dir(target, timeout=0.01)


@pytest.mark.parametrize("below", ["", "/sub"])
def test_a_file_system_in_which_nothing_can_be_made_is_told_as_that(monkeypatch, below):
    with pytest.raises(FsTimeoutError, match="mkdir: its parent is not there; stat: it is"):
        ensure_dir(f"/proc/none{below}", timeout=0.1)
    monkeypatch.setattr(oserrors, "PATIENCE_S", 0.05)
    with pytest.raises(FsUnsupportedError, match=r"its parent is there, .*\[path=/proc/none, .*file_system=proc "):
        ensure_dir(f"/proc/none{below}", timeout=3600)


def test_a_link_to_nothing_is_waited_for_where_another_machine_may_be_making_what_it_names(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("late")
    monkeypatch.setattr("flytekitplugins_safedist.fs.paths.mount_of", lambda path: Mount("/", "nfs4", "server:/", "rw"))
    with pytest.raises(FsTimeoutError):
        ensure_dir(tmp_path / "link", timeout=0.01)


def test_what_is_made_is_what_makedirs_makes(tmp_path):
    made = {}
    for name, make in (("theirs", os.makedirs), ("ours", lambda place: ensure_dir(place, timeout=5))):
        for number, path in enumerate(("link/../x", "link/../x/y/", "new/../x", "new/./sub/../../x")):
            root = tmp_path / name / str(number)
            (root / "far" / "real").mkdir(parents=True)
            (root / "link").symlink_to("far/real")
            make(f"{root}/{path}")
        made[name] = sorted(str(one.relative_to(tmp_path / name)) for one in (tmp_path / name).rglob("*"))
    assert made["ours"] == made["theirs"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file/", "a file is in the way"),
        ("dangling", "a symbolic link to nothing"),
        ("dangling/", "a symbolic link to nothing"),
        ("loop", "goes round in symbolic links"),
    ],
)
def test_what_is_in_the_way_is_told_at_once(tmp_path, path, said):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PathBlockedError, match=said):
        ensure_dir(f"{tmp_path}/{path}", timeout=3600)


@pytest.mark.parametrize("below", ["", "sub", "sub/sub"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    (tmp_path / "f").write_text("abc")
    (tmp_path / "f").chmod(0o640)
    with pytest.raises(PathBlockedError) as caught:
        ensure_dir(tmp_path / "f" / below)
    text = str(caught.value)
    assert f"[path={tmp_path / 'f' / below}, " in text
    assert below or text.endswith(
        "(seen: mode -rw-r-----, 3 bytes; expected: a directory, or nothing). Fix: move it away, or choose another path"
    )
    assert "a file is in the way" in text
    assert (f"file={tmp_path / 'f'}]" in text) is bool(below)


@pytest.mark.parametrize(("path", "said"), [("", "ENOENT"), ("a\0b", "null byte"), ("n" * 300, "choose a shorter one")])
def test_what_is_no_path_is_an_error_at_once(path, said):
    with pytest.raises((FsError, ValueError), match=said):
        ensure_dir(path, timeout=3600)


def test_a_removed_working_directory_is_our_error(tmp_path):
    def make_below_it() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        ensure_dir("x", timeout=60)

    assert isinstance(Process(make_below_it).outcome().error(), FsError)


def test_what_cannot_be_helped_is_told_apart_and_tried_once(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        for tries, (code, kind) in enumerate(
            {"EACCES": FsAccessError, "EROFS": ReadOnlyFsError, "EDQUOT": NoSpaceError}.items(), start=1
        ):
            client.set(faults=[{"op": "mkdir", "errno": code}])
            with pytest.raises(kind) as caught:
                ensure_dir(client.path / "new")
            assert client.counts()["mkdir"] == tries
            assert code in str(caught.value)
            assert "file_system=fuse" in str(caught.value)


def test_a_directory_that_is_there_is_there_whatever_mkdir_says(tmp_path):
    require()
    with (
        FuseMount(tmp_path / "server", tmp_path / "client") as client,
        FuseMount(tmp_path / "server", tmp_path / "other") as other,
    ):
        for code in ("EACCES", "EROFS"):
            client.set(hidden=[code], faults=[{"op": "mkdir", "errno": code}])
            (other.path / code).mkdir()
            with pytest.raises(FsError):
                ensure_dir(client.path / code)
            client.set(hidden=[])
            assert ensure_dir(client.path / code).is_dir()


def test_what_passes_is_waited_out(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        for code, when in itertools.product(("EINTR", "EIO", "ESTALE"), ("before", "after")):
            client.set(faults=[{"op": "mkdir", "errno": code, "first": 5, "when": when}])
            assert ensure_dir(client.path / f"{code} {when}" / "b").is_dir()


def test_a_directory_is_waited_for_long_after_the_patience_with_failures_is_at_its_end(tmp_path, monkeypatch):
    require()
    monkeypatch.setattr(oserrors.Backoff.__init__, "__defaults__", (0.0,))
    with (
        FuseMount(tmp_path / "server", tmp_path / "client", hidden=["made"]) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        (tmp_path / "server" / "made").mkdir()
        waits = pool.submit(ensure_dir, client.path / "made")
        until(lambda: client.counts()["mkdir"] > 3, "tries, each told that it exists")
        assert not waits.done()
        client.set(hidden=[])
        assert waits.result(DEADLINE).is_dir()


def test_what_a_broken_disk_says_too_is_tried_a_few_times_and_no_more(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    retry, error = oserrors.Backoff(), OSError(errno.EIO, "no answer")
    assert [retry.allows(error) for _ in range(oserrors.FEW)] == [True] * (oserrors.FEW - 1) + [False]


def test_what_may_go_in_a_moment_is_asked_again_after_a_pause(monkeypatch):
    paused = []
    monkeypatch.setattr("time.sleep", paused.append)
    retry = oserrors.Backoff()
    assert all(retry.allows(OSError(errno.EAGAIN, "")) for _ in range(20))
    assert len(paused) == 20
