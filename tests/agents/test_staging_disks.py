"""File systems that lie, refuse or run full: staging is slower and right, or one clear error with nothing published."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import fusefs
from tests.harness.product import places, remove_tree
from tests.harness.staging_actors import actors_fixture, all_at_once, place_fixture  # noqa: F401  (fixtures)
from tests.harness.tarballs import directory, member, snapshot, targz

NOBODY = 65534

BROKEN = {
    "locks always granted": {"locks": "dropped"},
    "locks refused": {"locks": "ENOLCK"},
    "no hard links": {"links": False},
    "stale attributes": {"stale_attrs": 2.0},
    "stale attributes, no locks, no links": {"stale_attrs": 2.0, "locks": "dropped", "links": False},
}


def without_inodes(found: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Hard links become copies where the file system has none."""
    return {name: facts[:4] for name, facts in found.items()}


@pytest.mark.parametrize("rules", BROKEN.values(), ids=BROKEN.keys())
def test_on_a_broken_file_system_staging_is_slower_and_right(place, actors, rules):
    fusefs.require()
    expected = without_inodes(place.expected())
    with fusefs.FuseMount(place.root / "backing", place.root / "mount", **rules) as client:
        started = [actors(place.uri, client.path / "dest", client.path / "store") for _ in range(6)]
        outcomes = all_at_once(started)
        assert [outcome for outcome in outcomes if "error" in outcome] == []
        for tree in {Path(str(outcome["tree"])) for outcome in outcomes}:
            backing = place.root / "backing" / tree.relative_to(client.path)
            assert without_inodes(snapshot(backing)) == expected
        assert without_inodes(snapshot(place.root / "backing/dest")) == expected


@pytest.mark.parametrize("rules", [{}, {"locks": "dropped", "late": [0, 1], "stale_attrs": 1.0}], ids=["plain", "nfs"])
def test_several_nodes_with_one_destination_volume_fetch_once_each(place, actors, rules):
    fusefs.require()
    with (
        fusefs.FuseMount(place.root / "volume", place.root / "node0", **rules) as node0,
        fusefs.FuseMount(place.root / "volume", place.root / "node1", **rules) as node1,
    ):
        started = [
            actors(place.uri, node.path / "code", place.root / f"store{number}")
            for number, node in enumerate((node0, node1))
            for _ in range(4)
        ]
        outcomes = all_at_once(started)
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    for half in (outcomes[:4], outcomes[4:]):
        assert sum(bool(outcome["fetched"]) for outcome in half) == 1
    assert without_inodes(snapshot(place.root / "volume/code")) == without_inodes(place.expected())


