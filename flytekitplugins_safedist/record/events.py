"""What ranks and nodes note of a run, as values. Pure.

A rank appends events to a file of its own in scratch, one line of JSON each. When its round is over, its node reads
the file and keeps a :class:`RankPart`, whose size does not grow with the run's length. All parts of a node are its
:class:`NodePart`, and the parts of all nodes are the record of the job.

Times are seconds of a node's monotonic clock, which all its processes share and nobody sets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mashumaro.mixins.dict import DataClassDictMixin

VERSION = 1
"""Of all that is in this module; grows with each change of a meaning."""

_PER_OCTAVE = 8


@dataclass(frozen=True)
class Event(DataClassDictMixin):
    """One line of a rank's file; its ``event`` there is the name of its class."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        Event.kinds[cls.__name__] = cls

    def line(self) -> str:
        """The event, as it is written."""
        return json.dumps({"event": type(self).__name__, **self.to_dict()}) + "\n"


@dataclass(frozen=True)
class RankStarted(Event):
    """The first line.

    Attributes:
        version: :data:`VERSION`.
        rank, round: which rank of which launch.
        at: when the process had its order.
    """

    version: int
    rank: int
    round: int
    at: float


@dataclass(frozen=True)
class PhaseDone(Event):
    """A phase has ended: ``import``, ``inputs``, ``function``, ``outputs`` of a rank; ``staging``, ``prepare``,
    ``rendezvous`` and ``preflight`` of a node."""

    name: str
    since: float
    seconds: float


@dataclass(frozen=True)
class SaveDone(Event):
    """``Checkpoints`` has saved a step; ``seconds`` is how long training stood still for it."""

    step: int
    since: float
    seconds: float


@dataclass(frozen=True)
class Interval(Event):
    """What a rank did since the line before. Written at the end of a stage or step, when some time has passed.

    Attributes:
        since, seconds: the time it is about.
        stages: by name: how often it ended, its seconds in all, its longest, and the sum of its ends, counted from
            :attr:`RankStarted.at`.
        steps: that ended.
        step: the latest that the user has named; -1 for none.
        durations: of steps: by :func:`bucket`, how many.
        slowest: of these steps: when it began, and its seconds.
        values: what the user has said of the latest step (a loss).
        cpu: seconds of processor, since the process began.
        peak: bytes that it has held at most.
        gpu: bytes that torch has held at most on its GPU.
    """

    since: float
    seconds: float
    stages: dict[str, tuple[int, float, float, float]]
    steps: int
    step: int
    durations: dict[int, int]
    slowest: tuple[float, float]
    values: dict[str, float]
    cpu: float
    peak: int
    gpu: int


@dataclass(frozen=True)
class Profiled(Event):
    """What torch.profiler saw (:mod:`.profile`)."""

    text: str


def events_of(text: str) -> Iterator[Event]:
    """The events of a file. A line that was cut short by SIGKILL, or is damaged, is none."""
    for line in text.splitlines():
        with suppress(Exception):  # mashumaro's, json's: what a file of a killed process may hold
            data = json.loads(line)
            yield Event.kinds[data.pop("event")].from_dict(data)


def bucket(seconds: float) -> int:
    """The class of a duration: eight to each doubling, so that its middle is at most 5% off."""
    return round(_PER_OCTAVE * math.log2(max(seconds, 1e-6)))


def seconds_of(number: int) -> float:
    """The inverse of :func:`bucket`."""
    return float(2 ** (number / _PER_OCTAVE))


def percentile(durations: dict[int, int], part: float) -> float:
    """The duration that a part (0 to 1) of all does not exceed; 0 for none."""
    left = part * sum(durations.values())
    for number in sorted(durations):
        left -= durations[number]
        if left <= 0:
            return seconds_of(number)
    return 0.0


# --- what a node keeps ----------------------------------------------------------------------------------------------


@dataclass
class StageTimes(DataClassDictMixin):
    """One stage of one rank: how often, seconds in all, the longest, and when it ended on average."""

    times: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    end: float = 0.0


@dataclass
class RankPart(DataClassDictMixin):
    """One rank in one round.

    Attributes:
        rank: its number.
        since, until: from its order to its end.
        how: it ended: ``returned``, ``raised ValueError``, ``SIGKILL``, ``ended with the others``.
        phases: name, begin and seconds of each.
        stages: by name, in the order in which they came first.
        steps, step: how many ended, and the latest number that the user has named; -1.
        durations: of steps, as in :class:`Interval`.
        rate: steps a second, at most, in any slice.
        pace: a digit for each slice of the round, of equal length: steps in it, 9 for :attr:`rate`.
        shares: by stage, a digit for each slice: its share of the time, in tenths.
        stalls: begin and seconds of steps that took much longer than the others.
        saves: step, begin and seconds.
        values: the latest that the user has said.
        cpu, peak, gpu: as in :class:`Interval`, at the end.
        profile: what torch.profiler saw, as :func:`.profile.packed`; "" for nothing.
    """

    rank: int
    since: float
    until: float
    how: str
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    stages: dict[str, StageTimes] = field(default_factory=dict)
    steps: int = 0
    step: int = -1
    durations: dict[int, int] = field(default_factory=dict)
    rate: float = 0.0
    pace: str = ""
    shares: dict[str, str] = field(default_factory=dict)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    saves: list[tuple[int, float, float]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0
    peak: int = 0
    gpu: int = 0
    profile: str = ""


@dataclass
class RoundPart(DataClassDictMixin):
    """One round on one node: its number, its time, why it ended, and the ranks there."""

    round: int
    since: float
    until: float
    why: str = ""
    ranks: list[RankPart] = field(default_factory=list)


@dataclass
class GpuPart(DataClassDictMixin):
    """One GPU of a node.

    Attributes:
        index, uuid: which, as in :class:`..hangs.gpus.GpuUse`.
        total: bytes of its memory.
        since, every: when the first piece of the time began, and seconds of each; they grow with the run's length.
        busy: percent in which a kernel ran, on average, of each piece.
        memory: bytes in use, at most, in each piece.
        slowed: why its clocks were lowered the last time; "" where they never were.
    """

    index: int
    uuid: str
    total: int
    since: float
    every: float
    busy: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    slowed: str = ""

    def halved(self) -> GpuPart:
        """With pieces twice as long."""
        busy = [round(sum(self.busy[at : at + 2]) / len(self.busy[at : at + 2])) for at in range(0, len(self.busy), 2)]
        memory = [max(self.memory[at : at + 2]) for at in range(0, len(self.memory), 2)]
        return replace(self, every=2 * self.every, busy=busy, memory=memory)


@dataclass
class NodePart(DataClassDictMixin):
    """What one node has noted.

    Attributes:
        node: its node_rank in the latest round.
        host: its name.
        epoch: what to add to its times for seconds since the epoch.
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
    epoch: float
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    rounds: list[RoundPart] = field(default_factory=list)
    gpus: list[GpuPart] = field(default_factory=list)
    inputs: tuple[int, int] = (0, 0)
    offset: float = 0.0
    error: float | None = 0.0
    version: int = VERSION
