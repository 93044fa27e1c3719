"""What the record of a job says: where the time went, who held the others back, and in which stage. Pure.

In a job whose ranks work in step, one that is late makes all others wait, in whatever stage the next collective is. So
a stage's own seconds do not say who is to blame: a rank is, that takes longer for a stage than the others *and* is late
at its end. Who waits takes longer, too, but ends the stage when all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from .summary import NodeSummary, RankSummary

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
    """

    rank: int
    stage: str
    seconds: float
    usual: float
    part: float


@dataclass
class Findings:
    """Of a whole job.

    Attributes:
        nodes: their summaries.
        since, until: its time, in node 0's clock.
        rounds: by number: its time, and why it ended.
        held: who held the others back, the worst first, in the round with most steps.
        uneven: stages of that round in which ranks were not compared: some ended them more often than others.
        round: that round; -1 where there are no steps.
        ranks: of that round, or of the latest one.
        world_size: how many ranks that round had, whether or not anything has come of them.
        spent: seconds by phase, summed over all ranks; of nodes' own phases over nodes.
    """

    nodes: Sequence[NodeSummary]
    since: float
    until: float
    rounds: dict[int, tuple[float, float, str]]
    held: list[HeldBack]
    uneven: list[str]
    round: int
    ranks: list[RankSummary]
    world_size: int
    spent: dict[str, float]

    @property
    def is_alone(self) -> bool:
        """Whether each of several ranks has come to its end without any of the others."""
        ends = [rank.how == "returned" and not rank.met for rank in self.ranks]
        return len(ends) == self.world_size > 1 and all(ends)

    @property
    def compared(self) -> str:
        """Of how many ranks a finding is; "" where it is of all."""
        count = sum(bool(rank.stages) for rank in self.ranks)
        return f"of {count} of {self.world_size} ranks" if count < self.world_size else ""


def found_in(nodes: Sequence[NodeSummary]) -> Findings:
    """Look at the summaries of all nodes, of one clock."""
    phases = [phase for node in nodes for phase in _phases(node)]
    times = [time for _, since, seconds in phases for time in (since, since + seconds)]
    rounds: dict[int, tuple[float, float, str]] = {}
    by_round: dict[int, list[RankSummary]] = {}
    world: dict[int, int] = {}
    for node in nodes:
        for every in node.rounds:
            since, until, why = rounds.get(every.round, (every.since, every.until, ""))
            rounds[every.round] = (min(since, every.since), max(until, every.until), why or every.why)
            by_round.setdefault(every.round, []).extend(every.ranks)
            world[every.round] = every.world_size
    steps = {number: sum(steps_of(rank) for rank in ranks) for number, ranks in by_round.items() if ranks}
    chosen = max(steps, key=lambda number: (steps[number], number), default=-1)
    ranks = sorted(by_round.get(chosen, []), key=lambda rank: rank.rank)
    held, uneven = held_back(ranks)
    return Findings(
        nodes,
        min(times, default=0.0),
        max(times, default=0.0),
        dict(sorted(rounds.items())),
        held,
        uneven,
        chosen,
        ranks,
        max(world.get(chosen, 0), len(ranks)),
        _spent(phases),
    )


def _phases(node: NodeSummary) -> list[tuple[str, float, float]]:
    ranks = [rank for every in node.rounds for rank in every.ranks]
    of_ranks = [(name, rank.since + at, seconds) for rank in ranks for name, at, seconds in rank.phases]
    return [*node.phases, *of_ranks]


