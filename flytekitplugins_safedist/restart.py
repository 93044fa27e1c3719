"""Whether the ranks are launched again after a failure. Pure: history in, decision out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .outcome import RankOutcome


class Action(str, Enum):
    """What the agent does next."""

    RESTART = "restart"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Policy:
    """How often the ranks of the whole job may be launched again within one attempt."""

    max_restarts: int


@dataclass(frozen=True)
class Decision:
    """What to do, and why: the reason is logged and, when giving up, becomes part of the error."""

    action: Action
    reason: str


def decide(policy: Policy, *, restarts: int, cause: RankOutcome) -> Decision:
    """Decide after one failed round.

    Args:
        policy: the budget.
        restarts: restarts of the job so far.
        cause: the root cause of this round's failure.
    """
    if cause.raised is not None and cause.raised.repeats:
        return Decision(Action.GIVE_UP, f"{cause.raised.type} would repeat: a restart cannot help")
    if restarts >= policy.max_restarts:
        if policy.max_restarts == 0:
            return Decision(Action.GIVE_UP, "max_restarts=0")
        return Decision(Action.GIVE_UP, f"all {policy.max_restarts} restart(s) of max_restarts are spent")
    return Decision(Action.RESTART, f"restart {restarts + 1} of {policy.max_restarts}")
