"""What is known of a job, as plain values: failures, what was spent, how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mashumaro.mixins.dict import DataClassDictMixin

EndKind = Literal["done", "failed", "timeout", "lost", "replacements"]
"""How a job ends. ``done``: every rank returned. ``failed``: a rank's failure, or a node that cannot begin. The others
are the platform's: nodes never came, never came back, or were lost too often."""


@dataclass(frozen=True)
class Spent(DataClassDictMixin):
    """One restart, or one replacement, that was taken from the job's budget.

    Attributes:
        round: in which round.
        who: a restart: the rank; a loss: the id of the process that was lost and, as it may come back, the round in
            which it was; of a coordinator that is gone its id alone. Each is counted once, whoever says so. That of
            nodes which could not hear node 0, or all could not be heard by it, is node 0's: one for all of them.
        why: for logs and errors.
        node: a loss: whose place it was.
        lived: a loss: seconds from the process's hello to its loss; negative where nobody knows.
    """

    round: int
    who: str
    why: str
    node: str = ""
    lived: float = -1.0


@dataclass(frozen=True)
class Cause(DataClassDictMixin):
    """A rank's failure, as far as the coordinator needs it to compare; its text is asked for afterwards.

    Attributes:
        echo: how far it is from a cause of its own (:func:`..ranks.outcome.echo`): 0 for a cause.
        consequence: whether it may be only the echo of another rank's (:func:`..ranks.outcome.is_consequence`).
        time_ns, rank: when, by its node's clock, and where.
        name: of the exception or of the end, for logs.
        repeats: it would come again: no restart is spent on it.
        timed_out: a collective timed out.
    """

    echo: int
    consequence: bool
    time_ns: int
    rank: int
    name: str
    repeats: bool = False
    timed_out: bool = False


@dataclass(frozen=True)
class End(DataClassDictMixin):
    """How the job has ended.

    Attributes:
        kind: see :data:`EndKind`.
        text: what happened, for errors.
        outcome: ``failed``: the root cause's outcome record, as JSON text; "" for the others.
        reason: ``failed``: why there is no further restart.
        disk: ``failed``: what scratch held on the root cause's node.
        returned: ``failed`` with an echo as cause: ranks that had returned before.
        missing: names of the nodes that were not there.
    """

    kind: EndKind
    text: str = ""
    outcome: str = ""
    reason: str = ""
    disk: str = ""
    returned: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class History(DataClassDictMixin):
    """What survives the coordinator: every node has a copy. One process writes it, so the highest version is the truth.

    Attributes:
        version: grows with each change.
        round: the last round that began; -1 before the first.
        nodes: how many took part in it.
        restarts, losses: what was taken from ``max_restarts`` and ``max_replacements``.
        end: how the job has ended, while that is not known to be uploaded.
    """

    version: int = 0
    round: int = -1
    nodes: int = 0
    restarts: tuple[Spent, ...] = ()
    losses: tuple[Spent, ...] = ()
    end: End | None = None
