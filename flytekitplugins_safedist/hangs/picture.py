"""Ranks side by side as text: which stand in the same place, and which do not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from .snapshot import Snapshot

_LINES = 12
"""Of a stack, innermost first: the call that waits, and who made it."""

_NAMED = 16
"""Processes, one by one: a job may have thousands."""


def listed(ranks: Iterable[int]) -> str:
    """``0-4, 6``"""
    runs = groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0])
    ends = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def clause(ranks: Collection[int], does: str, do: str) -> str:
    """What ranks do: ``rank 3 waits``, ``ranks 0-4, 6 wait``."""
    return f"rank {listed(ranks)} {does}" if len(ranks) == 1 else f"ranks {listed(ranks)} {do}"


def text(snapshots: Sequence[Snapshot], *, whole: bool = False) -> str:
    """The picture as text: those who stand in one place together, the many before the few.

    Args:
        snapshots: of ranks.
        whole: with all of their stacks, and their connections; else what fits a screen.
    """
    groups: dict[object, list[Snapshot]] = {}
    for each in snapshots:
        waits = tuple((wait.key, wait.operation, wait.number) for wait in each.recorded)
        groups.setdefault((each.stack, each.process.state == "T", each.returned, waits), []).append(each)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    return "\n".join(line for group in ordered for line in _group(group, len(snapshots), whole=whole))


def _group(group: Sequence[Snapshot], of: int, *, whole: bool) -> list[str]:
    first, share = group[0], f"({len(group)} of {of})"
    lines = [f"{clause([each.rank for each in group], f'{share} stands', f'{share} stand')} {first.where}"]
    states: dict[str, list[int]] = {}
    for each in group:
        moved = "; it moves: the stack below was its last one" if each.moved else ""
        states.setdefault(f"{each.process}{moved}", []).append(each.rank)
    more = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
    lines.append(f"    process {', '.join(str(each.process.pid) for each in group[:_NAMED])}{more}")
    lines += [f"    {state}" + (f": {listed(ranks)}" if len(states) > 1 else "") for state, ranks in states.items()]
    for waits in zip(*(each.recorded for each in group), strict=True):
        lines.append(f"    waits in {waits[0]} for {max(wait.age for wait in waits):.0f} s")
    steps = [each.steps.step for each in group if each.steps.step >= 0]
    lines += [f"    in step {_span(steps, '{}')}"] if steps else []
    lines.append(f"    CPU: {_span((each.cpu for each in group), '{:.2f} core(s)')}")
    busy = [gpu.busy for each in group for gpu in each.gpus if gpu.busy is not None]
    lines += [f"    GPU: {_span(busy, '{}%')} busy"] if busy else []
    for each in group:
        lines += [f"    rank {each.rank}: {fault}" for fault in each.faults]
        lines += [f"    rank {each.rank}: {gpu}" for gpu in each.gpus if whole]
        lines += [
            f"    rank {each.rank}'s child process {pid} has ended or is stopped" for pid in each.process.children
        ]
    lines += [f"    {frame}" for frame in (first.stack if whole else first.stack[:_LINES])]
    further = [stack for stack in first.threads[1:] if stack]
    if not whole:
        return lines + [f"    another thread: at {stack[0].short}" for stack in further[:_LINES]]
    for stack in further:
        lines += [f"    another thread of rank {first.rank}:", *(f"    {frame}" for frame in stack)]
    connected = [each for each in group if each.process.peers]
    return lines + [f"    rank {each.rank} is connected to {', '.join(each.process.peers)}" for each in connected]


def _span(values: Iterable[float], shown: str) -> str:
    """The least and the most, where these differ."""
    ends = [shown.format(each) for each in sorted(values)]
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"
