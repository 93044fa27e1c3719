"""The store and its locks at the moments between two calls: what another process does there."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import importlib
import io
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist.container.staging import (
    CodeStore,
    Keep,
    Options,
    Retry,
    keeping,
    locks,
    places,
    source,
    stage,
)
from flytekitplugins_safedist.container.staging.locks import WorkDir, exclusively, one_at_a_time
from flytekitplugins_safedist.container.staging.merge import fingerprint
from flytekitplugins_safedist.container.staging.seen import Seen
from flytekitplugins_safedist.container.staging.source import ObjectIdentity
from flytekitplugins_safedist.container.staging.watch import Abandoned, Watch
from flytekitplugins_safedist.errors import ArchiveError, StagingError
from tests.harness.tarballs import directory, member, project, targz


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
def test_a_work_directory_is_swept_only_by_who_has_its_kernel_and_its_device() -> None:
    first, second = (SimpleNamespace(stat=lambda device=device: SimpleNamespace(st_dev=device)) for device in (1, 2))
    assert locks._reach(first) == locks._reach(first) != locks._reach(second)


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


def test_a_destination_that_another_process_makes_meanwhile_is_merged_into(tmp_path, monkeypatch, staged):
    real, dest = os.rename, tmp_path / "dest"

    def faster(source, target, *args, **options):
        if Path(os.fsdecode(target)) == dest and not dest.exists():
            dest.mkdir()
            (dest / "theirs").touch()
        real(source, target, *args, **options)

    monkeypatch.setattr(os, "rename", faster)
    staged()
    assert sorted(os.listdir(dest)) == ["main.py", "theirs"]


def test_a_destination_that_is_a_link_to_a_directory_that_is_not_there_is_made_there(tmp_path, staged):
    (tmp_path / "dest").symlink_to(tmp_path / "real")
    staged()
    assert (tmp_path / "dest").is_symlink()
    assert (tmp_path / "real" / "main.py").read_text() == "x = 1"


def test_an_empty_destination_stays_the_directory_that_it_is(tmp_path, staged):
    dest = tmp_path / "dest"
    dest.mkdir(mode=0o711)
    before = dest.stat()
    staged()
    assert (dest.stat().st_ino, dest.stat().st_mode) == (before.st_ino, before.st_mode)
    assert os.listdir(dest) == ["main.py"]


def test_what_a_killed_merge_left_in_the_destination_goes(tmp_path, staged):
    (tmp_path / "dest").mkdir()
    dead = WorkDir(tmp_path / "dest")
    (dead.path / "half").touch()
    os.close(dead._fd)  # what the kernel does to a killed process
    staged()
    assert os.listdir(tmp_path / "dest") == ["main.py"]


def test_a_file_on_a_volume_below_the_destination_is_replaced_from_a_directory_on_that_volume(tmp_path, monkeypatch):
    archive, dest = tmp_path / "fast.tar.gz", tmp_path / "dest"
    archive.write_bytes(project({"main.py": "x = 1", "volume/x.py": "x = 2"}))
    (dest / "volume").mkdir(parents=True)
    real = os.rename

    def across(source, target, *args, **options):
        paths = [Path(os.fsdecode(path)) for path in (source, target)]
        if len({path.is_relative_to(dest / "volume") for path in paths}) == 2:
            raise OSError(errno.EXDEV, "another file system")
        real(source, target, *args, **options)

    monkeypatch.setattr(os, "rename", across)
    stage(str(archive), dest, Options(store=tmp_path / "store", retry=Retry(1)))
    assert os.listdir(dest / "volume") == ["x.py"]
    assert (dest / "volume" / "x.py").read_text() == "x = 2"


def test_directories_get_their_modes_from_the_inside_out(tmp_path, monkeypatch):
    """Who is not root cannot reach what lies in a directory that may only be listed."""
    archive = tmp_path / "fast.tar.gz"
    archive.write_bytes(targz([directory("a", 0o444), directory("a/b", 0o444), member("a/b/x.py", b"x = 1")]))
    (tmp_path / "dest").mkdir()
    real, changed = os.chmod, []
    monkeypatch.setattr(os, "chmod", lambda path, *mode, **how: changed.append(os.fsencode(path)) or real(path, *mode))
    code = stage(str(archive), tmp_path / "dest", Options(store=tmp_path / "store", retry=Retry(1)))
    inner = [path.endswith(b"/a/b") for path in changed if path.endswith((b"/a", b"/a/b"))]
    assert inner == [True, False] * 2, "in the tree, and in the destination"
    assert stat.S_IMODE((code.dest / "a" / "b").stat().st_mode) == 0o444


def test_objects_that_differ_in_nothing_but_their_address_are_not_taken_for_one(tmp_path, monkeypatch):
    module = importlib.import_module("flytekitplugins_safedist.container.staging.stage")

    class Source:
        """A store whose validator is a time of whole seconds, and which says no sizes."""

        def __init__(self, uri, *_) -> None:
            self.label = self.uri = uri

        def identity(self):
            return ObjectIdentity(self.uri, None, "mtime=1")

        def chunks(self):
            yield project({"main.py": f"NAME = {self.uri!r}"})

    monkeypatch.setattr(module, "open_source", Source)
    for name in ("first", "second"):
        code = stage(f"x://{name}", tmp_path / name, Options(store=tmp_path / "store", retry=Retry(1)))
        assert (code.dest / "main.py").read_text() == f"NAME = 'x://{name}'"


def test_a_store_that_fails_by_its_own_word_is_not_asked_again_whether_the_archive_has_changed(tmp_path, monkeypatch):
    module = importlib.import_module("flytekitplugins_safedist.container.staging.stage")
    asked: list[str] = []

    class Source:
        def __init__(self, uri, *_) -> None:
            self.label = self.uri = uri

        def identity(self):
            asked.append("identity")
            return ObjectIdentity(self.uri, 1, "etag=1")

        def chunks(self):
            raise StagingError("down")
            yield b""

    monkeypatch.setattr(module, "open_source", Source)
    with pytest.raises(StagingError, match="down"):
        stage("x://y", tmp_path / "dest", Options(store=tmp_path / "store", retry=Retry(1)))
    assert asked == ["identity"]


def test_pickled_code_that_is_not_packed_is_refused_for_what_reads_it_unpacks_it(tmp_path):
    (tmp_path / "pkl.gz").write_bytes(b"a pickle, but no gzip" * 100)
    with pytest.raises(ArchiveError, match="The archive is not gzip"):
        stage(str(tmp_path / "pkl.gz"), tmp_path / "dest", Options(store=tmp_path / "store", retry=Retry(1)))
    assert not (tmp_path / "dest").exists()


def test_a_tree_that_goes_as_soon_as_it_is_published_is_an_error_and_is_not_used(staged, monkeypatch):
    module = importlib.import_module("flytekitplugins_safedist.container.staging.stage")
    monkeypatch.setattr(module, "lease", lambda _place: None)
    with pytest.raises(StagingError, match="disappeared as soon as it was published"):
        staged()


def test_nobody_waits_for_another_process_longer_than_for_the_whole_staging(tmp_path, monkeypatch):
    module = importlib.import_module("flytekitplugins_safedist.container.staging.stage")
    archive, given = tmp_path / "fast.tar.gz", []
    archive.write_bytes(project({"main.py": "x = 1"}))
    real = module.one_at_a_time
    monkeypatch.setattr(
        module,
        "one_at_a_time",
        lambda path, *, patience, **how: given.append(patience) or real(path, patience=0, **how),
    )
    options = Options(store=tmp_path / "store", retry=Retry(1), patience=500.0, deadline=100.0)
    stage(str(archive), tmp_path / "dest", options)
    stage(str(archive), tmp_path / "other", dataclasses.replace(options, patience=5.0))
    assert all(patience <= 100.0 for patience in given)
    assert given[-1] == 5.0


def test_the_owner_of_a_lock_is_told_without_the_rest_of_a_longer_name_before(tmp_path):
    (tmp_path / "lock").write_text("process 123456789 on a machine with a name that is longer than ours" * 2)
    told: list[str] = []

    class Enough(Exception):
        pass

    def waiting(owner: str, _seconds: float) -> None:
        told.append(owner)
        raise Enough

    with (
        one_at_a_time(tmp_path / "lock", patience=9, waiting=waiting),
        pytest.raises(Enough),
        one_at_a_time(tmp_path / "lock", patience=9, waiting=waiting),
    ):
        pass
    assert told == [f"process {os.getpid()} on {os.uname().nodename}"]


# --- what was read, and where a store may lie -------------------------------------------------------------------------
def test_a_file_whose_time_was_set_is_not_as_it_was_made(store, staged):
    place = staged()
    os.utime(place / "code" / "main.py", (0, 0))
    assert store.by_digest(place.name) is None


def test_another_file_with_the_change_time_of_the_one_that_was_read_is_read(tmp_path, store):
    seen, read = Seen(tmp_path, 1, store.work), []
    for inode in (1, 1, 2):
        assert seen.holds(0, SimpleNamespace(st_ino=inode, st_ctime_ns=5), lambda at=inode: not read.append(at))
    assert read == [1, 2]


@pytest.mark.parametrize(("changed", "reads"), [(4, 1), (5, 2)])
def test_what_changed_in_the_tick_in_which_it_was_read_is_read_again(tmp_path, store, monkeypatch, changed, reads):
    monkeypatch.setattr(Seen, "_ticked", lambda _: 5)
    seen, read = Seen(tmp_path, 1, store.work), []
    for _ in range(2):
        assert seen.holds(0, SimpleNamespace(st_ino=1, st_ctime_ns=changed), lambda: not read.append(1))
    assert len(read) == reads


def test_nothing_is_noted_where_nothing_was_read(tmp_path, store):
    Seen(tmp_path, 1, store.work).keep()
    assert not (tmp_path / "seen").exists()


def test_an_edited_file_of_the_same_size_and_time_is_not_the_one_that_was_merged(tmp_path, store, staged):
    tree = store.by_digest(staged().name)
    before, file = fingerprint(tree, tmp_path / "dest"), tmp_path / "dest" / "main.py"
    assert fingerprint(tree, tmp_path / "dest") == before
    found = file.stat()
    file.write_bytes(b"x = 2")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (found.st_ino, found.st_mtime_ns, found.st_size)
    assert fingerprint(tree, tmp_path / "dest") != before


def test_the_note_of_what_was_read_is_replaced_whole(tmp_path, store):
    def note(inode: int) -> None:
        seen = Seen(tmp_path, 1, store.work)
        seen.holds(0, SimpleNamespace(st_ino=inode, st_ctime_ns=5), lambda: True)
        seen.keep()

    note(1)
    with (tmp_path / "seen").open() as reader:
        note(22222)
        assert json.load(reader) == [[1, 5]]
    assert json.loads((tmp_path / "seen").read_text()) == [[22222, 5]]


def test_a_link_in_a_directory_that_others_can_write_could_be_swapped_wherever_it_leads(tmp_path):
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "private")
    assert places.swappable(tmp_path / "open" / "link" / "store") == ""
    (tmp_path / "open").chmod(0o777)
    assert f"{tmp_path / 'open'} can be written by others" in places.swappable(tmp_path / "open" / "link" / "store")


def test_where_a_link_leads_could_be_swapped_by_who_can_write_the_directory_there(tmp_path):
    (tmp_path / "open" / "private").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "private")
    assert places.swappable(tmp_path / "link" / "store") == ""
    (tmp_path / "open").chmod(0o777)
    assert f"{tmp_path / 'open'} can be written by others" in places.swappable(tmp_path / "link" / "store")


def test_a_directory_that_may_not_be_written_is_passed_over(tmp_path, monkeypatch):
    for name in ("closed", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    assert places.choose([tmp_path / "closed", tmp_path / "mine"]).directory == tmp_path / "mine"


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_that_changed_within_its_size_and_time_is_another_object(tmp_path, how):
    archive = tmp_path / "fast.tar.gz"
    archive.write_bytes(b"one")
    source_of = source.LocalSource(str(archive), str(archive), Retry(1), Watch(60.0, lambda _: None))
    before, found = source_of.identity(), archive.stat()
    if how == "written":
        archive.write_bytes(b"two")
    else:
        (tmp_path / "new").write_bytes(b"two")
        (tmp_path / "new").rename(archive)
    os.utime(archive, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert archive.stat().st_mtime_ns == found.st_mtime_ns
    assert source_of.identity() != before


def test_nobody_who_has_gone_waits_on(tmp_path):
    watch = Watch(60.0, lambda _: None)
    watch.check("x")
    watch.cancel()
    with pytest.raises(Abandoned):
        watch.check("x")


def test_no_further_try_is_made_when_the_time_is_up():
    paused: list[float] = []
    retry = Retry(attempts=5, sleep=paused.append)
    source._try_again(ConnectionError("reset"), 1, "x", retry, Watch(60.0, lambda _: None))
    with pytest.raises(StagingError, match="not fetched in time"):
        source._try_again(ConnectionError("reset"), 1, "x", retry, Watch(0.0, lambda _: None))
    assert len(paused) == 2


# --- the remote store -------------------------------------------------------------------------------------------------
class Remote:
    """A client of a store that refuses everybody."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def invalidate_cache(self) -> None:
        self.asked.append("invalidate_cache")

    def info(self, _uri: str) -> dict[str, object]:
        self.asked.append("info")
        raise PermissionError(errno.EACCES, "denied")


