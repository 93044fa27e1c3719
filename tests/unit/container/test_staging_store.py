"""The store and its locks at the moments between two calls: what another process does there."""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import stat
from pathlib import Path

import pytest

from flytekitplugins_safedist.container.staging import CodeStore, Keep, Options, Retry, keeping, locks, stage
from flytekitplugins_safedist.container.staging.locks import WorkDir, exclusively
from flytekitplugins_safedist.errors import StagingError
from tests.tarballs import project


@pytest.fixture
def store(tmp_path) -> CodeStore:
    return CodeStore(tmp_path / "store")


@pytest.fixture
def staged(tmp_path, store):
    """Stages one archive; the tree's directory."""
    archive = tmp_path / "fast.tar.gz"
    archive.write_bytes(project({"main.py": "x = 1"}))

    def run() -> Path:
        return stage(str(archive), tmp_path / "dest", Options(store=store.root, retry=Retry(1))).tree.parent

    return run


# --- notes and trees --------------------------------------------------------------------------------------------------
def test_a_note_is_replaced_whole(store):
    store.remember_source("key", "a" * 64)
    with (store.root / "sources" / "key").open() as reader:
        store.remember_source("key", "b" * 64)
        assert reader.read() == "a" * 64
    assert os.listdir(store.root / "work") == []


def test_a_note_that_leads_out_of_the_trees_is_not_followed(store, staged):
    place = staged()
    store.remember_source("honest", place.name)
    store.remember_source("forged", f"../trees/{place.name}")
    assert store.by_source("honest") is not None
    assert store.by_source("forged") is None


def test_all_of_a_store_is_private_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        root = CodeStore(tmp_path / "store").root
    finally:
        os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.iterdir())} == {0o700}


def test_a_store_that_a_group_can_write_is_not_trusted(store):
    store.root.chmod(0o770)
    with pytest.raises(StagingError, match="cannot be trusted"):
        CodeStore(store.root)


def test_a_tree_whose_manifest_is_of_another_version_is_not_believed(store, staged):
    place = staged()
    manifest = json.loads((place / "manifest").read_bytes())
    assert store.by_digest(place.name) is not None
    (place / "manifest").write_text(json.dumps({**manifest, "version": manifest["version"] + 1}))
    assert store.by_digest(place.name) is None


# --- keeping ----------------------------------------------------------------------------------------------------------
def test_a_tree_that_gets_another_name_before_it_is_held_is_not_held(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()

    def taken_away(fd: int) -> bool:
        (tmp_path / "tree").rename(tmp_path / "removed")
        (tmp_path / "tree").mkdir()
        return True

    monkeypatch.setattr(keeping, "_shared", taken_away)
    assert keeping.lease(tmp_path / "tree") is None


def test_a_tree_that_somebody_is_removing_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "_TRIES", 2)
    (tmp_path / "tree").mkdir()
    with exclusively(tmp_path / "tree") as alone:
        assert alone
        assert keeping.lease(tmp_path / "tree") is None
    assert keeping.lease(tmp_path / "tree") is not None


def test_a_tree_has_lost_its_name_before_anything_in_it_goes(store, staged):
    place = staged()
    with store.work() as work:
        assert keeping.prune(store.root, work, Keep(seconds=-1)) == [place.name]
        assert (work.path / place.name / "code" / "main.py").exists()
        assert not place.exists()


def test_what_fits_exactly_stays(store, staged):
    place = staged()
    size = json.loads((place / "manifest").read_bytes())["raw"]
    os.utime(place / "manifest", (0, 0))
    forever = 1e12
    store.prune(Keep(seconds=forever, size=size))
    assert place.exists()
    store.prune(Keep(seconds=forever, size=size - 1))
    assert not place.exists()


def test_a_note_stays_while_another_tree_of_that_archive_is_there(store):
    (store.root / "trees" / "digest.1").mkdir()
    store.remember_source("key", "digest")
    keeping.forget_sources(store.root, ["digest"])
    assert os.listdir(store.root / "sources") == ["key"]
    (store.root / "trees" / "digest.1").rmdir()
    keeping.forget_sources(store.root, ["digest.1"])
    assert os.listdir(store.root / "sources") == []


def test_a_tree_without_its_manifest_stays_where_another_machine_may_use_it(store, monkeypatch):
    broken = store.root / "trees" / "broken"
    broken.mkdir()
    os.utime(broken, (0, 0))
    monkeypatch.setattr(keeping, "is_local", lambda _path: False)
    store.prune(Keep())
    assert broken.exists()


# --- private directories ----------------------------------------------------------------------------------------------
def test_a_directory_that_is_swept_before_it_is_open_is_made_again(tmp_path, monkeypatch):
    real, swept = os.open, []

    def late(path, *args, **options):
        if not swept:
            swept.append(path)
            os.rmdir(path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", late)
    with WorkDir(tmp_path) as work:
        assert work.path.is_dir()
        assert work.path != swept[0]


@pytest.mark.parametrize("sweeper", ["holds it still", "has removed it"])
def test_a_directory_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch, sweeper):
    real, first = locks._try_lock, []

    def lock(fd: int) -> bool | None:
        if first:
            return real(fd)
        first.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        if sweeper == "holds it still":
            return False
        first[0].rmdir()
        return real(fd)

    monkeypatch.setattr(locks, "_try_lock", lock)
    with WorkDir(tmp_path) as work:
        assert work.path.is_dir()
        assert work.path != first[0]
        other = os.open(work.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_a_directory_that_gets_another_name_before_it_is_locked_is_not_ours_to_remove(tmp_path, monkeypatch):
    place, real = tmp_path / "tree", locks._try_lock
    place.mkdir()

    def replaced(fd: int) -> bool | None:
        place.rename(tmp_path / "published")
        place.mkdir()
        return real(fd)

    monkeypatch.setattr(locks, "_try_lock", replaced)
    with exclusively(place) as alone:
        assert not alone


def test_what_is_about_to_be_published_can_be_held_by_others_and_removed_by_nobody(tmp_path):
    with WorkDir(tmp_path) as work:
        work.share()
        assert keeping.lease(work.path) is not None
        with exclusively(work.path) as alone:
            assert not alone


# --- staging ----------------------------------------------------------------------------------------------------------
def test_nobody_waits_for_a_store_when_staging_is_over(staged, monkeypatch):
    module = importlib.import_module("flytekitplugins_safedist.container.staging.stage")
    real, made = module.Watch, []
    monkeypatch.setattr(module, "Watch", lambda *args: made.append(real(*args)) or made[-1])
    staged()
    assert made[0]._unwanted.is_set()


def test_a_file_that_has_all_the_links_it_can_have_is_copied_and_the_next_is_linked(tmp_path, monkeypatch):
    archive = tmp_path / "fast.tar.gz"
    archive.write_bytes(project({"a.py": "a = 1", "b.py": "b = 1"}))
    real = os.link

    def full(source, *args, **options):
        if os.fsencode(source).endswith(b"/a.py"):
            raise OSError(errno.EMLINK, "too many links")
        real(source, *args, **options)

    monkeypatch.setattr(os, "link", full)
    code = stage(str(archive), tmp_path / "dest", Options(store=tmp_path / "store", retry=Retry(1)))
    assert (code.dest / "a.py").read_text() == "a = 1"
    assert not (code.dest / "a.py").samefile(code.tree / "a.py")
    assert (code.dest / "b.py").samefile(code.tree / "b.py")
