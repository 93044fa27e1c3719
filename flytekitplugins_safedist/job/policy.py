"""Whether the ranks are launched again after a failure. Pure: facts in, decision out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..ranks.outcome import RankOutcome


class Action(str, Enum):
    """What the agents do next."""

    RESTART = "restart"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """What to do, and why: the reason is logged and, when giving up, becomes part of the error."""

    action: Action
    reason: str


def would_repeat(cause: RankOutcome) -> bool:
    """Whether the same failure is sure to come again: then no restart is spent on it."""
    return cause.raised is not None and cause.raised.repeats


def decide(max_restarts: int, *, cause: RankOutcome, granted: int | None) -> Decision:
    """Decide after a failed round.

    Args:
        max_restarts: restarts that the job may have within one attempt.
        cause: the root cause of the round's failure.
        granted: the number of the restart (from 1) that the job's shared budget granted for this round, or None. It
            is asked for only where :func:`would_repeat` is false.
    """
    if cause.raised is not None and cause.raised.repeats:
        return Decision(Action.GIVE_UP, f"{cause.raised.type} would repeat: a restart cannot help")
    if granted is not None:
        return Decision(Action.RESTART, f"restart {granted} of {max_restarts}")
    if max_restarts == 0:
        return Decision(Action.GIVE_UP, "max_restarts=0")
    return Decision(Action.GIVE_UP, f"all {max_restarts} restart(s) of max_restarts are spent")
