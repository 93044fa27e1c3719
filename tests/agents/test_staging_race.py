"""Many processes stage at once and are killed at every point: one result, always."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fs.ranks import size
from tests.harness.product import POINTS
from tests.harness.staging_actors import (  # noqa: F401  (fixtures)
    MODULES,
    actors_fixture,
    all_at_once,
    archive,
    left_in,
    place_fixture,
)

# --- many at once ------------------------------------------------------------------------------------------------
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
    outcomes = all_at_once([actors(place.uri, place.dest) for _ in range(6)])
    # One more look after everything is there, so that each has imported.
    actors(place.uri, place.dest).go().end()
    results = [json.loads(reader.communicate("x")[0]) for reader in readers]
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    for result in results:
        assert result["wrong"] == 0
        assert result["rounds"] > 1
        assert result["imported"]
    place.assert_complete()


BESIDE = """
import json, os, sys
from pathlib import Path
from tests.harness.product import stage
order = json.load(sys.stdin)

def look(dest, image, complete):
    whole = not image and os.path.isdir(dest + "/pkg")  # it comes by one rename
    for name, text in order["files"].items():
        old = "the image's" if image and name == "pkg/m1.py" else None
        try:
            with open(os.path.join(dest, name)) as file:
                found = file.read()
        except FileNotFoundError:
            assert not complete and not old and not (whole and name.startswith("pkg/")), f"{dest}/{name} is missing"
        else:
            assert found == text or (found == old and not complete), f"{dest}/{name} is not whole"

def read_until(stopped, ready, dests):
    os.set_blocking(stopped, False)
    while True:
        for dest in dests:
            look(dest, dest == dests[-1], False)
        if ready is not None:
            os.write(ready, b"x")
            ready = None
        try:
            if not os.read(stopped, 1):
                break
        except BlockingIOError:
            pass
    for dest in dests:
        look(dest, dest == dests[-1], True)

def crowd(dests):
    stopped, stop = os.pipe()
    looked, ready = os.pipe()
    if (reader := os.fork()) == 0:
        os.close(stop)
        read_until(stopped, ready, dests)
        os._exit(0)
    os.close(ready)
    assert os.read(looked, 1) == b"x", "the reader ended at its first look"
    wait, start = os.pipe()
    children = []
    for dest in dests * 16:
        if (child := os.fork()) == 0:
            os.close(start)
            os.read(wait, 1)  # all are let go at one moment
            stage(order["uri"], Path(dest))
            os._exit(0)
        children.append(child)
    os.close(start)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    os.close(stop)
    assert not os.waitpid(reader, 0)[1], "the reader saw what is not whole"
    assert not failed, f"{len(failed)} of 48 failed"

for dests in order["rounds"]:
    crowd(dests)
"""


def test_a_reader_beside_16_processes_in_each_of_three_destinations_sees_whole_files_only(place):
    rounds = []
    for number in range(size(2, 100)):
        missing, empty, image = (place.root / f"{number}" / name for name in ("missing", "empty", "image"))
        empty.mkdir(parents=True)
        (image / "pkg").mkdir(parents=True)
        (image / "pkg/m1.py").write_text("the image's")
        rounds.append([str(missing), str(empty), str(image)])
    files = {**MODULES, "main.py": "VERSION = '1'"}
    order = json.dumps({"uri": str(place.uri), "rounds": rounds, "files": files})
    done = subprocess.run([sys.executable, "-c", BESIDE], input=order, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for dests in rounds:
        place.assert_complete(*map(Path, dests))


def test_two_archives_into_one_destination_leave_each_file_whole(place, actors):
    other = archive(place.root / "second.tar.gz", version="2")
    outcomes = all_at_once([actors(uri, place.dest) for _ in range(4) for uri in (place.uri, other)])
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    assert (place.dest / "main.py").read_text() in ("VERSION = '1'", "VERSION = '2'")
    assert left_in(place.dest) == left_in(place.root) == []


# --- killed ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_the_next_attempt_completes_byte_for_byte(place, actors, point):
    actors(place.uri, place.dest, stop_at=[point]).go().until(point).kill()
    assert "error" not in actors(place.uri, place.dest).go().end()
    place.assert_complete()


@pytest.mark.parametrize("point", POINTS)
def test_killed_over_an_image_the_next_attempt_completes_byte_for_byte(place, actors, point):
    (place.dest / "pkg").mkdir(parents=True)
    (place.dest / "pkg/m1.py").write_text("the image's")
    actors(place.uri, place.dest, stop_at=[point]).go().until(point).kill()
    assert "error" not in actors(place.uri, place.dest).go().end()
    place.assert_complete()


def test_a_frozen_worker_is_overtaken_and_does_no_harm_when_it_wakes(place, actors):
    place.dest.mkdir()
    worker = actors(place.uri, place.dest, stop_at=["place"]).go().until("place")
    second = actors(place.uri, place.dest).go().end()
    woken = worker.go().end()
    assert "error" not in second
    assert "error" not in woken
    place.assert_complete()


def test_what_killed_starts_have_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(place, actors):
    place.dest.mkdir()
    for point in POINTS:
        actors(place.uri, place.dest, stop_at=[point]).go().until(point).kill()
    (left,) = left_in(place.dest)  # the last one's: each has removed what the one before it had left
    os.utime(place.dest / left, (4_000_000_000, 4_000_000_000))  # "young", as a skewed server's clock would have it
    living = actors(place.uri, place.dest, stop_at=["unpacked"]).go().until("unpacked")
    (livings,) = left_in(place.dest)
    assert livings != left
    assert "error" not in actors(place.uri, place.dest).go().end()
    assert left_in(place.dest) == [livings]
    assert "error" not in living.go().end()
    place.assert_complete()


def test_what_only_begins_as_a_private_directory_is_not_ours_to_remove(place, actors):
    draft = place.dest / ".safedist-draft-0123456789ab"
    draft.mkdir(parents=True)
    assert "error" not in actors(place.uri, place.dest).go().end()
    assert draft.exists()
