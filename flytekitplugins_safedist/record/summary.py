"""The run's picture as values: of each rank a summary whose size does not grow with the run's length, of each node
those of its ranks, and the nodes' together are the record of the job. Pure.

Times are seconds of a node's monotonic clock, which all its processes share and nobody sets; what belongs to a rank
counts from that rank's :attr:`RankSummary.began`.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mashumaro.mixins.dict import DataClassDictMixin

from ..handoff import Slot
from .clocks import Offset

VERSION = 3
"""Of all that is in this module; grows with each change of a meaning."""

EARLIER: Slot[dict[str, tuple[float, float]]] = Slot()
"""A pod's phases before its agent's, ``staging``: when each began, by the monotonic clock, and its seconds. From the
entrypoint."""

SLICES = 96
"""Of the time, at most: with one more each two become one, which is twice as long."""

_PER_OCTAVE = 8


def bucket(seconds: float) -> int:
    """The class of a duration: eight to each doubling, so that its middle is at most 5% off."""
    return round(_PER_OCTAVE * math.log2(max(seconds, 1e-6)))


def seconds_of(number: int) -> float:
    """The inverse of :func:`bucket`."""
    return float(2 ** (number / _PER_OCTAVE))


def percentile(durations: Mapping[int, int], part: float) -> float:
    """The duration that a part (0 to 1) of all does not exceed; 0 for none."""
    left = part * sum(durations.values())
    for number in sorted(durations):
        left -= durations[number]
        if left <= 0:
            return seconds_of(number)
    return 0.0


@dataclass
class StageTimes(DataClassDictMixin):
    """One stage of one rank: how often, seconds in all, and when it ended on average."""

    times: int = 0
    seconds: float = 0.0
    end: float = 0.0


@dataclass
class RankSummary(DataClassDictMixin):
    """One rank in one round. Its times count from :attr:`began`.

    Attributes:
        rank: its number.
        began, until: when it had its order, and when it ended, by its node's clock.
        how: it ended: ``returned``, ``raised ValueError``, ``SIGKILL``, ``ended with the others``; ``running``.
        phases: name, begin and seconds of each; the first one, before its order, is its start.
        stages: by name, in the order in which they came first.
        steps, step: how many ended, and the latest number that the user has named; -1.
        met: whether it has made a process group, or begun Horovod.
        durations: of steps: by :func:`bucket`, how many.
        every: seconds of each slice of its time.
        rate: steps a second, at most, in any slice.
        pace: a digit for each slice: steps in it, 9 for :attr:`rate`.
        shares: by stage, a digit for each slice: its share of the time, in tenths.
        stalls: begin and seconds of steps that took much longer than the others.
        saves, saved: begin, seconds and step of the latest ones, and how many there were.
        values: the latest that the user has said.
        cpu: seconds of processor, since the process began.
        peak, gpu: bytes that it has held at most, and that torch has held on its GPU.
        profile: what torch.profiler saw, as :func:`.profile.packed`; "" for nothing.
    """

    rank: int
    began: float
    until: float
    how: str
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    stages: dict[str, StageTimes] = field(default_factory=dict)
    steps: int = 0
    step: int = -1
    met: bool = False
    durations: dict[int, int] = field(default_factory=dict)
    every: float = 1.0
    rate: float = 0.0
    pace: str = ""
    shares: dict[str, str] = field(default_factory=dict)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    saves: list[tuple[float, float, int]] = field(default_factory=list)
    saved: int = 0
    values: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0
    peak: int = 0
    gpu: int = 0
    profile: str = ""

    def pieces(self) -> Iterator[tuple[str, float, float, dict[str, int]]]:
        """What is drawn of it, on its node's clock: name, begin, seconds and more; what lies on top last."""
        yield from ((name, self.began + at, seconds, {}) for name, at, seconds in self.phases)
        yield from (("stall", self.began + at, seconds, {}) for at, seconds in self.stalls)
        yield from (("save", self.began + at, seconds, {"step": step}) for at, seconds, step in self.saves)


@dataclass
class RoundSummary(DataClassDictMixin):
    """One round on one node: its number, its time, the job's ranks in it, why it ended, and the ranks here."""

    round: int
    since: float
    until: float
    world_size: int = 0
    why: str = ""
    ranks: list[RankSummary] = field(default_factory=list)


