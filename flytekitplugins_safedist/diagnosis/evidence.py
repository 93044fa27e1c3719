"""What the ranks of one node do right now: asked for, looked at several times, put side by side."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from . import processes, stacks
from .picture import Standing
from .processes import Process
from .stacks import Stack

SAMPLES = 3
PAUSE_SECONDS = 0.4
"""Between two looks: who moves is elsewhere by then, or has used the CPU."""

_FILE = r"/orders/round-\d+-rank-(\d+)\.stacks$"

Asked = Mapping[int, tuple[int, Path]]
"""By rank: its process, and the file that it writes its stacks to."""


def gather(ranks: Asked, send: Callable[[int], object]) -> list[Standing]:
    """Look at ranks, :data:`SAMPLES` times.

    Args:
        ranks: to be looked at.
        send: sends :data:`~.stacks.SIGNAL` to a process.
    """
    began, first = time.monotonic(), _looks(ranks)
    seen: dict[int, list[tuple[Stack, ...]]] = {rank: [] for rank in ranks}
    for number in range(SAMPLES):
        if number:
            time.sleep(PAUSE_SECONDS)
        for rank, threads in stacks.ask(ranks, send).items():
            seen[rank].append(threads)
    last, took = _looks(ranks), time.monotonic() - began
    whole = processes.connected(last.values())
    return [
        Standing(
            rank=rank,
            process=whole[process.pid],
            threads=seen[rank][-1] if seen[rank] else (),
            cpu=max(0.0, process.cpu - first[rank].cpu) / took,
            moved=len({_way(threads[0]) for threads in seen[rank]}) > 1,
        )
        for rank, process in sorted(last.items())
    ]


def running_below(root: Path) -> dict[Path, Asked]:
    """The ranks that run on this machine, or in this container, found by the files that they have open; by the scratch
    directory of their job.

    Args:
        root: only jobs whose scratch directory lies below.
    """
    found: dict[Path, dict[int, tuple[int, Path]]] = {}
    for path, pid in processes.holding(_FILE).items():
        match = re.search(_FILE, str(path))
        if match is not None and root in path.parents:
            found.setdefault(path.parents[1], {})[int(match[1])] = (pid, path)
    return dict(found)


def by_ourselves(pid: int) -> None:
    """Send the signal from this process."""
    try:
        os.kill(pid, stacks.SIGNAL)
    except ProcessLookupError:
        return  # it has ended


def _looks(ranks: Asked) -> dict[int, Process]:
    found = processes.look([pid for pid, _ in ranks.values()])
    return {rank: found[pid] for rank, (pid, _) in ranks.items()}


def _way(stack: Stack) -> tuple[object, ...]:
    """What stays the same while one call goes on: the calls, and the lines of all but the innermost."""
    return (*((frame.file, frame.function) for frame in stack[:1]), *stack[1:])
