"""What a round that is over comes to: its root cause, who pays, and whether there is another. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .facts import Cause, End
from .messages import Told


@dataclass(frozen=True)
class Failing:
    """The first failure on one node; which process, and how it is called."""

    cause: Cause
    process: str
    node: str

    @property
    def order(self) -> tuple[int, int, int]:
        """The smallest is the root cause: a failure that speaks for itself, the earliest, the lowest rank."""
        return (self.cause.echo, self.cause.time_ns, self.cause.rank)


@dataclass(frozen=True)
class Free:
    """Another round, at nobody's cost: what ended this one is paid for, or is no failure."""


@dataclass(frozen=True)
class Restart:
    """Another round, for one of ``max_restarts``."""

    rank: int
    why: str


def root(found: Sequence[Failing]) -> Failing | None:
    """The root cause of a round; None where nothing failed."""
    return min(found, key=lambda each: each.order, default=None)


def settle(
    found: Sequence[Failing], *, is_excused: bool, restarts: int, max_restarts: int, returned: tuple[int, ...]
) -> Free | Restart | Question:
    """Decide about a round that is over.

    Args:
        found: the first failure of each node that has one.
        is_excused: a node was lost or has left, or the round made room for one that joins: what then only says that a
            peer was lost is an echo of that, and paid for.
        restarts: how many are spent.
        max_restarts: how many there are.
        returned: ranks that had returned from the function.
    """
    first = root(found)
    if first is None or (first.cause.consequence and is_excused):
        return Free()
    cause = first.cause
    if not cause.repeats and restarts < max_restarts:
        which = f"restart {restarts + 1} of {max_restarts}"
        return Restart(cause.rank, f"rank {cause.rank} failed ({cause.name}); all ranks start again: {which}")
    if cause.repeats:
        reason = f"{cause.name} would repeat: a restart cannot help"
    elif max_restarts == 0:
        reason = "max_restarts=0"
    else:
        reason = f"all {max_restarts} restart(s) of max_restarts are spent"
    # An echo is never called the cause where a failure that speaks for itself is known, though its text be lost.
    asked = [each for each in found if cause.consequence or not each.cause.consequence]
    order = sorted(asked, key=lambda each: each.order)
    return Question(reason, order, returned if cause.consequence else ())


@dataclass
class Question:
    """No other round: the root cause's text is asked for, and where it cannot be had, that of the next in line.

    Attributes:
        reason: why there is no other round.
        order: those who may be asked, the nearest to the root first.
        returned: ranks that had returned, where the cause may be only an echo.
        asked: the process that was asked last.
    """

    reason: str
    order: list[Failing]
    returned: tuple[int, ...] = ()
    asked: str = ""
    _first: Failing | None = field(default=None, init=False)

    def next(self, is_there: Callable[[str], bool]) -> Failing | None:
        """The next to be asked, or None."""
        while self.order:
            found = self.order.pop(0)
            self._first = self._first or found
            if is_there(found.process):
                self.asked = found.process
                return found
        return None

    def unanswered(self) -> str:
        """What is known of the root cause where nobody is left to tell it."""
        first = self._first
        if first is None:
            return f"the job cannot go on ({self.reason})"
        return (
            f"rank {first.cause.rank} on {first.node} failed ({first.cause.name}), and that node was lost before it "
            f"could say more; not restarted in place: {self.reason}"
        )

    def end(self, told: Told) -> End:
        """The end of the job, with the text."""
        return End("failed", outcome=told.outcome, reason=self.reason, disk=told.disk, returned=self.returned)
