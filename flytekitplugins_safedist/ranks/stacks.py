"""Where ranks stand when a round fails or does not begin: for the node's log, and for the error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..diagnosis import picture, stacks
from .forkserver_client import RankServer
from .orders import RankOrder
from .outcome import RankOutcome

_LINES = 12


def ask(server: RankServer, running: Mapping[int, RankOrder], show: Callable[[str], object]) -> dict[int, str]:
    """What the main thread of each rank does, by rank: innermost frame first, without safedist's own frames.

    Args:
        server: signals processes.
        running: orders by process id.
        show: takes all threads' stacks, for the node's log.
    """
    found = stacks.ask(
        {order.context.rank: (pid, order.stacks) for pid, order in running.items()},
        sender(server),
    )
    for rank, threads in found.items():
        for number, stack in enumerate(threads):
            lines = [f"thread {number + 1} of {len(threads)}, innermost call first:", *map(picture.line_of, stack)]
            show("".join(f"[rank {rank}] {line}\n" for line in lines))
    return {rank: "\n".join(map(picture.line_of, threads[0][:_LINES])) for rank, threads in found.items()}


def of(standing: Sequence[picture.Standing]) -> str:
    """Where the ranks of this node stand, for its log."""
    return "where the ranks of this node stand:\n" + picture.told(standing)


def sender(server: RankServer) -> Callable[[int], object]:
    """What signals one rank: its parent does, so that the number is nobody else's by then."""
    return lambda pid: server.signal([pid], stacks.SIGNAL, whole_group=False)


def told(stood: Mapping[int, str], ended: Iterable[RankOutcome | None]) -> str:
    """Where ranks were that no collective has let wait in vain, by what :func:`ask` found, or what they raised."""
    ends = [outcome for outcome in ended if outcome is not None]
    raised = {outcome.rank: outcome.raised.traceback for outcome in ends if outcome.raised is not None}
    where = {**raised, **stood}
    for outcome in ends:
        if outcome.timed_out:
            where.pop(outcome.rank, None)
    return "\n".join(f"Where rank {rank} was then:\n{stack.rstrip()}" for rank, stack in where.items() if stack)
