"""Whatever is saved, however it is shared and wrapped: restored in another way it trains on as if nothing had been."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.checkpoint import property_ranks
from tests.checkpoint.property_ranks import Way, drawn
from tests.fs.ranks import meeting_point, processes, rank_env, size

SEED = int(os.environ.get("SAFEDIST_TEST_SEED", "305"))
"""Of this one, the first few have nearly every kind, optimizer and number of ranks."""
CASES = size(12, 200)


def run(work, directory, cases, way):
    """Each number of ranks does its cases one after the other; what rank 0 of each has returned."""
    found = {}
    for count in sorted({way(case).world_size for case in cases}):
        mine = [case for case in cases if way(case).world_size == count]
        meeting = meeting_point()
        envs = [{**rank_env(rank, count), **meeting} for rank in range(count)]
        with processes([(work, directory, mine)] * count, envs) as ranks:
            found[count], *_ = [rank.outcome(within=size(500, 3000)).get() for rank in ranks]
    return found


def test_what_is_restored_is_what_was_saved_and_trains_on_as_the_unbroken_run(tmp_path):
    cases = [drawn(SEED, number) for number in range(CASES)]
    run(property_ranks.save_all, tmp_path, cases, lambda case: case.saved)
    found = run(property_ranks.restore_all, tmp_path, cases, lambda case: case.restored)
    wrong = [text for texts in found.values() for text in texts]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize("orig", [False, True])
def test_fsdp1_is_resumed_where_a_block_was_never_trained(tmp_path, orig):
    way = Way(2, "fsdp1", (0,), "", backwards=False, orig=orig)
    case = replace(drawn(SEED, 0), optimizer="adam", groups=1, steps=2, saved=way, restored=way, unused=True)
    case = replace(case, shared=False, scalar=False, frozen=False)
    run(property_ranks.save_all, tmp_path, [case], lambda case: case.saved)
    assert run(property_ranks.restore_all, tmp_path, [case], lambda case: case.restored) == {2: []}


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_an_optimizer_that_loads_another_thing_than_it_was_given_is_seen(tmp_path, kind):
    way = Way(2 if kind == "fsdp2" else 1, kind, (), "", backwards=False, orig=False)
    case = replace(
        drawn(SEED, 0), optimizer="forgets", steps=2, saved=way, restored=way, tied=False, frozen=False, unused=False
    )
    run(property_ranks.save_all, tmp_path, [case], lambda case: case.saved)
    ((text,),) = run(property_ranks.restore_all, tmp_path, [case], lambda case: case.restored).values()
    assert "what was loaded is not what was saved: it is not safe to go on [state=optimizer.state." in text
