"""kill -9 at every named point of a save: what is found afterwards is the last committed save, whole.

On a disk, on an object store, on a file system that nodes see differently, and sharded.
"""

from __future__ import annotations

import pytest

from tests.checkpoint import points
from tests.checkpoint.lives import Kill, Life, faults, lived
from tests.harness.fusefs import FuseMount, require
from tests.harness.moto_s3 import BUCKET


def chain(directory, ways, places, env=None, *, sharded):
    """A life for each of ``ways`` to die, and one that looks what there is; returns the ledger."""
    for number, kill in enumerate([*ways, None], start=1):
        life = Life(number, "", directory, sharded=sharded, kill=kill, steps=3 if kill else 0)
        kinds = [one.kind for one in lived(life, places(number), env or {})]
        assert kinds[kill.rank] == "died" if kill else set(kinds) == {"value"}, (kill, kinds)
    return (directory / "ledger").read_text()


# On a disk the first save, where it matters that there is none before it; on an object store what it does in its own
# way: an upload that is cut, one that is not committed, the commit, removals.
WAYS = {
    "disk": [(points.PART_WRITTEN, 1), (points.PARTS_WRITTEN, 1), (points.COMMITTED, 1)],
    "s3": [
        (points.PART_OPENED, 1),
        (points.PARTS_WRITTEN, 2),
        (points.COMMITTED, 2),
        (points.PRUNED_ONE_MANIFEST, 1),
    ],
}


@pytest.mark.parametrize(("where", "found"), [("disk", [-1, -1, -1, 0]), ("s3", [-1, -1, 0, 2, 3])])
def test_full_saves_of_one_rank(tmp_path, request, where, found):
    s3 = request.getfixturevalue("s3") if where == "s3" else None
    place, env = (f"s3://{BUCKET}/lives", s3.environment) if s3 else (str(tmp_path / "place"), {})
    ways = [Kill("rank", 0, point, arrival) for point, arrival in WAYS[where]]
    ledger = chain(tmp_path, ways, lambda _: [place], env, sharded=False)
    assert faults(ledger) == []
    resumed = [line.split() for line in ledger.splitlines() if line.startswith("resumed")]
    assert [int(step) for _, _, _, step, _ in resumed] == found


def every_point(rank):
    """Each point that the rank comes to, at its second save; a manifest is pruned with the third."""
    mine = points.IN_ORDER if rank == 0 else (points.PART_OPENED, points.PART_WRITTEN)
    return [Kill("rank", rank, point, 1 if point == points.PRUNED_ONE_MANIFEST else 2) for point in mine]


def test_full_saves_that_another_node_resumes(tmp_path):
    require()
    lying = {"not_there": 60, "stale_attrs": 60, "locks": "dropped"}
    with (
        FuseMount(tmp_path / "server", tmp_path / "one", **lying) as one,
        FuseMount(tmp_path / "server", tmp_path / "two", **lying) as two,
    ):
        nodes = [str(client.path / "place") for client in (one, two)]
        ledger = chain(tmp_path, every_point(0), lambda number: [nodes[number % 2]], sharded=False)
    assert faults(ledger) == []
    assert ledger.count("struck") == len(points.IN_ORDER)


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_saves_of_two_ranks(tmp_path, rank):
    ledger = chain(tmp_path, every_point(rank), lambda _: [str(tmp_path / "place")] * 2, sharded=True)
    assert faults(ledger) == []
    assert ledger.count("struck") == len(every_point(rank))


def test_a_save_that_rank_0_has_committed_stays_where_the_others_only_see_that_it_is_gone(tmp_path):
    places = [str(tmp_path / "place")] * 2
    kill = Kill("rank", 0, points.COMMITTED, 2)
    first = lived(Life(1, "", tmp_path, sharded=True, kill=kill), places, {}, together=False)
    assert [one.kind for one in first] == ["died", "error"]
    lived(Life(2, "", tmp_path, sharded=True, steps=0), places, {})
    assert faults((tmp_path / "ledger").read_text()) == []


@pytest.mark.parametrize(
    ("ledger", "fault"),
    [
        ("committed 3\nresumed 2 0 2 1002", "step 2 after 3 was committed"),
        ("resumed 2 0 2 1002 1001", "is made of"),
        ("resumed 2 0 2 1001", "is made of"),
        ("resumed 2 0 2 1002\nresumed 2 1 1 1001", "rank 1 resumed step 1, another one 2"),
    ],
)
def test_what_must_not_be_is_seen(ledger, fault):
    (found,) = faults(ledger)
    assert fault in found


def test_a_rank_that_comes_late_is_not_compared_with_the_next_save():
    assert faults("committed 3\nresumed 2 0 3 1003\ncommitted 4\nresumed 2 1 3 1003") == []
