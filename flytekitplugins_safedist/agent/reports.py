"""What a node has learned, and what it says of a failure of its ranks: a summary that is compared, and its text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..coordinator.books import Cause, Round
from ..coordinator.messages import Status
from ..rank.outcome import RankOutcome
from ..rank.outcome_text import how
from ..rank.places import RankFiles
from ..record.run import Shown
from ..texts import encodable
from .verdict import Verdict

_NAME_CHARACTERS = 200
"""Of an error's name: every node keeps that of each restart."""

_DISK_CHARACTERS = 2048
"""Of what is told about scratch: a line per rank, for more ranks than a node has."""


@dataclass
class Report:
    """What the agent has learned: for the end line and for the caller."""

    rounds: int = 0
    node_rank: int = -1
    """In the latest round; -1 before the first."""
    seconds: dict[str, float] = field(default_factory=dict)
    result: RankFiles | None = None
    verdict: Verdict | None = None
    decks: tuple[dict[str, str], ...] = ()
    """Of a rank that failed."""
    shown: Shown = field(default_factory=Shown)
    """The page of the run; on the node that uploads."""


def cause_of(outcome: RankOutcome, round_: Round, at: Status, *, limit: int, disk: str = "") -> Cause:
    """A failure, as all nodes know it.

    Args:
        outcome: of the rank.
        round_: in which.
        at: its node.
        disk: what scratch holds there, where that matters.
        limit: bytes of its text.
    """
    return Cause(
        round_,
        outcome.rank,
        _name(outcome)[:_NAME_CHARACTERS],
        _text(outcome, disk, limit),
        outcome.time_ns,
        echo=outcome.end.echo,
        repeats=(outcome.raised is not None and outcome.raised.repeats)
        or (outcome.gpu is not None and outcome.gpu.stays),
        is_timeout=outcome.timed_out,
        step=outcome.step if outcome.end.is_the_codes else -1,
        machine=at.ground,
        is_machines=outcome.gpu is not None and outcome.gpu.stays,
        where=f"{at.name} ({at.where})",
    )


def told_by(cause: Cause) -> tuple[RankOutcome, str] | None:
    """The inverse: the outcome's record, and what scratch holds; None where the text is gone."""
    try:
        data = json.loads(cause.text)
        return RankOutcome.from_json(data["outcome"]), str(data["disk"])
    except (ValueError, KeyError, TypeError):
        return None


def _text(outcome: RankOutcome, disk: str, limit: int) -> str:
    def dump(cause: RankOutcome) -> str:
        return json.dumps({"outcome": cause.to_json(), "disk": encodable(disk[:_DISK_CHARACTERS])}, ensure_ascii=False)

    return dump(outcome.fitting(limit, dump))


def _name(outcome: RankOutcome) -> str:
    if outcome.gpu is not None:
        return outcome.gpu.what
    return how(outcome).removeprefix("raised ")
