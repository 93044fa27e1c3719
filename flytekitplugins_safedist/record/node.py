"""A node's side: what its agent notes, and its ranks' files as parts whose size does not grow with the run's length."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..handoff import Slot
from .clocks import Offset
from .events import (
    Event,
    GpuPart,
    Interval,
    NodePart,
    PhaseDone,
    Profiled,
    RankPart,
    RankStarted,
    RoundPart,
    SaveDone,
    StageTimes,
    events_of,
    percentile,
)

SLICES = 96
"""Of a round's time, for each rank."""

_FULL_ROUNDS = 8
"""The latest; of those before them nothing is kept of single ranks."""

_MOST_ROUNDS = 100
_MOST_STALLS = 12
_MOST_SAVES = 64
_FILE_BYTES = 8 << 20
STALL_TIMES, STALL_SECONDS = 10.0, 1.0
"""A step is a stall that took ten times as long as most, and a second."""

EARLIER: Slot[dict[str, tuple[float, float]]] = Slot()
"""A pod's phases before its agent's, ``staging`` and ``import``: when each began, by the monotonic clock, and its
seconds. From the entrypoint."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank of this node ended.

    Attributes:
        rank: its number.
        file: what it wrote.
        how: see :class:`RankPart`.
        until: when, by this node's monotonic clock.
    """

    rank: int
    file: Path
    how: str
    until: float


class NodeRecorder:
    """Notes what becomes of one node.

    Args:
        host: its name.
        scrub: takes secrets out of a text.

    Attributes:
        part: what is noted.
        is_open: whether a round goes on.
    """

    def __init__(self, host: str, scrub: Callable[[str], str]) -> None:
        self.part = NodePart(-1, host, time.time() - time.monotonic())
        self._scrub = scrub
        self._waiting_since = time.monotonic()
        self.is_open = False
        self._gpus: dict[int, list[GpuPart]] = {}

    def phase(self, name: str, since: float, seconds: float) -> None:
        """Of the node itself."""
        self.part.phases.append((name, round(since, 4), round(seconds, 4)))
        del self.part.phases[: -2 * _MOST_ROUNDS]

    def sees(self, gpu: GpuPart) -> None:
        """How a GPU is used: its latest piece of the time, of always the same length."""
        known = {each.index: at for at, each in enumerate(self.part.gpus)}
        if gpu.index not in known:
            known[gpu.index] = len(self.part.gpus)
            self.part.gpus.append(replace(gpu, busy=[], memory=[]))
        part, latest = self.part.gpus[known[gpu.index]], self._gpus.setdefault(gpu.index, [])
        part.slowed = gpu.slowed or part.slowed
        latest.append(gpu)
        if len(latest) * gpu.every >= part.every:
            part.busy.append(round(sum(each.busy[0] for each in latest) / len(latest)))
            part.memory.append(max(each.memory[0] for each in latest))
            latest.clear()
        if len(part.busy) > 2 * SLICES:
            self.part.gpus[known[gpu.index]] = part.halved()

    def begins(self, round_no: int, node_rank: int, checked: float = 0.0) -> float:
        """Every node is there, and was *checked* for so many seconds: a round begins. How long this one has waited for
        the others, in seconds."""
        now = time.monotonic()
        waited = now - checked - self._waiting_since
        self.phase("rendezvous", self._waiting_since, waited)
        if checked:
            self.phase("preflight", now - checked, checked)
        self.part.node = node_rank
        self.part.rounds.append(RoundPart(round_no, round(now, 4), round(now, 4)))
        del self.part.rounds[:-_MOST_ROUNDS]
        self.is_open = True
        return waited

    def over(self, ends: Sequence[RankEnd]) -> None:
        """The ranks of the round that is open have ended."""
        self.is_open, self._waiting_since = False, time.monotonic()
        now = self.part.rounds[-1]
        now.until = round(max((end.until for end in ends), default=time.monotonic()), 4)
        now.ranks = [_part(end, now) for end in ends]
        for end in ends:
            with suppress(OSError):
                end.file.unlink()
        for older in self.part.rounds[:-_FULL_ROUNDS]:
            older.ranks = []

    def now(self, ends: Sequence[RankEnd]) -> NodePart:
        """The part as it is in the middle of a round, whose ranks go on."""
        mine = self.part
        part = replace(mine, phases=[*mine.phases], rounds=[*mine.rounds], gpus=[*map(replace, mine.gpus)])
        if self.is_open:
            until = max((end.until for end in ends), default=time.monotonic())
            part.rounds[-1] = now = replace(part.rounds[-1], until=round(until, 4), why="it goes on")
            now.ranks = [_part(end, now) for end in ends]
        return part

    def why(self, text: str) -> None:
        """Why the latest round ended."""
        if self.part.rounds:
            self.part.rounds[-1].why = self._scrub(text)[:300]


