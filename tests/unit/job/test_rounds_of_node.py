"""What a node's agent does between two rounds: in which order, and what it clears away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.job.node_agent import NodeAgent
from flytekitplugins_safedist.ranks.scratch import make_job, make_rank
from tests.harness.outcomes import failed

DECIDED = object()


@pytest.mark.parametrize("somebody_left", [False, True])
def test_a_failure_that_may_be_an_echo_has_its_time_before_the_ranks_are_ended(somebody_left: bool) -> None:
    steps: list[str] = []
    ranks: Any = SimpleNamespace(
        settle=lambda: steps.append("settle"), stop=lambda: steps.append("stop"), outcomes=lambda: [failed(1)]
    )
    agent: Any = SimpleNamespace(
        _job=SimpleNamespace(anybody_left=lambda: somebody_left), _decided=lambda ranks, cause: (DECIDED, cause.rank)
    )
    assert NodeAgent._round_failed(agent, ranks) == (DECIDED, 1)
    # Where a node has left, what fails is an echo of that, and nothing is worth waiting for.
    assert steps == (["stop"] if somebody_left else ["settle", "stop"])


@pytest.mark.parametrize(("keep", "left"), [("never", {"round-1"}), ("on_failure", {"round-0", "round-1"})])
def test_what_ranks_of_earlier_rounds_wrote_goes_before_the_next_unless_it_is_to_be_kept(tmp_path, keep, left) -> None:
    job = make_job(tmp_path)
    for round_ in range(2):
        make_rank(job, round_, 0)
    said: list[str] = []
    agent: Any = SimpleNamespace(
        report=SimpleNamespace(rounds=[0]),
        plan=SimpleNamespace(settings=SimpleNamespace(scratch=SimpleNamespace(keep=keep)), scratch=job),
        _say=said.append,
    )
    NodeAgent._begin_round(agent, SimpleNamespace(round=1, nnodes=1, world_size=2))
    assert {path.name for path in job.path.glob("round-*")} == left
    assert said == ["round 1: 1 node(s) are there, 2 rank(s) start"]
