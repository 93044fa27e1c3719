"""kill -9 at every named point of a save: what is found afterwards is the last committed save, whole."""

from __future__ import annotations

import pytest

from tests.checkpoint import points
from tests.checkpoint.saving import resumed, save_two
from tests.fs.ranks import Process, pause

# Point, which arrival at it -> the step that is found. On a file system the first save, where it matters that there is
# none before it; each point of the second one: test_race_lives.
CASES = [
    (points.PART_WRITTEN, 1, None),
    (points.PARTS_WRITTEN, 1, None),
    (points.COMMITTED, 1, 1),
]
IN_A_STORE = [
    (points.PART_OPENED, 1, None),
    (points.PARTS_WRITTEN, 2, 1),
    (points.COMMITTED, 2, 2),
    (points.PRUNED_ONE_MANIFEST, 1, 2),
]
"""What an object store does in its own way: an upload that is cut, one that is not committed, the commit, removals."""


def killed_at(place, point, arrival, env=None):
    process = Process(save_two, str(place), point, arrival, pause, env=env)
    process.until("there")
    process.kill()


def found(place, env=None):
    return Process(resumed, str(place), env=env).outcome().get()


def again(place, env=None):
    """A process that is not killed goes on in the same place."""
    Process(save_two, str(place), "nowhere", 0, pause, env=env).outcome().get()


@pytest.mark.parametrize(("point", "arrival", "step"), CASES)
def test_on_a_file_system(tmp_path, point, arrival, step):
    killed_at(tmp_path / "place", point, arrival)
    assert found(tmp_path / "place") == ((step + 1, step) if step else (0, -1.0))
    again(tmp_path / "place")
    assert found(tmp_path / "place") == (3, 2.0)


@pytest.mark.parametrize(("point", "arrival", "step"), IN_A_STORE)
def test_in_an_object_store(s3, point, arrival, step):
    place = f"s3://code/{point.replace(' ', '-')}-{arrival}"
    killed_at(place, point, arrival, s3.environment)
    assert found(place, s3.environment) == ((step + 1, step) if step else (0, -1.0))
    again(place, s3.environment)
    assert found(place, s3.environment) == (3, 2.0)
