"""Sharded saves, resumed by other numbers of ranks to the last digit."""

from __future__ import annotations

import json

import pytest

from tests.checkpoint import sharded_ranks
from tests.fs.ranks import meeting_point, processes, rank_env
from tests.harness.moto_s3 import BUCKET
from tests.harness.product import saves


def report(directory, world_size):
    """What the ranks resumed, and what they ended with."""
    return json.loads((directory / f"report-{world_size}.json").read_text())


def run(directory, world_size, *arguments, place=None, **environment):
    """Ranks that find the variables that torchrun gives them, with torch imported already."""
    meeting = meeting_point()
    envs = [{**rank_env(rank, world_size), **meeting, **environment} for rank in range(world_size)]
    work = sharded_ranks.train, str(directory), str(place or directory / "place"), *arguments
    with processes([work] * world_size, envs) as ranks:
        for rank in ranks:
            rank.outcome().get()
    return report(directory, world_size)


@pytest.mark.parametrize(("kind", "store"), [("fsdp1", "disk"), ("fsdp", "s3")])
def test_other_numbers_of_ranks_resume_it(tmp_path, kind, store, request):
    where = {}
    if store == "s3":
        server = request.getfixturevalue("s3")
        where = {"place": f"s3://{BUCKET}/{kind}/place", **server.environment}
    before = run(tmp_path, 4, kind, "5", **where)
    assert before["resumed"]["first"] == 0
    for world_size, first in ((2, 5), (3, 10)):
        after = run(tmp_path, world_size, kind, "5", **where)
        resumed = after["resumed"]
        assert (resumed["first"], resumed["told"]) == (first, f"step {first - 1}")
        assert resumed["kept"] == [first - 1.0] * 3
        assert {name: resumed[name] for name in before["ended"]} == before["ended"]
        before = after


def test_a_model_is_resumed_sharded_from_a_full_save_and_whole_from_a_sharded_one(tmp_path):
    before = run(tmp_path, 1, "plain", "5")
    for world_size, kind, first in ((3, "fsdp", 5), (2, "plain", 10)):
        after = run(tmp_path, world_size, kind, "5")
        resumed = after["resumed"]
        assert (resumed["first"], resumed["told"]) == (first, f"step {first - 1}")
        assert {name: resumed[name] for name in before["ended"]} == before["ended"]
        before = after


def test_fsdp1_takes_its_parts_from_whole_tensors(tmp_path):
    before = run(tmp_path, 1, "plain", "5")
    resumed = run(tmp_path, 2, "fsdp1", "1")["resumed"]
    assert resumed["first"] == 5
    assert {name: resumed[name] for name in before["ended"]} == before["ended"]


def test_one_damaged_part_of_many_and_all_ranks_pass_the_save_over(tmp_path):
    place = tmp_path / "place"
    run(tmp_path, 2, "fsdp", "10")
    (newest,) = (path for path in place.iterdir() if saves.step_of(path.name) == 9)
    part = newest / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert run(tmp_path, 2, "fsdp", "1")["resumed"]["first"] == 5