# --- the disk says no --------------------------------------------------------------------------------------------
def nothing_published(store: Path) -> bool:
    return os.listdir(store / "trees") == [] and os.listdir(store / "work") == []


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        if os.environ.get("SAFEDIST_CI"):
            pytest.fail(f"CI must be able to mount a tmpfs: {mounted.stderr}")
        pytest.skip(f"needs root to mount a small tmpfs: {mounted.stderr}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_names_what_is_needed_and_what_is_free(place, actors, tmpfs):
    outcome = actors(place.uri, place.dest, tmpfs / "store").go().end()
    assert outcome["error"] == "StagingError"
    for words in ("the disk is full", "ENOSPC", "at least", "bytes", "free", "Next step"):
        assert words in outcome["message"]
    assert nothing_published(tmpfs / "store")
    assert not place.dest.exists()


def test_a_full_destination_leaves_the_tree_for_the_next_attempt(place, actors, tmpfs):
    outcome = actors(place.uri, tmpfs / "dest", place.store).go().end()
    assert "the disk is full" in outcome["message"]
    assert "destination directory" in outcome["message"]
    assert snapshot(tmpfs) == {}
    subprocess.run(["mount", "-o", "remount,size=64m", tmpfs], check=True)
    assert not actors(place.uri, tmpfs / "dest", place.store).go().end()["fetched"]
    assert without_inodes(snapshot(tmpfs / "dest")) == without_inodes(place.expected())


def test_a_noexec_mount_is_avoided_where_there_is_another_place(tmpfs, tmp_path):
    subprocess.run(["mount", "-o", "remount,noexec", tmpfs], check=True)
    assert places.noexec(tmpfs)
    (tmp_path / "own").mkdir(mode=0o700)
    assert places.choose([tmpfs, tmp_path / "own"]).directory == tmp_path / "own"
    assert "noexec" in places.choose([tmpfs]).against


def test_a_read_only_destination_is_named(place, actors, tmpfs):
    (tmpfs / "dest").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    message = actors(place.uri, tmpfs / "dest", place.store).go().end()["message"]
    for words in ("read-only", str(tmpfs / "dest"), "EROFS"):
        assert words in message


@pytest.mark.parametrize(("name", "words"), [("EIO", "input/output error"), ("EDQUOT", "quota"), ("ENOSPC", "full")])
@pytest.mark.parametrize("op", ["write", "create", "rename", "mkdir"])
def test_failing_devices_are_one_error_and_publish_nothing(place, actors, op, name, words):
    fusefs.require()
    with fusefs.FuseMount(place.root / "backing", place.root / "mount") as client:
        actor = actors(place.uri, place.dest, client.path / "store", stop_at=["locked"]).go().until("locked")
        client.set(faults=[{"op": op, "errno": name, "when": "before", "every": 1}])
        outcome = actor.go().end()
        client.set(faults=[])
        assert outcome["error"] == "StagingError"
        assert words in outcome["message"]
        assert nothing_published(place.root / "backing/store")
    assert not place.dest.exists()


# --- other users -------------------------------------------------------------------------------------------------
@pytest.fixture
def for_nobody(place) -> Iterator[Path]:
    """A directory of user nobody that nobody can reach (pytest's own are closed to other users)."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    home = Path(f"/tmp/safedist-test-{os.getpid()}")
    home.mkdir(mode=0o755)
    shutil.copy(place.uri, home / "fast.tar.gz")
    place.uri = home / "fast.tar.gz"
    (home / "own").mkdir()
    os.chown(home / "own", NOBODY, NOBODY)
    yield home
    shutil.rmtree(home)


def test_a_destination_of_somebody_else_is_named(place, actors, for_nobody):
    (for_nobody / "roots").mkdir()
    outcome = actors(place.uri, for_nobody / "roots", for_nobody / "own/store", user=NOBODY).go().end()
    for words in ("permission denied", str(for_nobody / "roots"), "container's user"):
        assert words in outcome["message"]


def test_an_archive_that_may_not_be_read_is_a_matter_of_credentials(place, actors, for_nobody):
    place.uri.chmod(0o600)
    outcome = actors(place.uri, for_nobody / "own/dest", for_nobody / "own/store", user=NOBODY).go().end()
    assert "refused access" in outcome["message"]


def test_ordinary_users_can_stage_read_only_directories_and_restart(place, actors, for_nobody):
    place.uri.write_bytes(targz([directory("ro", 0o555), member("ro/x", b"1", mode=0o444), member("a/b", b"2")]))
    home = for_nobody / "own"
    for fetched in (True, False):
        outcome = actors(place.uri, home / "dest", home / "store", user=NOBODY).go().end()
        assert outcome["fetched"] is fetched
    assert (home / "dest/ro/x").read_bytes() == b"1"
    assert os.listdir(home / "store/work") == []


def test_a_failed_staging_of_an_ordinary_user_leaves_no_read_only_leftovers(place, actors, for_nobody):
    place.uri.write_bytes(
        targz([directory("ro", 0o555), member("ro/x", b"1", mode=0o444), member("bad", b"", mode=0o4755)])
    )
    home = for_nobody / "own"
    outcome = actors(place.uri, home / "dest", home / "store", user=NOBODY).go().end()
    assert outcome["error"] == "ArchiveError"
    assert nothing_published(home / "store")


def test_what_a_killed_staging_left_read_only_is_removed_by_an_ordinary_user(for_nobody):
    tree = for_nobody / "own" / "work"
    (tree / "ro" / "inner").mkdir(parents=True)
    (tree / "ro" / "inner" / "f").touch()
    for directory_ in (tree / "ro" / "inner", tree / "ro", tree):
        os.chown(directory_, NOBODY, NOBODY)
        directory_.chmod(0o555 if directory_ != tree else 0o700)
    if (child := os.fork()) == 0:  # not a new interpreter: it may lie where that user cannot read
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        remove_tree(tree)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in tree.parent.iterdir()] == []


def test_read_only_directories_are_merged_again_by_an_ordinary_user(place, actors, for_nobody):
    arguments = (place.uri, for_nobody / "own/dest", for_nobody / "own/store")
    place.uri.write_bytes(targz([directory("ro/inner", 0o555), directory("ro", 0o555), member("ro/inner/f", b"1")]))
    assert "tree" in actors(*arguments, user=NOBODY).go().end()
    named = [directory(name, 0o555) for name in ("ro/inner", "ro", "ro/new")]
    files = [member(f"ro/{name}", b"2") for name in ("inner/f", "inner/g", "h", "new/i")]
    place.uri.write_bytes(targz([*named, *files]))
    assert actors(*arguments, user=NOBODY).go().end().get("message") is None
    for name in ("inner/f", "inner/g", "h", "new/i"):
        assert (for_nobody / "own/dest/ro" / name).read_bytes() == b"2"
    assert (for_nobody / "own/dest/ro/inner").stat().st_mode & 0o777 == 0o555