def text_of(part: NodePart, limit: int) -> str:
    """As JSON of at most *limit* bytes, where that holds a little: what is oldest and finest goes first."""
    for fine, rounds in ((2, _FULL_ROUNDS), (1, _FULL_ROUNDS), (0, _FULL_ROUNDS), (0, 1), (0, 0)):
        text = json.dumps(_shorter(part, fine=fine, rounds=rounds).to_dict())
        if len(text) <= limit:
            break
    return text


def _shorter(part: NodePart, *, fine: int, rounds: int) -> NodePart:
    """The ranks of the latest *rounds* alone; what is *fine* goes in two parts, profiles first."""

    def short(rank: RankPart) -> RankPart:
        if fine:
            return rank if fine > 1 else replace(rank, profile="")
        return replace(rank, shares={}, pace="", stalls=rank.stalls[:2], saves=rank.saves[-4:], profile="")

    kept = part.rounds if rounds > 1 else part.rounds[-4:]
    bare = [replace(each, ranks=[]) for each in kept[: max(0, len(kept) - rounds)]]
    told = [replace(each, ranks=list(map(short, each.ranks))) for each in kept[len(bare) :]]
    gpus = part.gpus if fine else [_in_one(gpu) for gpu in part.gpus]
    return replace(part, rounds=bare + told, phases=part.phases if rounds > 1 else part.phases[-8:], gpus=gpus)


def _in_one(gpu: GpuPart) -> GpuPart:
    while len(gpu.busy) > 1:
        gpu = gpu.halved()
    return gpu


def _part(end: RankEnd, of: RoundPart) -> RankPart:
    """What a rank's file comes to."""
    text = ""
    with suppress(OSError), open(end.file, encoding="utf-8", errors="replace") as file:
        text = file.read(_FILE_BYTES)
    events = list(events_of(text))
    part = RankPart(end.rank, of.since, round(end.until, 4), end.how)
    began = next((event.at for event in events if isinstance(event, RankStarted)), end.until)
    part.phases = _phases(events, began, part)
    intervals = _told([event for event in events if isinstance(event, Interval)])
    part.stages = _stages(intervals, began)
    for interval in intervals:
        part.steps += interval.steps
        part.step, part.values = interval.step, interval.values
        for number, count in interval.durations.items():
            part.durations[number] = part.durations.get(number, 0) + count
        part.cpu, part.peak = interval.cpu, max(part.peak, interval.peak)
        part.gpu = max(part.gpu, interval.gpu)
    saves = [(event.step, event.since, event.seconds) for event in events if isinstance(event, SaveDone)]
    part.saves = saves[-_MOST_SAVES:]
    part.profile = next((event.text for event in events if isinstance(event, Profiled)), "")
    _slice(part, intervals, of)
    part.stalls = _stalls(part, intervals)
    return part


def _told(intervals: list[Interval]) -> list[Interval]:
    """Where the user tells steps at all, what was taken for steps before the first one is none."""
    if not any(interval.step >= 0 for interval in intervals):
        return intervals
    none: dict[str, Any] = {"steps": 0, "durations": {}, "slowest": (0.0, 0.0)}
    return [interval if interval.step >= 0 else replace(interval, **none) for interval in intervals]


