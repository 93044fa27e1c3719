"""Many processes stage at once and are killed at every point: one result, always."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.product import POINTS
from tests.harness.staging_actors import (  # noqa: F401  (fixtures)
    MODULES,
    actors_fixture,
    all_at_once,
    archive,
    place_fixture,
)
from tests.harness.tarballs import snapshot

KILL_POINTS = [point for point in POINTS if point != "waiting"]


# --- many at once ------------------------------------------------------------------------------------------------
def test_32_processes_of_one_node_fetch_and_unpack_once(place, actors):
    started = [actors(place.uri, place.dest, place.store) for _ in range(32)]
    outcomes = all_at_once(started)
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    assert sum(bool(outcome["fetched"]) for outcome in outcomes) == 1
    assert sum(actor.points.count("unpack") for actor in started) == 1
    assert len({outcome["tree"] for outcome in outcomes}) == 1
    place.assert_complete()


READER = """
import json, os, sys
dest, expected = sys.argv[1], json.loads(sys.argv[2])
print("ready", flush=True)
rounds = wrong = 0
seen = False
os.set_blocking(0, False)
def told_to_stop():
    try:
        return os.read(0, 1) != b"?"
    except BlockingIOError:
        return False
while not told_to_stop():
    rounds += 1
    with open(dest + "/main.py") as main:  # the image has one: it must never be missing, empty or half
        if main.read() not in ("VERSION = 'image'", "VERSION = '1'"):
            wrong += 1
    if os.path.isdir(dest + "/pkg"):  # the image has none: whoever sees it sees all of it
        for name, size in expected.items():
            try:
                if os.stat(dest + "/" + name).st_size != size:
                    wrong += 1
            except FileNotFoundError:
                wrong += 1
        seen = True
    if "pkg.m39" not in sys.modules:
        sys.path.insert(0, dest)
        try:
            import pkg.m39
        except ModuleNotFoundError:
            sys.modules.pop("pkg", None)
            wrong += seen
        else:
            wrong += pkg.m39.VALUE != 39
        sys.path.remove(dest)
        sys.path_importer_cache.clear()
print(json.dumps({"rounds": rounds, "wrong": wrong, "imported": "pkg.m39" in sys.modules}), flush=True)
"""


def test_looping_readers_never_see_a_partial_tree_or_file(place, actors):
    place.dest.mkdir()
    (place.dest / "main.py").write_text("VERSION = 'image'")
    sizes = json.dumps({name: len(text) for name, text in MODULES.items()})
    readers = [
        subprocess.Popen(
            [sys.executable, "-B", "-c", READER, str(place.dest), sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    outcomes = all_at_once([actors(place.uri, place.dest, place.store) for _ in range(6)])
    # One more look after everything is there, so that each has imported.
    actors(place.uri, place.dest, place.store).go().end()
    results = [json.loads(reader.communicate("x")[0]) for reader in readers]
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    for result in results:
        assert result["wrong"] == 0
        assert result["rounds"] > 1
        assert result["imported"]
    place.assert_complete()


def test_different_destinations_share_the_one_fetch(place, actors):
    dests = [place.root / f"dest{n}" for n in range(4)]
    outcomes = all_at_once([actors(place.uri, dest, place.store) for dest in dests for _ in range(2)])
    assert sum(bool(outcome["fetched"]) for outcome in outcomes) == 1
    place.assert_complete(*dests)


def test_two_archives_into_one_destination_leave_every_process_its_own_tree(place, actors):
    other = archive(place.root / "second.tar.gz", version="2")
    outcomes = all_at_once([actors(uri, place.dest, place.store) for _ in range(4) for uri in (place.uri, other)])
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    for number, outcome in enumerate(outcomes):
        version = "1" if number % 2 == 0 else "2"
        assert (Path(str(outcome["tree"])) / "main.py").read_text() == f"VERSION = '{version}'"
    assert (place.dest / "main.py").read_text() in ("VERSION = '1'", "VERSION = '2'")
    assert not any(".safedist-" in name for name in snapshot(place.dest))


# --- killed ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("point", KILL_POINTS)
def test_killed_at_any_point_the_next_attempt_completes_byte_for_byte(place, actors, point):
    actors(place.uri, place.dest, place.store, stop_at=[point]).go().until(point).kill()
    assert "error" not in actors(place.uri, place.dest, place.store).go().end()
    place.assert_complete()


@pytest.mark.parametrize("point", KILL_POINTS)
def test_killed_over_an_image_the_next_attempt_completes_byte_for_byte(place, actors, point):
    (place.dest / "pkg").mkdir(parents=True)
    (place.dest / "pkg/m1.py").write_text("the image's")
    actors(place.uri, place.dest, place.store, stop_at=[point]).go().until(point).kill()
    assert "error" not in actors(place.uri, place.dest, place.store).go().end()
    place.assert_complete()


@pytest.mark.parametrize("point", ["locked", "fetch", "unpack", "before_publish", "after_publish", "merge"])
def test_waiters_take_over_at_once_when_the_one_who_works_is_killed(place, actors, point):
    worker = actors(place.uri, place.dest, place.store, stop_at=[point]).go().until(point)
    # Their patience is an hour: that they end at all shows that the death itself let them go on.
    waiters = [actors(place.uri, place.dest, place.store, stop_at=["waiting"]).go().until("waiting") for _ in range(3)]
    worker.kill()
    outcomes = all_at_once(waiters)
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    assert sum(bool(outcome["fetched"]) for outcome in outcomes) == (0 if point == "merge" else 1)
    assert len(os.listdir(place.store / "trees")) == 1
    place.assert_complete()


def test_a_killed_waiter_disturbs_nobody(place, actors):
    worker = actors(place.uri, place.dest, place.store, stop_at=["fetch"]).go().until("fetch")
    actors(place.uri, place.dest, place.store, stop_at=["waiting"]).go().until("waiting").kill()
    assert worker.go().end()["fetched"]
    place.assert_complete()


def test_a_frozen_worker_is_overtaken_and_does_no_harm_when_it_wakes(place, actors):
    worker = actors(place.uri, place.dest, place.store, stop_at=["unpack"]).go().until("unpack")
    second = actors(place.uri, place.dest, place.store, patience=0.0).go().end()
    woken = worker.go().end()
    assert second["fetched"]
    assert woken["fetched"]
    assert second["tree"] == woken["tree"], "the later one found the name taken and used what was there"
    place.assert_complete()


def test_a_pod_restarted_in_place_finds_its_leftovers_and_ends_the_same(place, actors):
    for point in KILL_POINTS:
        if point in ("locked", "fetch", "unpack", "before_publish", "after_publish"):
            actors(place.uri, place.dest, place.store, stop_at=[point]).go().until(point).kill()
    for point in ("before_merge", "merge"):
        actors(place.uri, place.dest, place.store, stop_at=[point]).go().until(point).kill()
    assert not actors(place.uri, place.dest, place.store).go().end()["fetched"]
    place.assert_complete()


def test_clocks_decide_nothing(place, actors):
    for path in (place.uri, place.root):
        os.utime(path, (4_000_000_000, 4_000_000_000))
    actors(place.uri, place.dest, place.store, stop_at=["unpack"]).go().until("unpack").kill()
    for left in (place.store / "work").iterdir():
        os.utime(left, (4_000_000_000, 4_000_000_000))  # "young", as a skewed server's clock would have it
    actors(place.uri, place.dest, place.store).go().end()
    place.assert_complete()
