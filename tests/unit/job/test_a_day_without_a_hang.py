"""A day of a job of two nodes, as watches and the coordinator see it: told of, at most; nothing is done about it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from flytekitplugins_safedist.diagnosis.picture import Standing
from flytekitplugins_safedist.diagnosis.processes import Process
from flytekitplugins_safedist.diagnosis.progress import Progress, Steps
from flytekitplugins_safedist.diagnosis.records import Begun, Recorded
from flytekitplugins_safedist.diagnosis.stacks import Frame
from flytekitplugins_safedist.job.hang_messages import Look
from flytekitplugins_safedist.job.inquiry import Found, Inquiry

CEILING = 7200.0
TICK, PICTURE = 2.0, 2.0
"""Seconds between two looks of the simulation, and for a node to look at its ranks."""
DAY, NIGHT = 24 * 3600.0, 8 * 3600.0
NODES = {0: (0, 1), 1: (2, 3)}
WORKS: dict[str, Any] = {"cpu": 1.0}
THREADS = ((Frame("/app/train.py", 7, "train"),),)


@dataclass
class Step:
    """All ranks come to one collective, each in its time.

    Attributes:
        number: of the collective.
        comes: when, by rank.
        facts: what one sees of a rank before that.
        saves: the rank that saves before that; -1 for none.
    """

    number: int
    comes: dict[int, float]
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    saves: int = -1

    @property
    def ends(self) -> float:
        return max(self.comes.values())


def a_day(seed: int) -> Iterator[Step]:
    """Steps of log-normal length, each rank's its own, of which the longest are twenty times the median and more; a
    first one that one rank compiles for a quarter of an hour; each hour an evaluation of three minutes on rank 0 alone,
    or a save that takes five, to a mount that does not answer meanwhile."""
    chance, now, number, hours = random.Random(seed), 0.0, 0, 0
    while True:
        number += 1
        step = Step(number, {rank: now + chance.lognormvariate(0.7, 1.0) for rank in range(4)})
        if number == 1:
            step.comes[1] = 900.0
        elif now > hours * 3600:
            hours += 1
            step.comes[0] = now + 180
            if hours % 2:
                step.comes[0], step.saves = now + 300, 0
                step.facts[0] = {"process": Process(0, "D"), "cpu": 0.0}
        yield step
        now = step.ends


class Watched:
    """The job, its nodes' watches, and the inquiry of its coordinator."""

    def __init__(self, seed: int, floor: float | None, *, tells: bool) -> None:
        self.now = 0.0
        self.clock = 0.0
        self.tells = tells
        self.steps = a_day(seed)
        self.step = next(self.steps)
        self.every = floor / 10 if floor is not None else 30.0
        self.watches = {node: Progress(floor, CEILING, self.every) for node in NODES}
        self.looks: list[Look] = []
        self.inquiry = Inquiry(0, NODES, self.looks.append)  # type: ignore[arg-type]
        self.found: list[Found] = []
        self.hangs = -1

    def until(self, end: float) -> None:
        """Live on."""
        while self.now < end:
            self.now += TICK
            self.clock += TICK
            while self.hangs < 0 and self.now >= self.step.ends:
                self.step = next(self.steps)
            if self.now % self.every < TICK:
                for node, watch in self.watches.items():
                    records = {rank: self.record(rank) for rank in NODES[node]}
                    waited = watch.look(records, self.told(node), self.clock)
                    if waited is not None:
                        self.inquiry.stalled(waited, self.clock)
            self.inquiry.tick(self.clock)
            self.answer()

    def answer(self) -> None:
        """Each node's picture, from two seconds after it was asked."""
        while self.looks:
            look = self.looks.pop()
            self.now += PICTURE
            self.clock += PICTURE
            for node in NODES:
                found = self.inquiry.seen(node, look.number, self.standing(node), self.clock)
                self.found += [found] if found is not None else []

    def waits(self, rank: int) -> bool:
        return rank != self.hangs and self.now >= self.step.comes[rank]

    def record(self, rank: int) -> Recorded:
        if not self.waits(rank):
            return Recorded({"0": self.step.number - 1})
        begun = Begun("0", self.step.number, "all_reduce of Float[3]")
        return Recorded({"0": self.step.number}, (begun,), (begun,))

    def told(self, node: int) -> dict[int, Steps]:
        if not self.tells:
            return dict.fromkeys(NODES[node], Steps())
        number, saves = self.step.number, self.step.saves
        return {
            rank: Steps((number, 0), number, is_saving=rank == saves and not self.waits(rank)) for rank in NODES[node]
        }

    def standing(self, node: int) -> tuple[Standing, ...]:
        steps, watch = self.told(node), self.watches[node]
        still = watch.still(steps, self.clock)
        return tuple(
            Standing(
                rank,
                **{
                    "process": Process(rank, "S"),
                    "threads": THREADS,
                    "record": self.record(rank),
                    "steps": steps[rank],
                    "still": still.get(rank, 0.0),
                    "is_late": still.get(rank, 0.0) >= watch.step_threshold,
                    **({} if self.waits(rank) or rank == self.hangs else {**WORKS, **self.step.facts.get(rank, {})}),
                },
            )
            for rank in NODES[node]
        )

    @property
    def acted_on(self) -> list[Found]:
        """As ``Hangs(action="fail")`` does."""
        return [found for found in self.found if not found.hang.may_end or found.waited >= CEILING]


@pytest.mark.parametrize(("floor", "tells"), [(60.0, True), (None, True), (None, False)])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_done_about_a_day_without_a_hang_and_then_one_is_found(
    seed: int, floor: float | None, tells: bool
) -> None:
    job = Watched(seed, floor, tells=tells)
    job.until(DAY / 2)
    while not 100 < job.step.ends - job.now < 120:  # in an evaluation, or a save: the others have waited for long
        job.until(job.now + TICK)
    job.clock += NIGHT  # the machines stood still
    job.until(DAY)
    assert bool(job.found) == (floor is not None), "with a floor, what takes long is told of"
    assert job.acted_on == []
    job.hangs = 2
    began, threshold = job.now, max(watch.threshold(Begun("0", 0, "")) for watch in job.watches.values())
    while not job.acted_on:
        job.until(job.now + TICK)
        assert job.now < began + threshold + 2 * job.every + 10
    assert (job.acted_on[0].hang.kind, job.acted_on[0].hang.culprits) == ("missing", (2,))