def _phases(events: Sequence[Event], began: float, part: RankPart) -> list[tuple[str, float, float]]:
    """With the start before them, and the phase that the rank was in when it ended."""
    done = [(event.name, event.since, event.seconds) for event in events if isinstance(event, PhaseDone)]
    phases = [("start", part.since, round(max(0.0, began - part.since), 4)), *done]
    names = ("start", "import", "inputs", "function", "outputs")
    last, since, seconds = phases[-1]
    if last in names[:-1] and part.how != "returned" and began < part.until:
        after = round(since + seconds, 4)
        phases.append((names[names.index(last) + 1], after, round(max(0.0, part.until - after), 4)))
    return phases


def _stages(intervals: Sequence[Interval], began: float) -> dict[str, StageTimes]:
    found: dict[str, StageTimes] = {}
    for interval in intervals:
        for name, (times, seconds, longest, ends) in interval.stages.items():
            stage = found.setdefault(name, StageTimes())
            stage.times += times
            stage.seconds += seconds
            stage.longest = max(stage.longest, longest)
            stage.end += ends
    for stage in found.values():
        stage.end = round(began + stage.end / max(1, stage.times), 6)
        stage.seconds = round(stage.seconds, 6)
    return found


def _slice(part: RankPart, intervals: Sequence[Interval], of: RoundPart) -> None:
    length = max(1e-6, of.until - of.since) / SLICES
    steps = [0.0] * SLICES
    shares: dict[str, list[float]] = {name: [0.0] * SLICES for name in part.stages if "/" not in name}
    for interval in intervals:
        for at, share in _spread(interval, of.since, length):
            steps[at] += interval.steps * share
            for name, (_, seconds, *_rest) in interval.stages.items():
                if name in shares:
                    shares[name][at] += seconds * share
    part.rate = round(max(steps) / length, 4)
    part.pace = "".join(_digit(count / max(steps)) for count in steps) if part.rate else ""
    part.shares = {name: "".join(_digit(each / length) for each in row) for name, row in shares.items()}


def _spread(interval: Interval, since: float, length: float) -> Iterable[tuple[int, float]]:
    """The slices that an interval touches, with the part of it that is in each."""
    first, last = interval.since, interval.since + max(interval.seconds, 1e-6)
    for at in range(max(0, int((first - since) / length)), min(SLICES, int((last - since) / length) + 1)):
        inside = min(last, since + (at + 1) * length) - max(first, since + at * length)
        if inside > 0:
            yield at, inside / (last - first)


def _digit(part: float) -> str:
    return str(min(9, max(1, round(9 * part)))) if part > 0.001 else "0"


def _stalls(part: RankPart, intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    usual = percentile(part.durations, 0.5)
    if not usual:
        return []
    limit = max(STALL_SECONDS, STALL_TIMES * usual)
    found = [interval.slowest for interval in intervals if interval.slowest[1] > limit]
    last = intervals[-1].since + intervals[-1].seconds
    if part.how != "returned" and part.until - last > limit:
        found.append((round(last, 4), round(part.until - last, 4)))  # it was in that step when it was ended
    return sorted(sorted(found, key=lambda stall: -stall[1])[:_MOST_STALLS])


def merged(own: NodePart, others: Iterable[tuple[str, Offset]]) -> list[NodePart]:
    """The record of the job, node 0's clock for all: its own part, and what other nodes have sent. What is damaged, or
    of another version, is left out."""
    parts = [own]
    for text, offset in others:
        with suppress(Exception):  # mashumaro's, json's: of any type
            part = NodePart.from_dict(json.loads(text))
            if part.version == own.version:
                part.offset, part.error = offset.seconds, offset.error
                parts.append(_moved(part))
    return sorted(parts, key=lambda part: part.node)


def _moved(part: NodePart) -> NodePart:
    by = part.offset
    part.phases = [(name, since + by, seconds) for name, since, seconds in part.phases]
    for gpu in part.gpus:
        gpu.since += by
    for every in part.rounds:
        every.since, every.until = every.since + by, every.until + by
        for rank in every.ranks:
            rank.since, rank.until = rank.since + by, rank.until + by
            rank.phases = [(name, since + by, seconds) for name, since, seconds in rank.phases]
            rank.stalls = [(since + by, seconds) for since, seconds in rank.stalls]
            rank.saves = [(step, since + by, seconds) for step, since, seconds in rank.saves]
            for stage in rank.stages.values():
                stage.end += by
    return part
