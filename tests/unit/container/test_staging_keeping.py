"""Staged trees go by age and size, and never while somebody uses them."""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import time
from pathlib import Path

import pytest

from flytekitplugins_safedist.container.staging import CodeStore, Keep, Options, Retry, keeping, stage
from tests.harness.staging_actors import actors_fixture, archive, place_fixture  # noqa: F401  (fixtures)
from tests.harness.tarballs import project

NOTHING = Keep(seconds=0.0, size=0)
"""Everything that nobody uses is too much."""


class Node:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store"

    def stage(self, name: str, **changes):
        """The archive ``name``, fetched or found."""
        uri = self.root / f"{name}.tar.gz"
        if not uri.exists():
            uri.write_bytes(project({"main.py": f"NAME = '{name}'", "blob": name * 1000}))
        return stage(
            str(uri), self.root / f"dest-{name}", Options(**{"store": self.store, "retry": Retry(1), **changes})
        )

    def made(self, name: str) -> str:
        """Stage it, and let go of it; its directory's name."""
        key = self.stage(name).tree.parent.name
        gc.collect()
        return key

    def unused(self, key: str, seconds: float) -> None:
        """As if it was last used so long ago."""
        then = time.time() - seconds
        os.utime(self.store / "trees" / key / "manifest", (then, then))

    def trees(self) -> set[str]:
        return set(os.listdir(self.store / "trees"))

    def prune(self, keep: Keep) -> None:
        CodeStore(self.store).prune(keep)
        assert os.listdir(self.store / "work") == []


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_tree_that_was_not_used_for_long_goes_when_another_is_made(node):
    old, young = node.made("old"), node.made("young")
    node.unused(old, 8 * 86400)
    node.unused(young, 6 * 86400)
    new = node.made("new")
    assert node.trees() == {young, new}
    assert len(os.listdir(node.store / "sources")) == 2
    assert node.stage("old").fetched, "and it is fetched again when it is needed"


def test_using_a_tree_is_what_counts(node):
    key = node.made("used")
    node.unused(key, 8 * 86400)
    node.made("used")
    node.made("new")
    assert key in node.trees()


def test_beyond_the_size_those_go_that_were_used_longest_ago(node):
    keys = [node.made(name) for name in ("first", "second", "third")]
    for hours, key in zip((2, 4, 3), keys, strict=True):
        node.unused(key, hours * 3600)
    size = json.loads((node.store / "trees" / keys[0] / "manifest").read_bytes())["raw"]
    node.prune(Keep(size=2 * size))
    assert node.trees() == {keys[0], keys[2]}


def test_what_was_used_within_the_hour_does_not_go_for_its_size(node):
    key = node.made("busy")
    node.prune(Keep(size=0))
    assert node.trees() == {key}


def test_a_tree_in_this_process_stays_as_long_as_its_value(node):
    code = node.stage("held")
    node.unused(code.tree.parent.name, 1e9)
    node.prune(NOTHING)
    assert (code.tree / "main.py").exists()
    del code
    gc.collect()
    node.prune(NOTHING)
    assert node.trees() == set()


def test_a_tree_in_another_process_stays_until_that_ends_whatever_ends_it(place, actors, node):
    actor = actors(place.uri, place.dest, node.store, stop_at=["merged"]).go().until("merged")
    (key,) = node.trees()
    node.unused(key, 1e9)
    node.prune(NOTHING)
    assert node.trees() == {key}
    actor.kill()
    node.prune(NOTHING)
    assert node.trees() == set()


def test_a_tree_that_is_just_being_published_stays(place, actors, node):
    actor = actors(place.uri, place.dest, node.store, stop_at=["after_publish"]).go().until("after_publish")
    (key,) = node.trees()
    node.unused(key, 1e9)
    node.prune(NOTHING)
    assert node.trees() == {key}
    assert "tree" in actor.go().end()


def test_a_lease_is_handed_on_by_exec(node):
    code = node.stage("held")
    assert os.get_inheritable(code.lease._fd)


def test_a_tree_that_goes_between_finding_and_holding_it_is_made_again(node, monkeypatch):
    node.made("fleeting")
    module = importlib.import_module("flytekitplugins_safedist.container.staging.stage")
    real, removed = module.lease, []

    def lease(place):
        if not removed:
            node.unused(place.name, 1e9)
            node.prune(NOTHING)
            removed.append(place)
        return real(place)

    monkeypatch.setattr(module, "lease", lease)
    code = node.stage("fleeting")
    assert removed
    assert code.fetched
    assert (code.tree / "main.py").exists()


def another_boot(node: Node, key: str) -> None:
    manifest = node.store / "trees" / key / "manifest"
    content = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps({**content, "boot": "another"}))


@pytest.mark.parametrize("local", [True, False])
def test_trees_of_another_boot_go_only_where_no_other_machine_can_use_them(node, monkeypatch, local):
    monkeypatch.setattr(keeping, "is_local", lambda _path: local)
    key = node.made("before")
    another_boot(node, key)
    node.unused(key, 1e9)
    node.prune(Keep())
    assert (key in node.trees()) is not local


def test_a_tree_of_another_boot_goes_however_lately_it_was_used(node):
    before, now = node.made("before"), node.made("now")
    another_boot(node, before)
    node.prune(Keep())
    assert node.trees() == {now}


def test_a_network_file_system_is_not_taken_for_a_local_one(monkeypatch):
    for kind, local in {"ext4": True, "overlay": True, "nfs4": False, "virtiofs": False, "unknown": False}.items():
        mount = type("Mount", (), {"fstype": kind})
        monkeypatch.setattr(keeping, "mount_of", lambda _path, mount=mount: mount)
        assert keeping.is_local(Path("/")) is local


def test_a_tree_without_its_manifest_goes_when_it_is_old(node):
    key = node.made("broken")
    (node.store / "trees" / key / "manifest").unlink()
    node.prune(Keep())
    assert node.trees() == {key}
    os.utime(node.store / "trees" / key, (0, 0))
    node.prune(Keep())
    assert node.trees() == set()


def test_nothing_goes_where_the_kernel_does_not_tell_its_boot(node, monkeypatch):
    monkeypatch.setattr(keeping, "boot_id", lambda: "unknown")
    key = node.made("x")
    node.unused(key, 1e9)
    node.prune(NOTHING)
    assert node.trees() == {key}


@pytest.mark.parametrize("locks", ["always granted", "refused"])
def test_nothing_goes_where_locks_mean_nothing(node, monkeypatch, locks):
    key = node.made("x")
    node.unused(key, 1e9)

    def flock(*_):
        if locks == "refused":
            raise OSError(95, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    node.prune(NOTHING)
    assert node.trees() == {key}


def test_what_dead_processes_of_another_boot_left_is_swept(node):
    node.made("x")
    left = node.store / "work/.safedist-00000000-0123456789ab"
    (left / "code").mkdir(parents=True)
    node.made("y")
    assert os.listdir(node.store / "work") == []
