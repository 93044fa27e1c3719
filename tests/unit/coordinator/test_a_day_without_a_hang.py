"""A day of a job of two nodes, as watches and the coordinator see it: told of, at most; nothing is done about it. Then
one rank does not come, and that is found."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.coordinator.inquiry import Inquiry
from flytekitplugins_safedist.coordinator.messages import HangNotice, Status
from flytekitplugins_safedist.hangs.judge import Hang, judge
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import CALL, Ages, Steps, Wait

TIMEOUT, CEILING = 1800.0, 7200.0
TICK, PICTURE = 2.0, 2.0
"""Seconds between two looks of the simulation, and for a node to look at its ranks."""
HALF, NIGHT = 7 * 3600.0, 8 * 3600.0
EPOCH = 9000.0
WORKS: dict[str, Any] = {"cpu": 1.0}
THREADS = ((Frame("/app/train.py", 7, "train"),),)
RECEIVES = ((Frame("/lib/torch/distributed/distributed_c10d.py", 2300, "recv"), *THREADS[0]),)

NODES = {0: (0, 1), 1: (2, 3, 4, 5)}
TRAIN, SIDE, SHORT = "0-3", "0,2", "3,5"
"""Members: ranks 0 to 3 train. A thread of ranks 0 and 2 exchanges something of its own. Rank 5 takes part in a group
with rank 3 and returns early; rank 4 evaluates by itself, polls, and is in no group."""
RETURNS = 6 * 3600.0


@dataclass
class Step:
    """The ranks that train come to one collective, each in its time.

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
    or a save that takes five, to a mount that does not answer meanwhile, or predictions that are written for four."""
    chance, now, number, hours = random.Random(seed), 0.0, 0, 0
    while True:
        number += 1
        step = Step(number, {rank: now + chance.lognormvariate(0.7, 1.0) for rank in range(4)})
        if number == 1:
            step.comes[1] = 900.0
        elif now > hours * 3600:
            hours += 1
            step.comes[0] = now + 180
            if hours % 3 == 1:
                step.comes[0], step.saves = now + 300, 0
                step.facts[0] = {"process": Process(0, "D"), "stays": "D", "cpu": 0.0}
            elif hours % 3 == 2:
                step.comes[0], step.facts[0] = now + 240, {"cpu": 0.02, "data": 3_000_000}
        yield step
        now = step.ends


class Watched:
    """The job, its nodes' watches, and the inquiry of its coordinator.

    Args:
        seed: of the day.
        hangs: of the task.
        tells: of the ranks, ``steps``, or ``epochs`` of two and a half hours, or nothing.
    """

    def __init__(self, seed: int, hangs: Hangs, tells: str) -> None:
        self.now = 1.0
        self.hangs, self.tells = hangs, tells
        self.steps = a_day(seed)
        self.step = next(self.steps)
        self.every = hangs.floor / 4 if hangs.floor is not None else 30.0
        self.ages = {node: Ages(hangs.floor, hangs.ceiling, 0.0) for node in NODES}
        self.inquiry = Inquiry()
        self.found: list[Hang] = []
        self.sleeper = -1

    def until(self, end: float) -> None:
        """Live on."""
        while self.now < end:
            self.now += TICK
            while self.sleeper < 0 and self.now >= self.step.ends:
                self.step = next(self.steps)
            if self.now % self.every < TICK:
                for node in NODES:
                    late = [wait for wait in self.waits(node) if wait.is_late]
                    is_urgent = self.hangs.floor is not None or any(math.isfinite(wait.timeout) for wait in late)
                    if late:
                        self.say(node, stall=self.now, is_urgent=is_urgent)
            if self.inquiry.is_due(self.now):
                self.inquiry.begin([str(node) for node in NODES], self.now)
                self.answer()

    def say(self, node: int, **facts: Any) -> None:
        """To the coordinator."""
        self.inquiry.on_status(Status("job", str(node), node, 1.0, **facts))

    def stand_still(self, seconds: float) -> None:
        """All machines do."""
        for ages in self.ages.values():
            ages.shift(self.now, seconds)
        step, self.now = self.step, self.now + seconds
        step.comes = {rank: comes + seconds for rank, comes in step.comes.items()}

    def answer(self) -> None:
        """Each node's picture, from two seconds after it was asked."""
        ranks: list[Snapshot] = []
        for node in NODES:
            if node == 0:
                self.now += PICTURE
            ranks += self.snapshots(node)
            self.say(node, looked=self.inquiry.look)
        look, hang, before = self.inquiry.complete(), judge(ranks), self.inquiry.hang
        assert look == self.inquiry.look
        notice = None if hang is None else HangNotice(look, hang.key, hang.rank, "", hang.seconds)
        self.inquiry.on_hang(notice, self.now)
        if hang is not None and self.inquiry.hang != before:
            self.found.append(hang)

    # --- what ranks do -----------------------------------------------------------------------------------------------
    def returned(self, rank: int) -> bool:
        return rank == 5 and self.now > RETURNS

    def is_there(self, rank: int) -> bool:
        """At the collective, of those who train."""
        return rank in self.step.comes and rank != self.sleeper and self.now >= self.step.comes[rank]

    def recorded(self, rank: int) -> tuple[list[Wait], dict[str, int]]:
        """What it waits in, and how far it is in each group."""
        number, waits, begun = self.step.number, [], {}
        if rank in self.step.comes:
            train = self.wait(rank, "0", TRAIN, number, self.step.comes[rank])
            begun[train.key] = number if self.is_there(rank) else number - 1
            waits += [train] if self.is_there(rank) else []
        if rank in (0, 2):  # in the middle of it whenever one looks
            side = self.wait(rank, "1", SIDE, int(self.now), self.now - 0.2)
            begun[side.key] = side.number
            waits += [side] if rank == 0 else []
        if rank in (3, 5) and not self.returned(5):
            short = self.wait(rank, "2", SHORT, int(self.now // 5) + rank % 2, self.now - 2)
            begun[short.key] = short.number
            waits += [short] if rank == 5 else []
        return waits, begun

    def wait(self, rank: int, name: str, members: str, number: int, since: float) -> Wait:
        return Wait(rank, name, members, "all_reduce", number, since, "gloo", TIMEOUT)

    def told(self, rank: int) -> Steps:
        if rank > 3 or not self.tells:
            return Steps()
        number = self.step.number if self.tells == "steps" else int(self.now / EPOCH) + 1
        return Steps((number, 0), number, is_saving=rank == self.step.saves and not self.is_there(rank))

    def waits(self, node: int) -> list[Wait]:
        running = [rank for rank in NODES[node] if not self.returned(rank)]
        waits = [wait for rank in running for wait in (*self.recorded(rank)[0], self.told(rank).wait(rank)) if wait]
        if 4 in running:  # it waits in what nothing records, and nobody comes: for an hour, each time
            since = self.now // 3600 * 3600 + 1
            waits.append(Wait(4, "", "0-5", "recv", 0, since, CALL))
        return self.ages[node].see(waits, running, (), self.now)

    def snapshots(self, node: int) -> Iterator[Snapshot]:
        waits = self.waits(node)
        for rank in NODES[node]:
            if self.returned(rank):
                yield Snapshot(rank, Process(0), returned=True)
                continue
            facts: dict[str, Any] = {"threads": RECEIVES if rank == 4 else THREADS, "process": Process(rank, "S")}
            if rank in self.step.comes and not self.is_there(rank) and rank != self.sleeper:
                facts |= {**WORKS, **self.step.facts.get(rank, {})}
            own, begun = tuple(wait for wait in waits if wait.rank == rank), self.recorded(rank)[1]
            facts |= {"waits": own, "begun": begun, "is_whole": True, "steps": self.told(rank)}
            yield Snapshot(rank, quiet=3600.0 if rank == 4 else 10.0, **facts)

    @property
    def acted_on(self) -> list[Hang]:
        return [found for found in self.found if found.may_end(self.hangs)]


@pytest.mark.parametrize(
    ("seed", "floor", "tells"), [(0, 90.0, "steps"), (1, None, "steps"), (2, None, "epochs"), (0, None, "")]
)
def test_nothing_is_done_about_a_day_without_a_hang_and_then_one_is_found(
    seed: int, floor: float | None, tells: str
) -> None:
    job = Watched(seed, Hangs(floor=floor, ceiling=CEILING), tells)
    job.until(HALF)
    while not 100 < job.step.ends - job.now < 120:  # in an evaluation, or a save: the others have waited for long
        job.until(job.now + TICK)
    job.stand_still(NIGHT)
    job.until(job.now + HALF)
    assert bool(job.found) == (floor is not None or tells == "epochs"), "what takes long is told of"
    assert job.acted_on == []
    job.sleeper = 2
    began, threshold = job.now, max(ages.limit(job.wait(0, "0", TRAIN, 0, 1.0)) for ages in job.ages.values())
    while not job.acted_on:
        job.until(job.now + TICK)
        assert job.now < began + threshold + 2 * job.every + 20
    assert (job.acted_on[0].kind, job.acted_on[0].culprits) == ("missing", (2,))
