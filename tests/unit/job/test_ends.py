"""Who uploads the verdict when a job is ended by the platform, and who leaves undecided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from flytekitplugins_safedist import lastwords
from flytekitplugins_safedist.errors import (
    GroupClosedError,
    JobInterruptedError,
    LaunchError,
    NodeLostError,
    RendezvousError,
    RendezvousTimeoutError,
    SafedistError,
    ScratchError,
    StoreLostError,
)
from flytekitplugins_safedist.job.ends import (
    Duty,
    Undecided,
    is_reported_by_another,
    part_of,
    replaced_when_undecided,
    turn_of,
)
from flytekitplugins_safedist.rendezvous.protocol import End
from flytekitplugins_safedist.topology import Topology


@dataclass
class Jobs:
    found: End | SafedistError | None

    def end(self) -> End | None:
        if isinstance(self.found, SafedistError):
            raise self.found
        return self.found


@dataclass
class Handler:
    """A rendezvous handler, as far as it is asked."""

    found: End | SafedistError | None = None
    uploads: bool = False
    nodes: int = 2
    node_rank: int = 1
    holds_store: bool = False
    node_0_holds_store: bool = True
    jobs: Jobs = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.found)


LOST = StoreLostError("the store is gone")


@pytest.mark.parametrize(
    ("error", "handler", "part"),
    [
        (RendezvousTimeoutError("x"), Handler(End("timeout", 0, "x"), uploads=True), Duty.UPLOADS),
        (RendezvousTimeoutError("x"), Handler(End("timeout", 0, "x")), Duty.FOLLOWS),
        (NodeLostError("x"), Handler(End("replacements", 0, "x"), uploads=True), Duty.UPLOADS),
        (GroupClosedError("x"), Handler(End("replacements", 0, "x")), Duty.FOLLOWS),
        (RendezvousTimeoutError("x"), Handler(LOST), Duty.SPEAKS),
        (RendezvousTimeoutError("x"), Handler(None), Duty.SPEAKS),
        (StoreLostError("x"), Handler(LOST), None),
        (GroupClosedError("x"), Handler(End("stopped", 0, "x")), None),
        (RendezvousTimeoutError("x"), Handler(LOST, nodes=1), None),
    ],
)
def test_what_falls_to_a_node_follows_from_the_jobs_end(
    error: RendezvousError, handler: Any, part: Duty | None
) -> None:
    assert part_of(error, handler) is part


def test_the_stores_host_comes_first_and_then_the_lowest_node() -> None:
    handlers: list[Any] = [Handler(node_rank=rank, holds_store=rank == 3) for rank in (-1, 1, 2, 3)]
    assert [turn_of(handler) for handler in handlers] == [1, 1, 2, 0]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("turn", "waited"), [(0, 0.0), (1, 5.0), (3, 15.0), (1000, 60.0)])
def test_a_node_looks_until_its_turn_comes_and_uploads_then(turn: int, waited: float) -> None:
    clock = Clock()
    assert not is_reported_by_another(turn, lambda: False, wait=clock.wait, clock=lambda: clock.now)
    assert clock.now == waited


def test_a_node_that_finds_the_verdict_uploads_none() -> None:
    clock = Clock()
    assert is_reported_by_another(3, lambda: clock.now >= 5, wait=clock.wait, clock=lambda: clock.now)
    assert clock.now == 5.0


def test_a_store_that_cannot_be_asked_is_shown_by_the_upload() -> None:
    def down() -> bool:
        raise ConnectionError("refused")

    assert not is_reported_by_another(0, down)


def place(**more: Any) -> Topology:
    facts: dict[str, Any] = {
        **{"node_rank": 1, "min_nodes": 2, "max_nodes": 2, "nproc_per_node": 2, "endpoint": None, "source": "test"}
    }
    return Topology(**{**facts, **more})


IN_A_JOB, ALONE = place(), place(node_rank=0, min_nodes=1, max_nodes=1, alone=True)
ONE_NODE_JOB = place(node_rank=0, min_nodes=1, max_nodes=1)


@pytest.mark.parametrize(
    ("where", "error", "undecided"),
    [
        (IN_A_JOB, JobInterruptedError("x"), True),
        (IN_A_JOB, LaunchError("x"), True),
        (IN_A_JOB, StoreLostError("x"), True),
        (IN_A_JOB, ScratchError("x"), False),
        (ONE_NODE_JOB, JobInterruptedError("x"), True),
        (ONE_NODE_JOB, LaunchError("x"), False),
        (ALONE, JobInterruptedError("x"), False),
        (ALONE, LaunchError("x"), False),
    ],
)
def test_a_pod_that_is_replaced_leaves_undecided_with_a_status_that_is_not_0(
    where: Topology, error: SafedistError, undecided: bool
) -> None:
    said: list[str] = []
    with pytest.raises(Undecided if undecided else type(error)) as raised, replaced_when_undecided(where, said.append):
        raise error
    assert bool(said) is undecided
    if undecided:
        assert raised.value.code == 137  # type: ignore[union-attr]
        interrupted = isinstance(error, JobInterruptedError)
        begins = "this node leaves (x): the job " if interrupted else "this pod is to be replaced: x"
        assert (lastwords.take() or "").startswith(begins)
