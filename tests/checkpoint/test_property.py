"""Whatever is saved, however it is shared and wrapped: restored in another way it trains on as if nothing had been."""

from __future__ import annotations

import os
from dataclasses import replace

from tests.checkpoint import property_ranks
from tests.checkpoint.property_ranks import Way, drawn
from tests.fs.ranks import outcomes_of, size
from tests.harness.moto_s3 import BUCKET

SEED = int(os.environ.get("SAFEDIST_TEST_SEED", "305"))
"""Of this one, the first few have nearly every kind, optimizer and number of ranks."""
CASES = size(12, 200)


def run(work, directory, cases, way, environment):
    """Each number of ranks does its cases one after the other; what rank 0 has returned of each, by its number."""
    found = {}
    for count in sorted({way(case).world_size for case in cases}):
        mine = [case for case in cases if way(case).world_size == count]
        first, *_ = outcomes_of(count, work, directory, mine, within=size(500, 3000), **environment)
        found |= first.get() or {}
    return found


def wrong(directory, cases, **environment):
    """What is wrong with what was restored of them, by their numbers."""
    run(property_ranks.save_all, directory, cases, lambda case: case.saved, environment)
    found = run(property_ranks.restore_all, directory, cases, lambda case: case.restored, environment)
    assert len(found) == len(cases)
    return {number: text for number, text in found.items() if text}


def named(number, saved, restored, **more):
    """A case that is not left to chance, numbered behind those that are; each way is a number of ranks and a kind."""
    ways = [Way(*way, wrapped=(0,), by="", backwards=False, orig=False) for way in (saved, restored)]
    case = replace(drawn(SEED, 0), number=1000 + number, optimizer="adam", groups=1, steps=2)
    case = replace(case, shared=False, tied=False, scalar=False, frozen=False, unused=False)
    return replace(case, saved=ways[0], restored=ways[1], **more)


def test_what_is_restored_is_what_was_saved_and_trains_on_as_the_unbroken_run(tmp_path, s3):
    in_a_store = {"store": f"s3://{BUCKET}/sharded", "tied": True}
    good = [
        *(drawn(SEED, number) for number in range(CASES)),
        named(0, (4, "fsdp1"), (3, "fsdp1"), tied=True),
        named(1, (4, "fsdp2"), (2, "fsdp2"), **in_a_store),
        named(2, (1, "plain"), (3, "fsdp2"), tied=True),
        named(3, (3, "fsdp2"), (1, "plain"), tied=True),
    ]
    forgetting = [
        named(4, (1, "plain"), (1, "plain"), optimizer="forgets"),
        named(5, (2, "fsdp2"), (2, "fsdp2"), optimizer="forgets"),
    ]
    found = wrong(tmp_path, [*good, *forgetting], **s3.environment)
    seen = [found.pop(case.number, "restored") for case in forgetting]
    assert found == {}
    for text in seen:
        expected = "what was loaded is not what was saved: it is not safe to go on [state=optimizer.state."
        assert expected in text, "an optimizer that loads another thing than it was given is seen"


def test_fsdp1_takes_its_parts_from_whole_tensors_and_is_resumed_where_a_block_was_never_trained(tmp_path):
    whole, *untrained = (
        named(0, (1, "plain"), (2, "fsdp1"), tied=True),
        named(1, (2, "fsdp1"), (2, "fsdp1"), unused=True),
        named(2, (2, "fsdp1"), (2, "fsdp1"), unused=True),
    )
    original = [replace(way, orig=True) for way in (untrained[1].saved, untrained[1].restored)]
    untrained[1] = replace(untrained[1], saved=original[0], restored=original[1])
    assert wrong(tmp_path, [whole, *untrained]) == {}
