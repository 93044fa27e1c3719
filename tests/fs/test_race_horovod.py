"""The group over Horovod, among real Horovod ranks that the real ``horovodrun`` has started (gloo, one machine)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.fs import horovod_ranks
from tests.fs.ranks import launched

RANKS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank has found."""
    place = tmp_path_factory.mktemp("shared")
    horovodrun = Path(sys.executable).with_name("horovodrun")
    hosts = ["-H", f"localhost:{RANKS}", "--network-interface", "lo"]
    launched(Path(horovod_ranks.__file__), [horovodrun, "--gloo", "-np", str(RANKS), *hosts, sys.executable], place)
    reports = [json.loads((place / f"found-{rank}.json").read_text()) for rank in range(RANKS)]
    return {"worked": len(list(place.glob("worked-*"))), "ranks": reports}


@pytest.mark.horovod
def test_the_helpers_find_horovod_by_themselves(found):
    (where,) = {rank["group"] for rank in found["ranks"]}
    assert where.startswith("Horovod rank 0's store at 127.0.0.1:")


@pytest.mark.horovod
def test_a_barrier_lets_nobody_pass_before_all_have_come(found):
    assert [rank["seen_after_the_barrier"] for rank in found["ranks"]] == [RANKS] * RANKS
    assert [rank["told"] for rank in found["ranks"]] == [[f"rank {rank}" for rank in range(RANKS)]] * RANKS


@pytest.mark.horovod
def test_who_is_missing_at_a_barrier_is_named(found):
    *came, absent = (rank["missing"] for rank in found["ranks"])
    assert all(f"did not come to the meeting point: {RANKS - 1} [" in error for error in came)
    assert absent == ""


@pytest.mark.horovod
def test_one_rank_works_and_all_have_its_result_or_its_error(found):
    assert found["worked"] == 1
    for name in ("by_job", "by_node"):
        assert len({rank[name] for rank in found["ranks"]}) == 1
    assert [rank["failed"] for rank in found["ranks"]] == [True] * RANKS


@pytest.mark.horovod
def test_what_is_shared_is_found_out_and_published_together(found):
    assert [rank["shared"] for rank in found["ranks"]] == ["job"] * RANKS
    assert [rank["own"] for rank in found["ranks"]] == [["rank", True]] * RANKS
    assert [rank["published"] for rank in found["ranks"]] == [RANKS] * RANKS
