"""From what all ranks of a job do at one moment to who holds up whom. Pure.

Only what a library has recorded counts as waiting: a collective that a rank has begun and that has not ended. Where
nobody waits so, a job that tells its steps is judged by them. Any other never hangs in these terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .picture import Standing, listed

Kind = Literal["gpu", "frozen", "gil", "input", "returned", "missing", "slow", "mismatch", "symmetric"]

_BUSY = 0.1
"""Cores that a rank uses which computes, with all that it has started, rather than waits. Horovod's thread, which wakes
each millisecond, may use twice as many: a rank that others wait for is busy with up to so many more than they use."""

_WAKING = ("/horovod/common/basics.py", "/horovod/torch/mpi_ops.py")
"""Who stands in a call of these waits there, by waking each millisecond, too: what it uses tells nothing."""

_LOADS = ("/torch/utils/data/", "/multiprocessing/queues.py", "/multiprocessing/connection.py")

_PAIRS = 4
"""Of machines that do not hear each other, in a sentence."""


@dataclass(frozen=True)
class Hang:
    """Who holds up the others.

    Attributes:
        kind: ``gpu``: its GPU has reported a fault of the hardware; ``frozen``: stopped, or in the kernel for a device;
            ``gil``: native code holds Python's lock; ``input``: it waits for data; ``returned``: it has left the
            function; ``missing``: it stands elsewhere, and is idle; ``slow``: it stands elsewhere, and computes or
            moves: it may come yet; ``mismatch``: all wait, in different collectives; ``symmetric``: all wait in the
            same one.
        culprits: ranks; of ``symmetric``, those whose machine is known to be cut off.
        waiting: ranks that wait for them.
        why: what was seen of the first culprit, as a sentence.
        key: the same for the same hang at a later look: ranks and collectives, or steps.
        step: that the job is in: its last rank's; -1 where nobody knows.
        by_steps: no library says that ranks wait; no step has ended for too long.
    """

    kind: Kind
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    why: str
    key: tuple[object, ...]
    step: int = -1
    by_steps: bool = False

    @property
    def may_end(self) -> bool:
        """Whether waiting longer may help: a long evaluation of one rank looks like an endless loop."""
        return self.kind == "slow"


def judge(standing: Sequence[Standing]) -> Hang | None:
    """Who holds up the others; None where nobody does, or a person looks at a rank with a debugger.

    Args:
        standing: all ranks of the job.
    """
    if any(each.process.state == "t" or each.debugged for each in standing):
        return None
    hang = _by_collectives(standing)
    if hang is None:
        hang = _by_steps(standing)
    else:
        hang = replace(hang, step=min((each.steps.step for each in standing if each.steps.step >= 0), default=-1))
    return hang and _by_gpus(standing, hang)


def _by_gpus(standing: Sequence[Standing], hang: Hang) -> Hang:
    """The same; for the ranks whose GPU has failed, where one has, whatever they do."""
    sick = [each for each in standing if any(fault.stays for fault in each.faults)]
    if not sick:
        return hang
    fault = next(fault for fault in sick[0].faults if fault.stays)
    others = tuple(rank for rank in hang.waiting if rank not in _ranks(sick))
    why = f"rank {sick[0].rank} has a GPU that has failed: {fault}; {hang.why}"
    return replace(
        hang, kind="gpu", culprits=_ranks(sick), waiting=others, why=why, key=("gpu", _ranks(sick), hang.step)
    )


def _by_collectives(standing: Sequence[Standing]) -> Hang | None:
    waiting = [each for each in standing if each.record.pending and not each.moved and each.process.state not in "Tt"]
    others = [each for each in standing if each not in waiting]
    if not waiting or len(standing) < 2:
        return None
    if not others:
        return _all_wait(waiting)
    # Of those who wait for nothing, whoever is behind in what the others wait for; else (a group of its own) all.
    behind = [each for each in others if any(_is_behind(each, one) for one in waiting)]
    culprits = behind or others
    first = culprits[0]
    kind = _kind(first, idle=min(each.cpu for each in waiting))
    begun = waiting[0].record.pending[0]
    why = f"{_seen(first, kind)}; {_who(waiting)} in {begun}"
    return Hang(kind, _ranks(culprits), _ranks(waiting), why, _key(kind, culprits, waiting))


def _is_behind(one: Standing, waiting: Standing) -> bool:
    return any(one.record.counts.get(each.group, 0) < each.number for each in waiting.record.pending)


def _kind(one: Standing, idle: float = 0.0) -> Kind:
    is_saving = one.steps.is_saving or one.steps.is_writing
    if one.process.state == "T" or (one.process.state == "D" and not is_saving):
        return "frozen"
    if one.returned:
        return "returned"
    computes = one.cpu > _BUSY + min(2 * _BUSY, idle) and not (one.stack and one.stack[0].file.endswith(_WAKING))
    if one.moved or computes or is_saving:
        return "slow"
    if one.holds_gil:
        return "gil"
    is_loading = any(place in frame.file for frame in one.stack for place in _LOADS)
    return "input" if is_loading or "pipe" in one.process.wchan else "missing"


def _seen(one: Standing, kind: Kind) -> str:
    who, used = f"rank {one.rank}", f"{one.cpu:.1f} core(s) in use"
    busy = [gpu.busy for gpu in one.gpus if gpu.busy is not None]
    gpu = f"; its GPU is {max(busy)}% busy" if busy else ""
    child = "".join(f"; its child process {pid} has ended or is stopped" for pid in one.process.children[:1])
    seen = {
        "frozen": f"{who} is {one.process}",
        "gil": f"{who} is {one.where}, in native code that holds Python's lock ({one.process})",
        "input": f"{who} waits for input {one.where} ({one.process}){child}",
        "returned": f"{who} has returned from the task's function",
        "slow": f"{who} is {one.where}, and {_works(one)} ({used}): slow, or an endless loop",
    }
    return seen.get(kind, f"{who} is {one.where}, and does nothing ({one.process}){child}") + gpu


def _works(one: Standing) -> str:
    if one.steps.is_saving or one.steps.is_writing:
        return "saves or restores a checkpoint"
    return "moves" if one.moved else "computes"


def _by_steps(standing: Sequence[Standing]) -> Hang | None:
    """In a job whose ranks tell their steps: who is in one for too long, and behind those who go on; or all are."""
    longest = max((each.still for each in standing if each.is_late), default=0.0)
    if not longest:
        return None
    # Nodes are used to different times: half as long is far more than a step takes, too.
    stand = [each for each in standing if each.still >= longest / 2]
    save = [each for each in standing if each.steps.is_saving]
    go_on = [each for each in standing if any(each.steps.told) and each not in stand and each not in save]
    least = min(each.steps.step for each in stand)
    if any(each.steps.step <= least for each in go_on):
        return None
    behind = [each for each in stand if each.steps.step == least]
    silent = [each for each in standing if not any(each.steps.told)]
    # Whoever stands in a library's collective (a barrier of fs is in no record) waits for another.
    apart = [[each for each in some if not each.waits_in] for some in (behind, silent)]
    culprits = save or apart[0] or apart[1]
    kind = _kind(culprits[0]) if culprits else "symmetric"
    seen = _seen(culprits[0], kind) if culprits else f"all ranks wait, rank {behind[0].rank} {behind[0].where}"
    which = f"step {least} has not ended" if least >= 0 else "no step has ended"
    on = f", and {len(go_on)} rank(s) go on" if go_on else ""
    why = f"{seen}; {which} for {longest:.0f} s{on}"
    key = ("steps", kind, _ranks(culprits), tuple((each.rank, each.steps.told) for each in stand))
    return Hang(kind, _ranks(culprits), _ranks(stand), why, key, least, by_steps=True)


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
        cut_off, seen = _cut(waiting)
        why = f"all ranks wait in {waiting[0].record.pending[0]}: {seen}"
        return Hang("symmetric", cut_off, _ranks(waiting), why, _key("symmetric", (), waiting))
    few = min(firsts.values(), key=lambda group: (len(group), -group[0].rank))
    many = max(firsts.values(), key=lambda group: (len(group), -group[0].rank))
    if in_step and few[0].rank in at_that and many[0].rank in at_that:
        called = [f"{_are(some)} called {at_that[some[0].rank]}" for some in (few, many)]
        why = f"{called[0]}, where {called[1]}; now {_who(few)} in {few[0].record.pending[0]}"
    else:
        why = f"{_who(few)} in {few[0].record.pending[0]}, and {_who(many)} in {many[0].record.pending[0]}"
    return Hang("mismatch", _ranks(few), _ranks(many), why, _key("mismatch", few, waiting))


def _cut(waiting: Sequence[Standing]) -> tuple[tuple[int, ...], str]:
    """The ranks of the one machine that every connection on which nothing arrives leads to, or from; and what is
    seen. Between two machines alone nobody can tell which of them it is."""
    pairs = {tuple(sorted(pair)) for each in waiting for pair in each.process.cut}
    if not pairs:
        return (), "the network between them, or a library, stands still"
    at = {ip: [each for each in waiting if ip in each.process.addresses] for pair in pairs for ip in pair}
    shown = {ip: f"{ip} (rank {listed(_ranks(some))})" if some else ip for ip, some in at.items()}
    seen = "; ".join(f"{shown[one]} and {shown[other]}" for one, other in sorted(pairs)[:_PAIRS])
    in_all = [ip for ip in at if all(ip in pair for pair in pairs)]
    culprits = _ranks(at[in_all[0]]) if len(in_all) == 1 else ()
    off = f"{shown[in_all[0]]} is cut off; " if len(in_all) == 1 else ""
    return culprits, f"{off}nothing arrives between {seen}"


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
