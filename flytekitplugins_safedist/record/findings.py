"""What the record of a job says: where the time went, who held the others back, and in which stage. Pure.

In a job whose ranks work in step, one that is late makes all others wait, in whatever stage the next collective is. So
a stage's own seconds do not say who is to blame: a rank is, that takes longer for a stage than the others *and* is late
at its end. Who waits takes longer, too, but ends the stage when all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .events import NodePart, RankPart, percentile

_LEAST_PART = 0.02
_LEAST_SECONDS = 0.001
"""What a rank must cost the others in each step, to be named: a part of the step, and seconds."""

_NOISE_SECONDS = 0.02
"""What a rank must cost in all: of a few steps averages say little."""

_UNEVEN = 0.1
"""Where ranks differ by a larger part in how often they ended a stage, nobody is named for it."""

_BESIDE = 0.2
"""What others must cost beside the worst one, to be named too: a part of its seconds."""

NAMED = 3
"""Ranks that are named, at most."""

PHASES = ("staging", "prepare", "rendezvous", "preflight", "start", "import", "inputs", "function", "outputs")


@dataclass(frozen=True)
class HeldBack:
    """One rank's stage that the others waited for.

    Attributes:
        rank, stage: which.
        seconds: in each step, beyond the others.
        usual: what they take for it.
        part: of a step.
        total: over the round.
    """

    rank: int
    stage: str
    seconds: float
    usual: float
    part: float
    total: float


@dataclass
class Findings:
    """Of a whole job.

    Attributes:
        parts: of its nodes.
        since, until: its time, in node 0's clock.
        rounds: by number: its time, and why it ended.
        held: who held the others back, the worst first, in the round with most steps.
        round: that round; -1 where there are no steps.
        ranks: of that round, or of the latest one.
        spent: seconds by phase, summed over all ranks; of nodes' own phases over nodes.
    """

    parts: Sequence[NodePart]
    since: float
    until: float
    rounds: dict[int, tuple[float, float, str]]
    held: list[HeldBack]
    round: int
    ranks: list[RankPart]
    spent: dict[str, float]


def found_in(parts: Sequence[NodePart]) -> Findings:
    """Look at the parts of all nodes, of one clock."""
    phases = [phase for part in parts for phase in _phases(part)]
    times = [time for _, since, seconds in phases for time in (since, since + seconds)]
    rounds: dict[int, tuple[float, float, str]] = {}
    by_round: dict[int, list[RankPart]] = {}
    for part in parts:
        for every in part.rounds:
            since, until, why = rounds.get(every.round, (every.since, every.until, ""))
            rounds[every.round] = (min(since, every.since), max(until, every.until), why or every.why)
            by_round.setdefault(every.round, []).extend(every.ranks)
    steps = {number: sum(steps_of(rank) for rank in ranks) for number, ranks in by_round.items() if ranks}
    chosen = max(steps, key=lambda number: (steps[number], number), default=-1)
    ranks = sorted(by_round.get(chosen, []), key=lambda rank: rank.rank)
    return Findings(
        parts,
        min(times, default=0.0),
        max(times, default=0.0),
        dict(sorted(rounds.items())),
        held_back(ranks),
        chosen,
        ranks,
        _spent(phases),
    )


def _phases(part: NodePart) -> list[tuple[str, float, float]]:
    ranks = [rank for every in part.rounds for rank in every.ranks]
    return [*part.phases, *(phase for rank in ranks for phase in rank.phases)]


def _spent(phases: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    spent = dict.fromkeys(PHASES, 0.0)
    for name, _, seconds in phases:
        spent[name] = spent.get(name, 0.0) + seconds
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def steps_of(rank: RankPart) -> int:
    """Its steps: as the user told them, all but the first of which are counted; else as often as a stage came."""
    if rank.step >= 0:
        return rank.steps + 1
    return max([rank.steps, *(stage.times for name, stage in rank.stages.items() if "/" not in name)], default=0)


def held_back(ranks: Sequence[RankPart]) -> list[HeldBack]:
    """Who held the others back, and in which stage; the worst first, and none where no one stands out."""
    names = dict.fromkeys(name for rank in ranks for name in rank.stages)
    cycles = max((steps_of(rank) for rank in ranks), default=0)
    if len(ranks) < 2 or not cycles:
        return []
    step = sum(stage.seconds for rank in ranks for name, stage in rank.stages.items() if "/" not in name)
    step /= sum(map(steps_of, ranks)) or 1
    least = max(_LEAST_SECONDS, _LEAST_PART * step, _NOISE_SECONDS / cycles)
    found: list[HeldBack] = []
    for name in names:
        there = [rank for rank in ranks if name in rank.stages]
        if not _are_even(there, name):
            continue
        own = {rank.rank: rank.stages[name].seconds / rank.stages[name].times for rank in there}
        usual = _middle(own.values())
        late = _late(there, name, step)
        for rank in there:
            per_step = rank.stages[name].times / steps_of(rank)
            cost = min(own[rank.rank] - usual, late[rank.rank]) * per_step
            if cost > least:
                held = HeldBack(rank.rank, name, cost, usual, cost / step, cost * steps_of(rank))
                found.append(held)
    found = [held for held in found if not any(_is_within(other, held) for other in found)]
    found.sort(key=lambda held: -held.seconds)
    return [held for held in found if held.seconds > _BESIDE * found[0].seconds]


def _is_within(inner: HeldBack, outer: HeldBack) -> bool:
    """Whether a stage within another one explains most of what that costs."""
    is_inside = inner.rank == outer.rank and inner.stage.startswith(f"{outer.stage}/")
    return is_inside and inner.seconds > outer.seconds / 2


def _late(ranks: Sequence[RankPart], name: str, step: float) -> dict[int, float]:
    """How much later than the others each rank ended a stage, on average. One that did so once more, and was a step
    further when it was ended, is half a *step* later for that alone."""
    fewest = min(rank.stages[name].times for rank in ranks)
    ends = {rank.rank: rank.stages[name].end - (rank.stages[name].times - fewest) / 2 * step for rank in ranks}
    usual = _middle(ends.values())
    return {rank: end - usual for rank, end in ends.items()}


def _are_even(ranks: Sequence[RankPart], name: str) -> bool:
    times = [rank.stages[name].times for rank in ranks]
    return len(times) > 1 and max(times) - min(times) <= _UNEVEN * max(times)


def _middle(values: object) -> float:
    """The lower median: of two, the smaller."""
    ordered = sorted(values)  # type: ignore[call-overload]
    return float(ordered[(len(ordered) - 1) // 2])


def stragglers(ranks: Sequence[RankPart]) -> set[int]:
    """Ranks whose usual step takes a tenth longer than most ranks', as in jobs whose ranks do not wait for each
    other."""
    usual = {rank.rank: percentile(rank.durations, 0.5) for rank in ranks if rank.durations}
    if len(usual) < 2:
        return set()
    middle = _middle(usual.values())
    return {rank for rank, seconds in usual.items() if seconds > 1.1 * middle}


def shown_seconds(seconds: float) -> str:
    """Seconds for people: ``48 ms``, ``3.2 s``, ``2 min 05 s``, ``10 h 02 min``."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def held_line(held: Sequence[HeldBack]) -> str:
    """Who held the others back, in words."""
    said = [
        f"rank {each.rank} in stage {each.stage!r}, by {shown_seconds(each.seconds)} a step "
        f"({100 * each.part:.0f}% of it; the others take {shown_seconds(each.usual)})"
        for each in held[:NAMED]
    ]
    return f"Held the others back: {'; '.join(said)}."