def test_a_store_is_asked_anew_and_with_the_own_credentials_after_it_has_refused_everybody(monkeypatch):
    signed, anonymous = Remote(), Remote()
    monkeypatch.setattr(source, "filesystem", lambda *_, anonymous: nobody if anonymous else signed)
    nobody = anonymous
    watch = Watch(60.0, lambda _: None)
    remote = source.RemoteSource("x://bucket/key", Retry(1), watch)
    for number in (1, 2):
        with pytest.raises(StagingError, match="refused access"):
            remote.identity()
        assert signed.asked == anonymous.asked == ["invalidate_cache", "info"] * number


@pytest.mark.parametrize("skip", [0, 2, 4, 5, 8])
def test_a_stream_that_begins_anew_goes_on_where_it_broke_off_whatever_the_chunks(monkeypatch, skip):
    body = io.BytesIO(b"abcdefgh")
    client = SimpleNamespace(open=lambda *_, **__: SimpleNamespace(read=lambda _: body.read(4), close=body.close))
    monkeypatch.setattr(source, "filesystem", lambda *_, anonymous: client)
    remote = source.RemoteSource("x://bucket/key", Retry(1), Watch(60.0, lambda _: None))
    assert b"".join(remote._opened(skip)) == b"abcdefgh"[skip:]


def test_no_more_ranges_are_asked_for_at_once_than_are_to_be_held(monkeypatch):
    size = 6 * source._RANGE
    asked: list[int] = []
    monkeypatch.setattr(source, "filesystem", lambda *_, anonymous: Remote())
    remote = source.RemoteSource("x://bucket/key", Retry(1), Watch(60.0, lambda _: None))
    monkeypatch.setattr(remote, "_ask_for", lambda start, end: asked.append(start))
    monkeypatch.setattr(remote, "_range", lambda start, end, call: b"")
    pieces = remote._ranges(size)
    for taken in range(1, 7):
        next(pieces)
        assert len(asked) == min(taken - 1 + source._AHEAD, 6)
    assert list(pieces) == []
