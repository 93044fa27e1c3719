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

_NAMED = 3
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


class Findings:
    """Of a whole job, from the summaries of all its nodes, of one clock.

    Attributes:
        nodes: those.
        spent: seconds by phase, summed over all ranks; of nodes' own phases over nodes.
        since, until: its time.
        rounds: by number: its time, and why it ended.
        round: the one with most steps; -1 where there is none with ranks.
        ranks: of that round.
        world_size: how many ranks that round had, whether or not anything has come of them.
        held: who held the others back, the worst first, in that round.
        uneven: its stages in which ranks were not compared: some ended them more often than others.
    """

    def __init__(self, nodes: Sequence[NodeSummary]) -> None:
        self.nodes = nodes
        rounds = [every for node in nodes for every in node.rounds]
        pieces = [phase for node in nodes for phase in node.phases]
        pieces += [piece[:3] for every in rounds for rank in every.ranks for piece in rank.pieces()]
        self.since = min((since for _, since, _ in pieces), default=0.0)
        self.until = max((since + seconds for _, since, seconds in pieces), default=0.0)
        self.spent = {phase: sum(seconds for name, _, seconds in pieces if name == phase) for phase in PHASES}
        self.rounds: dict[int, tuple[float, float, str]] = {}
        ranks: dict[int, list[RankSummary]] = {}
        for every in sorted(rounds, key=lambda every: every.round):
            since, until, why = self.rounds.get(every.round, (every.since, every.until, ""))
            self.rounds[every.round] = min(since, every.since), max(until, every.until), why or every.why
            ranks.setdefault(every.round, []).extend(every.ranks)
        steps = {number: sum(map(steps_of, its)) for number, its in ranks.items() if its}
        self.round = max(steps, key=lambda number: (steps[number], number), default=-1)
        self.ranks = sorted(ranks.get(self.round, []), key=lambda rank: rank.rank)
        sizes = [every.world_size for every in rounds if every.round == self.round]
        self.world_size = max([len(self.ranks), *sizes])
        self.held, self.uneven = held_back(self.ranks)

    @property
    def length(self) -> float:
        """Seconds of its time, of which there are some."""
        return max(self.until - self.since, 1e-3)

    @property
    def alone_line(self) -> str:
        """That each of several ranks has come to its end without any of the others, in words; "" where that is not
        so."""
        alone = [rank for rank in self.ranks if rank.how == "returned" and not rank.met]
        if not len(alone) == self.world_size > 1:
            return ""
        return (
            "no rank made a process group, and Horovod was not begun: unless programs that they started did, "
            f"each of the {self.world_size} ranks worked alone. "
            "Fix: torch.distributed.init_process_group() or hvd.init(), unless that is what you want"
        )

    @property
    def held_line(self) -> str:
        """Who held the others back, in words; "" where nobody did."""
        said = [
            f"rank {each.rank} in stage {each.stage!r}, by {shown_seconds(each.seconds)} a step "
            f"({100 * each.part:.0f}% of it; the others take {shown_seconds(each.usual)})"
            for each in self.held
        ]
        among = f" ({self.compared})" if self.compared else ""
        return f"Held the others back{among}: {'; '.join(said)}." if said else ""

    @property
    def compared(self) -> str:
        """Of how many ranks a finding is; "" where it is of all."""
        count = sum(bool(rank.stages) for rank in self.ranks)
        return f"of {count} of {self.world_size} ranks" if count < self.world_size else ""


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
    cycles = max(map(steps_of, ranks), default=0)
    if len(ranks) < 2 or not cycles:
        return [], []
    step = sum(map(_seconds, ranks)) / sum(map(steps_of, ranks))
    least = max(_LEAST_SECONDS, _LEAST_PART * step, _NOISE_SECONDS / cycles)
    found: list[HeldBack] = []
    uneven: list[str] = []
    for name in dict.fromkeys(name for rank in ranks for name in rank.stages):
        there = [(rank, rank.stages[name]) for rank in ranks if name in rank.stages]
        times = [stage.times for _, stage in there]
        if max(times) - min(times) > _UNEVEN * max(times):
            uneven.append(name)
            continue
        # One that ended it once more, and was a step further when it was ended, is half a step later for that alone.
        ends = [rank.began + stage.end - (stage.times - min(times)) / 2 * step for rank, stage in there]
        middle, usual = median_low(ends), median_low(stage.seconds / stage.times for _, stage in there)
        for (rank, stage), end in zip(there, ends, strict=True):
            late = min(stage.seconds / stage.times - usual, end - middle)
            cost = late * stage.times / steps_of(rank)
            if cost > least:
                found.append(HeldBack(rank.rank, name, cost, usual, cost / step))
    found = [held for held in found if not any(_is_within(other, held) for other in found)]
    found.sort(key=lambda held: -held.seconds)
    return [held for held in found[:_NAMED] if held.seconds > _BESIDE * found[0].seconds], uneven


def _is_within(inner: HeldBack, outer: HeldBack) -> bool:
    """Whether a stage within another one explains most of what that costs."""
    is_inside = inner.rank == outer.rank and inner.stage.startswith(f"{outer.stage}/")
    return is_inside and inner.seconds > outer.seconds / 2


def shown_seconds(seconds: float) -> str:
    """Seconds for people: ``48 ms``, ``3.2 s``, ``2 min 05 s``, ``10 h 02 min``."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
