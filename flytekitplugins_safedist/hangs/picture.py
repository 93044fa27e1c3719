"""Ranks side by side as text: which stand in the same place, and which do not."""

from __future__ import annotations

from collections.abc import Sequence

from .snapshot import Snapshot
from .stacks import Frame

_LINES = 12
"""Of a stack, innermost first: the call that waits, and who made it."""

_NAMED = 16
"""Processes, one by one: a job may have thousands."""


def line_of(frame: Frame) -> str:
    """A line of a stack, as Python shows it."""
    return f"  {frame}"


def listed(ranks: Sequence[int]) -> str:
    """``0-4, 6``"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def text(snapshots: Sequence[Snapshot], *, whole: bool = False) -> str:
    """The picture as text: those who stand in one place together, the many before the few.

    Args:
        snapshots: of ranks.
        whole: with all of their stacks, and their connections; else what fits a screen.
    """
    groups: dict[object, list[Snapshot]] = {}
    for each in snapshots:
        waits = tuple((wait.key, wait.operation, wait.number) for wait in each.record.waits)
        groups.setdefault((each.stack, each.process.state == "T", each.returned, waits), []).append(each)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    return "\n".join(line for group in ordered for line in _group(group, len(snapshots), whole=whole))


def _group(group: Sequence[Snapshot], of: int, *, whole: bool) -> list[str]:
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
    for number, wait in enumerate(first.record.waits):
        ages = sorted(each.age(each.record.waits[number]) for each in group)
        lines.append(f"    waits in {wait} for {ages[-1]:.0f} s")
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
