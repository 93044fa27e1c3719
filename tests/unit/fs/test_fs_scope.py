from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.fs import once_per_node, shared_scope
from flytekitplugins_safedist.fs.scope import SharedScope, kind_of, partition

RANKS = st.integers(1, 8).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=n), min_size=n, max_size=n)
)


@given(RANKS)
def test_a_partition_has_every_rank_once_and_never_parts_who_saw_each_other(views):
    parts = partition(views)
    assert sorted(rank for part in parts for rank in part) == list(range(len(views)))
    assert all(list(part) == sorted(part) for part in parts)
    part_of = {rank: part for part in parts for rank in part}
    assert all(part_of[rank] == part_of[other] for rank, seen in enumerate(views) for other in seen)


@given(RANKS)
def test_who_never_saw_anyone_is_alone(views):
    alone = [
        rank
        for rank in range(len(views))
        if not any(
            (other == rank) != (seer == rank)
            for seer, seen in enumerate(views)
            for other in seen
            if rank in (seer, other)
        )
    ]
    parts = partition(views)
    assert all((rank,) in parts for rank in alone)


@pytest.mark.parametrize(
    ("parts", "nodes", "kind"),
    [
        ([[0, 1, 2, 3]], [0, 0, 1, 1], "job"),
        ([[0, 1], [2, 3]], [0, 0, 1, 1], "node"),
        ([[0], [1], [2], [3]], [0, 0, 1, 1], "rank"),
        ([[0], [1]], [0, 1], "node"),
        ([[0, 1, 2], [3]], [0, 0, 1, 1], "mixed"),
        ([[0, 2], [1, 3]], [0, 0, 1, 1], "mixed"),
        ([[0]], [0], "job"),
    ],
)
def test_each_partition_has_its_name(parts, nodes, kind):
    assert kind_of(parts, nodes) == kind


def test_leaders_are_the_lowest_of_their_part(tmp_path):
    scope = SharedScope("node", ((0, 1), (2, 3)), tmp_path, 3)
    assert (scope.part, scope.leader, scope.is_leader) == (1, 2, False)


def test_a_single_process_shares_with_itself_and_has_the_directory_made(tmp_path):
    assert shared_scope(tmp_path / "made" / "by it").kind == "job"
    assert (tmp_path / "made" / "by it").is_dir()
    assert once_per_node("fill", lambda: "filled", path=tmp_path / "another") == "filled"
    assert (tmp_path / "another").is_dir()
