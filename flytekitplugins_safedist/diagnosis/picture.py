"""Ranks side by side: which stand in the same place, which do not, and how that reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from .gpus import GpuFault, GpuUse
from .processes import Process
from .progress import Steps
from .records import HOROVODS, Recorded
from .stacks import Frame, Stack

_LINES = 12
"""Of a stack, innermost first: the call that waits, and who made it."""

_NAMED = 16
"""Processes, one by one: a job may have thousands."""

_COLLECTIVES = ("/torch/distributed/", *HOROVODS, "/flytekitplugins_safedist/fs/")
_OURS = "/flytekitplugins_safedist/"
_BETWEEN = ("/torch/autograd/", "/torch/nn/", "/torch/optim/", "/torch/utils/")
"""What calls a collective on behalf of the user: no place to look for a mistake."""
_WRAPPERS = ("wrapper", "inner", "_call_impl", "<lambda>")


@dataclass(frozen=True)
class Standing:
    """What one rank does at one moment.

    Attributes:
        rank: of the job.
        process: what the kernel says of it.
        threads: their stacks, the main thread's first; () where the rank has not answered.
        cpu: cores that it used meanwhile, with all that it has started.
        moved: its main thread was in different calls within the short time that it was looked at.
        record: its collectives, as far as torch has recorded them.
        steps: how far it is, by the steps that it tells.
        still: seconds for which it has been in that step; 0.0 where it tells none, or saves a checkpoint now.
        is_late: they are more than its node is used to.
        holds_gil: native code in it holds Python's lock.
        returned: it has left the task's function, successfully.
        debugged: a person is asked in its debugger.
        gpus, faults: its own ones, and what they have reported.
    """

    rank: int
    process: Process
    threads: tuple[Stack, ...] = ()
    cpu: float = 0.0
    moved: bool = False
    record: Recorded = field(default_factory=Recorded)
    steps: Steps = field(default_factory=Steps)
    still: float = 0.0
    is_late: bool = False
    holds_gil: bool = False
    returned: bool = False
    debugged: bool = False
    gpus: tuple[GpuUse, ...] = ()
    faults: tuple[GpuFault, ...] = ()

    @property
    def stack(self) -> Stack:
        """The main thread's."""
        return self.threads[0] if self.threads else ()

    @property
    def waits_in(self) -> str:
        """The collective operation that its main thread is in, by Python's frames; "" where it is in none."""
        return collective(self.stack)

    @property
    def where(self) -> str:
        """One phrase: ``in all_reduce, called at train.py:33 in step``, ``at loader.py:88 in read``."""
        if self.returned:
            return "after the end of the task's function"
        if not self.stack:
            return f"{self.process}; it has not answered"
        if not self.waits_in:
            return f"at {self.stack[0].short}"
        users = (frame for frame in self.stack if not _is_librarys(frame) and not _is_between(frame))
        caller = next(users, None)
        return f"in {self.waits_in}" + (f", called at {caller.short}" if caller is not None else "")


def collective(stack: Stack) -> str:
    """The collective operation that a thread is in; "" where it is in none."""
    called = [frame for frame in takewhile(_is_librarys, stack) if _is_collectives(frame)]
    names = [frame.function for frame in called if frame.function not in _WRAPPERS]
    if not names:
        return ""
    return names[-1] if _OURS in called[0].file else names[0]  # of fs, what the user has called says most


def line_of(frame: Frame) -> str:
    """A line of a stack, as Python shows it."""
    return f"  {frame}"


def _is_collectives(frame: Frame) -> bool:
    return any(part in frame.file for part in _COLLECTIVES)


def _is_between(frame: Frame) -> bool:
    return any(part in frame.file for part in _BETWEEN)


def _is_librarys(frame: Frame) -> bool:
    return _is_collectives(frame) or _OURS in frame.file


def listed(ranks: Sequence[int]) -> str:
    """``0-4, 6``"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def told(standing: Sequence[Standing], *, whole: bool = False) -> str:
    """The picture as text: those who stand in one place together, the many before the few.

    Args:
        standing: ranks.
        whole: with all of their stacks, and their connections; else what fits a screen.
    """
    groups: dict[object, list[Standing]] = {}
    for each in standing:
        groups.setdefault((each.stack, each.process.state == "T", each.returned, each.record.pending), []).append(each)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    return "\n".join(line for group in ordered for line in _group(group, len(standing), whole=whole))


def _group(group: Sequence[Standing], of: int, *, whole: bool) -> list[str]:
    first, count = group[0], len(group)
    who = f"rank {first.rank}" if count == 1 else f"ranks {listed([each.rank for each in group])}"
    stands = "stands" if count == 1 else "stand"
    lines = [f"{who} ({count} of {of}) {stands} {first.where}"]
    states: dict[str, list[int]] = {}
    for each in group:
        moved = "; it moves: the stack below was its last one" if each.moved else ""
        states.setdefault(f"{each.process}{moved}", []).append(each.rank)
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    lines.append(f"    process {', '.join(str(each.process.pid) for each in group[:_NAMED])}{more}")
    lines += [f"    {state}" + (f": {listed(ranks)}" if len(states) > 1 else "") for state, ranks in states.items()]
    used = [each.cpu for each in group]
    lines += [f"    waits in {pending}" for pending in first.record.pending]
    steps = sorted({each.steps.step for each in group if each.steps.step >= 0})
    if steps:
        lines.append(f"    in step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else ""))
    lines.append(f"    CPU: {_cores(min(used))}" + (f" to {_cores(max(used))}" if len(used) > 1 else ""))
    busy = sorted({gpu.busy for each in group for gpu in each.gpus if gpu.busy is not None})
    if busy:
        lines.append(f"    GPU: {busy[0]}%" + (f" to {busy[-1]}%" if len(busy) > 1 else "") + " busy")
    for each in group:
        lines += [f"    rank {each.rank}: {fault}" for fault in each.faults]
        lines += [f"    rank {each.rank}: {gpu}" for gpu in each.gpus if whole]
        lines += [
            f"    rank {each.rank}'s child process {pid} has ended or is stopped" for pid in each.process.children
        ]
    lines += [f"    {line_of(frame)}" for frame in (first.stack if whole else first.stack[:_LINES])]
    further = [stack for stack in first.threads[1:] if stack]
    if whole:
        for stack in further:
            lines += [f"    another thread of rank {first.rank}:", *(f"    {line_of(frame)}" for frame in stack)]
        connected = [each for each in group if each.process.peers]
        return lines + [f"    rank {each.rank} is connected to {', '.join(each.process.peers)}" for each in connected]
    lines += [f"    another thread: at {stack[0].short}" for stack in further[:_LINES]]
    return lines


def _cores(used: float) -> str:
    return f"{used:.2f} core(s)"
