"""Where ranks stand: each writes the stacks of all its threads to its log when it gets SIGUSR1 (faulthandler)."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from .forkserver_client import RankServer
from .orders import RankOrder
from .outcome import RankOutcome

WRITE_SECONDS = 1.0
"""For ranks to write where they are before they are ended."""

_LINES = 12
_OURS = f'File "{Path(__file__).parents[1]}'


def ask(server: RankServer, running: Mapping[int, RankOrder]) -> dict[int, str]:
    """What the main thread of each rank does, by rank: innermost frame first, without safedist's own frames.

    Args:
        server: signals processes.
        running: orders by process id. Ranks that have begun: an interpreter that has not would be ended by the signal.
    """
    before = {pid: order.log.stat().st_size for pid, order in running.items()}
    if running:
        server.signal(list(running), signal.SIGUSR1, whole_group=False)
        time.sleep(WRITE_SECONDS)
    return {order.context.rank: _main_thread(order.log, before[pid]) for pid, order in running.items()}


def told(stood: Mapping[int, str], ended: Iterable[RankOutcome | None]) -> str:
    """Where ranks were that no collective has let wait in vain, by what :func:`ask` found, or what they raised."""
    ends = [outcome for outcome in ended if outcome is not None]
    raised = {outcome.rank: outcome.raised.traceback for outcome in ends if outcome.raised is not None}
    where = {**raised, **stood}
    for outcome in ends:
        if outcome.timed_out:
            where.pop(outcome.rank, None)
    return "\n".join(f"Where rank {rank} was then:\n{stack.rstrip()}" for rank, stack in where.items() if stack)


def _main_thread(log: Path, since: int) -> str:
    with log.open("rb") as file:
        file.seek(since)
        text = file.read(1 << 20).decode(errors="replace")
    # The oldest thread comes last, after a line of its own.
    frames = [line for line in text.rpartition("(most recent call first):\n")[2].splitlines() if "  File " in line]
    return "\n".join(itertools.takewhile(lambda frame: _OURS not in frame, frames[:_LINES]))