def _spent(phases: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    spent = dict.fromkeys(PHASES, 0.0)
    for name, _, seconds in phases:
        spent[name] = spent.get(name, 0.0) + seconds
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def steps_of(rank: RankSummary) -> int:
    """Its steps: as the user told them, all but the first of which are counted; else as often as a stage came, or one,
    that goes on."""
    if rank.step >= 0:
        return rank.steps + 1
    ended = [stage.times for name, stage in rank.stages.items() if "/" not in name]
    return max([rank.steps, int(bool(rank.stages)), *ended])


def _seconds(rank: RankSummary) -> float:
    """In its stages: at the depth that has most, for one around them (an epoch, say) may not have ended yet."""
    depths: dict[int, float] = {}
    for name, stage in rank.stages.items():
        depths[name.count("/")] = depths.get(name.count("/"), 0.0) + stage.seconds
    return max(depths.values(), default=0.0)


def held_back(ranks: Sequence[RankSummary]) -> tuple[list[HeldBack], list[str]]:
    """Who held the others back, and in which stage, the worst first, and none where no one stands out; and the stages
    in which ranks cannot be compared."""
    names = dict.fromkeys(name for rank in ranks for name in rank.stages)
    cycles = max((steps_of(rank) for rank in ranks), default=0)
    if len(ranks) < 2 or not cycles:
        return [], []
    step = sum(map(_seconds, ranks)) / sum(map(steps_of, ranks))
    least = max(_LEAST_SECONDS, _LEAST_PART * step, _NOISE_SECONDS / cycles)
    found: list[HeldBack] = []
    uneven: list[str] = []
    for name in names:
        there = [rank for rank in ranks if name in rank.stages]
        if len(there) < 2:
            continue
        if not _are_even(there, name):
            uneven.append(name)
            continue
        own = {rank.rank: rank.stages[name].seconds / rank.stages[name].times for rank in there}
        usual = median_low(own.values())
        late = _late(there, name, step)
        for rank in there:
            per_step = rank.stages[name].times / steps_of(rank)
            cost = min(own[rank.rank] - usual, late[rank.rank]) * per_step
            if cost > least:
                found.append(HeldBack(rank.rank, name, cost, usual, cost / step))
    found = [held for held in found if not any(_is_within(other, held) for other in found)]
    found.sort(key=lambda held: -held.seconds)
    return [held for held in found if held.seconds > _BESIDE * found[0].seconds], uneven


def _is_within(inner: HeldBack, outer: HeldBack) -> bool:
    """Whether a stage within another one explains most of what that costs."""
    is_inside = inner.rank == outer.rank and inner.stage.startswith(f"{outer.stage}/")
    return is_inside and inner.seconds > outer.seconds / 2


def _late(ranks: Sequence[RankSummary], name: str, step: float) -> dict[int, float]:
    """How much later than the others each rank ended a stage, on average. One that did so once more, and was a step
    further when it was ended, is half a *step* later for that alone."""
    fewest = min(rank.stages[name].times for rank in ranks)
    ends = {
        rank.rank: rank.since + rank.stages[name].end - (rank.stages[name].times - fewest) / 2 * step for rank in ranks
    }
    usual = median_low(ends.values())
    return {rank: end - usual for rank, end in ends.items()}


def _are_even(ranks: Sequence[RankSummary], name: str) -> bool:
    times = [rank.stages[name].times for rank in ranks]
    return max(times) - min(times) <= _UNEVEN * max(times)


def alone_line(found: Findings) -> str:
    """That ranks trained alone, in words."""
    return (
        "no rank made a process group, and Horovod was not begun: unless programs that they started did, "
        f"each of the {found.world_size} ranks worked alone. "
        "Fix: torch.distributed.init_process_group() or hvd.init(), unless that is what you want"
    )


def shown_seconds(seconds: float) -> str:
    """Seconds for people: ``48 ms``, ``3.2 s``, ``2 min 05 s``, ``10 h 02 min``."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def held_line(found: Findings) -> str:
    """Who held the others back, in words."""
    said = [
        f"rank {each.rank} in stage {each.stage!r}, by {shown_seconds(each.seconds)} a step "
        f"({100 * each.part:.0f}% of it; the others take {shown_seconds(each.usual)})"
        for each in found.held[:NAMED]
    ]
    return f"Held the others back{f' ({found.compared})' if found.compared else ''}: {'; '.join(said)}."
