"""The group over Horovod, among real Horovod ranks that the real ``horovodrun`` has started (gloo, one machine)."""

from __future__ import annotations

import json
import re
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
    command = [horovodrun, "--gloo", "-np", str(RANKS), *hosts, sys.executable]
    # Ranks import for longer than Horovod's own 30 s where much else runs.
    launched(Path(horovod_ranks.__file__), command, place, HOROVOD_GLOO_TIMEOUT_SECONDS="240")
    reports = [json.loads((place / f"found-{rank}.json").read_text()) for rank in range(RANKS)]
    return {"worked": len(list(place.glob("worked-*"))), "ranks": reports}


@pytest.mark.horovod
def test_a_barrier_lets_nobody_pass_before_all_have_come(found):
    assert [rank["seen_after_the_barrier"] for rank in found["ranks"]] == [RANKS] * RANKS


@pytest.mark.horovod
def test_who_is_missing_at_a_barrier_is_named(found):
    *came, absent = (rank["missing"] for rank in found["ranks"])
    # The first to give up says for all who has not come by then: the slower of the two that come may be another.
    assert all(re.search(rf"did not come to the meeting point: (\d, )?{RANKS - 1} \[", error) for error in came)
    assert absent == ""


@pytest.mark.horovod
def test_one_rank_works_and_all_have_its_result_or_its_error(found):
    assert found["worked"] == 1
    for name in ("by_job", "by_node"):
        assert len({rank[name] for rank in found["ranks"]}) == 1
    assert [rank["failed"] for rank in found["ranks"]] == [True] * RANKS


@pytest.mark.horovod
def test_rank_0_is_first_and_one_fetches(found):
    assert [rank["first"] for rank in found["ranks"]] == [True] * RANKS
    assert [rank["fetched"] for rank in found["ranks"]] == ["weights"] * RANKS
