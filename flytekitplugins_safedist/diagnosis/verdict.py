"""From what all ranks of a job do at one moment to who holds up whom. Pure.

Only what a library has recorded counts as waiting: a collective that a rank has begun and that has not ended. A job
whose ranks wait for anything else, or for nobody, never hangs in these terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .picture import Standing, listed

Kind = Literal["frozen", "gil", "input", "returned", "missing", "slow", "mismatch", "symmetric"]

_BUSY = 0.1
"""Cores that a rank uses which computes, with all that it has started, rather than waits."""

_LOADS = "/torch/utils/data/"


@dataclass(frozen=True)
class Hang:
    """Who holds up the others.

    Attributes:
        kind: ``frozen``: stopped, or in the kernel for a device; ``gil``: native code holds Python's lock; ``input``:
            it waits for data; ``returned``: it has left the function; ``missing``: it stands elsewhere, and is idle;
            ``slow``: it stands elsewhere, and computes or moves: it may come yet; ``mismatch``: all wait, in different
            collectives; ``symmetric``: all wait in the same one.
        culprits: ranks.
        waiting: ranks that wait for them.
        why: what was seen of the first culprit, as a sentence.
        key: the same for the same hang at a later look: ranks and collectives.
    """

    kind: Kind
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    why: str
    key: tuple[object, ...]

    @property
    def may_end(self) -> bool:
        """Whether waiting longer may help: a long evaluation of one rank looks like an endless loop."""
        return self.kind == "slow"


def judge(standing: Sequence[Standing]) -> Hang | None:
    """Who holds up the others; None where nobody waits, or a person looks at a rank with a debugger.

    Args:
        standing: all ranks of the job.
    """
    waiting = [each for each in standing if each.record.pending and not each.moved and each.process.state not in "Tt"]
    others = [each for each in standing if each not in waiting]
    if not waiting or len(standing) < 2 or any(each.process.state == "t" or each.debugged for each in standing):
        return None
    if not others:
        return _all_wait(waiting)
    # Of those who wait for nothing, whoever is behind in what the others wait for; else (a group of its own) all.
    behind = [each for each in others if any(_is_behind(each, one) for one in waiting)]
    culprits = behind or others
    first = culprits[0]
    kind = _kind(first)
    begun = waiting[0].record.pending[0]
    why = f"{_seen(first, kind)}; {_who(waiting)} in {begun}"
    return Hang(kind, _ranks(culprits), _ranks(waiting), why, _key(kind, culprits, waiting))


def _is_behind(one: Standing, waiting: Standing) -> bool:
    return any(one.record.counts.get(each.group, 0) < each.number for each in waiting.record.pending)


def _kind(one: Standing) -> Kind:
    if one.process.state in ("T", "D"):
        return "frozen"
    if one.returned:
        return "returned"
    if one.moved or one.cpu > _BUSY:
        return "slow"
    if one.holds_gil:
        return "gil"
    is_loading = any(_LOADS in frame.file for frame in one.stack)
    return "input" if is_loading or "pipe" in one.process.wchan else "missing"


def _seen(one: Standing, kind: Kind) -> str:
    who, used = f"rank {one.rank}", f"{one.cpu:.1f} core(s) in use"
    return {
        "frozen": f"{who} is {one.process}",
        "gil": f"{who} is {one.where}, in native code that holds Python's lock ({one.process})",
        "input": f"{who} waits for input {one.where} ({one.process})",
        "returned": f"{who} has returned from the task's function",
        "slow": f"{who} is {one.where}, and {'moves' if one.moved else 'computes'} ({used}): slow, or an endless loop",
    }.get(kind, f"{who} is {one.where}, and does nothing ({one.process})")


def _all_wait(waiting: Sequence[Standing]) -> Hang:
    """In one and the same collective, or in different ones.

    The earliest that somebody waits in tells most: who has called something else in its place may be further by now.
    """
    earliest = min((each.record.pending[0] for each in waiting), key=lambda begun: begun.number)
    at_that = {
        each.rank: begun
        for each in waiting
        for begun in each.record.latest
        if (begun.group, begun.number) == (earliest.group, earliest.number)
    }
    firsts: dict[object, list[Standing]] = {}
    in_step = len(set(at_that.values())) > 1
    for each in waiting:
        firsts.setdefault(at_that.get(each.rank) if in_step else each.record.pending[0], []).append(each)
    if len(firsts) == 1:
        why = f"all ranks wait in {waiting[0].record.pending[0]}: the network between them, or a library, stands still"
        return Hang("symmetric", (), _ranks(waiting), why, _key("symmetric", (), waiting))
    few = min(firsts.values(), key=lambda group: (len(group), -group[0].rank))
    many = max(firsts.values(), key=lambda group: (len(group), -group[0].rank))
    if in_step and few[0].rank in at_that and many[0].rank in at_that:
        called = [f"{_are(some)} called {at_that[some[0].rank]}" for some in (few, many)]
        why = f"{called[0]}, where {called[1]}; now {_who(few)} in {few[0].record.pending[0]}"
    else:
        why = f"{_who(few)} in {few[0].record.pending[0]}, and {_who(many)} in {many[0].record.pending[0]}"
    return Hang("mismatch", _ranks(few), _ranks(many), why, _key("mismatch", few, waiting))


def _who(some: Sequence[Standing]) -> str:
    ranks = _ranks(some)
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {listed(ranks)} wait"


def _are(some: Sequence[Standing]) -> str:
    ranks = _ranks(some)
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {listed(ranks)} have"


def _ranks(some: Sequence[Standing]) -> tuple[int, ...]:
    return tuple(sorted(each.rank for each in some))


def _key(kind: Kind, culprits: Sequence[Standing], waiting: Sequence[Standing]) -> tuple[object, ...]:
    pending = tuple((each.rank, at.group, at.number) for each in waiting for at in each.record.pending)
    counts = tuple((each.rank, tuple(sorted(each.record.counts.items()))) for each in culprits)
    return (kind, _ranks(culprits), tuple(sorted(pending)), tuple(sorted(counts)))