@dataclass
class GpuSummary(DataClassDictMixin):
    """One GPU of a node.

    Attributes:
        index, uuid: which, as in :class:`..hangs.gpus.GpuUse`.
        total: bytes of its memory.
        since, every: when the first slice of the time began, and seconds of each; they grow with the run's length.
        busy: percent in which a kernel ran, on average, of each slice.
        memory: bytes in use, at most, in each slice.
        looks: that the last slice is the average of.
        slowed: why its clocks were lowered the last time; "" where they never were.
    """

    index: int
    uuid: str
    total: int
    since: float
    every: float = 5.0
    busy: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    looks: int = 0
    slowed: str = ""

    def note(self, busy: int, memory: int, now: float) -> None:
        """How it is used now. Slices in which nobody has looked are as this one."""
        while now - self.since >= SLICES * self.every:
            self.busy = [fmean(self.busy[at : at + 2]) for at in range(0, len(self.busy), 2)]
            self.memory = [max(self.memory[at : at + 2]) for at in range(0, len(self.memory), 2)]
            self.every *= 2
        new = int((now - self.since) / self.every) + 1 - len(self.busy)
        if new > 0:
            self.busy, self.memory, self.looks = self.busy + [busy] * new, self.memory + [memory] * new, 1
            return
        self.looks += 1
        self.busy[-1] += (busy - self.busy[-1]) / self.looks
        self.memory[-1] = max(self.memory[-1], memory)


@dataclass
class NodeSummary(DataClassDictMixin):
    """What one node has noted.

    Attributes:
        node: its node_rank in the latest round.
        host: its name.
        phases: of the node itself: name, begin, seconds.
        rounds: that it took part in; of many the first ones without their ranks.
        gpus: that it has.
        inputs: files and bytes that were downloaded for all its ranks.
        offset: what to add to its times for those of node 0.
        error: how far that may be off, in seconds; None where nobody has measured it.
        version: :data:`VERSION`.
    """

    node: int
    host: str
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    rounds: list[RoundSummary] = field(default_factory=list)
    gpus: list[GpuSummary] = field(default_factory=list)
    inputs: tuple[int, int] = (0, 0)
    offset: float = 0.0
    error: float | None = 0.0
    version: int = VERSION

    def move(self, offset: Offset) -> None:
        """Have its times be those of node 0."""
        by = self.offset = offset.seconds
        self.error = offset.error
        self.phases = [(name, since + by, seconds) for name, since, seconds in self.phases]
        for gpu in self.gpus:
            gpu.since += by
        for every in self.rounds:
            every.since, every.until = every.since + by, every.until + by
            for rank in every.ranks:
                rank.began, rank.until = rank.began + by, rank.until + by


# --- from node to node ------------------------------------------------------------------------------------------------
def squeezed(value: Any) -> str:
    """What JSON can hold, as a short text."""
    return base64.b85encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode())).decode()


def expanded(text: str) -> Any:
    """The inverse of :func:`squeezed`."""
    return json.loads(zlib.decompress(base64.b85decode(text)))


def packed(node: NodeSummary, limit: int) -> str:
    """As text of at most *limit* characters: where that holds too little, profiles go first, then slices, then ranks of
    earlier rounds, and the sums of stages last."""
    value = json.loads(json.dumps(node.to_dict()), parse_float=lambda text: round(float(text), 6))
    text, rounds = squeezed(value), value["rounds"]
    left_out: list[dict[str, Any]] = [{"profile": ""}, {"shares": {}, "pace": ""}, {}, {"stages": {}}]
    while len(text) > limit and left_out:
        lacks = left_out.pop(0)
        del value["phases"][:-8]
        if not lacks:
            rounds[:] = [{**every, "ranks": []} for every in rounds[-4:-1]] + rounds[-1:]
        for rank in (rank for every in rounds for rank in every["ranks"]):
            rank.update(lacks)
            if "pace" in lacks:
                value["gpus"], rank["stalls"], rank["saves"] = [], rank["stalls"][:2], rank["saves"][-1:]
        text = squeezed(value)
    return text


def merged(own: NodeSummary, others: Iterable[tuple[str, Offset]]) -> list[NodeSummary]:
    """The record of the job, node 0's clock for all: its own summary, and what other nodes have sent. What is damaged,
    or of another version, is left out."""
    nodes = [own]
    for text, offset in others:
        with suppress(Exception):  # zlib's, json's, mashumaro's: of any type
            node = NodeSummary.from_dict(expanded(text))
            if node.version == own.version:
                node.move(offset)
                nodes.append(node)
    return sorted(nodes, key=lambda node: node.node)
