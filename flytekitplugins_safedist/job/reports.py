"""What a node has learned, and what it says of a failure of its ranks: a summary that the coordinator compares, and the
root cause's text."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..rank.outcome import TEXT_BYTES, RankOutcome
from ..rank.outcome_text import how
from ..rank.places import RankFiles
from ..texts import encodable
from .facts import Cause
from .messages import Alarm, Told
from .verdict import Verdict

FIRST_BYTES = 8 << 10
"""Of one that goes there at once: thousands of nodes may fail in the same moment."""

_NAME_CHARACTERS = 200
"""Of an error's name: every node keeps that of each restart."""

_DISK_CHARACTERS = 4096
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
    page: str = ""
    """Of the run, for Flyte's deck; on the node that uploads."""
    page_file: str = ""
    """The same in a local run, as a file."""


def cause_of(outcome: RankOutcome) -> Cause:
    """A failure, as the coordinator compares it with those of other nodes."""
    return Cause(
        echo=outcome.end.echo,
        consequence=outcome.end.is_echo,
        time_ns=outcome.time_ns,
        rank=outcome.rank,
        name=_name(outcome)[:_NAME_CHARACTERS],
        repeats=(outcome.raised is not None and outcome.raised.repeats)
        or (outcome.gpu is not None and outcome.gpu.stays),
        timed_out=outcome.timed_out,
        step=outcome.step if outcome.end.is_the_codes else -1,
        broken=outcome.gpu is not None and outcome.gpu.stays,
    )


def _name(outcome: RankOutcome) -> str:
    if outcome.gpu is not None:
        return outcome.gpu.what
    return how(outcome).removeprefix("raised ")


def alarm(round_no: int, outcome: RankOutcome) -> Alarm:
    """What is said of it at once."""
    cause = cause_of(outcome)
    return Alarm(round_no, cause, "" if cause.consequence else fitting(outcome, FIRST_BYTES))


def told(round_no: int, outcome: RankOutcome, disk: str) -> Told:
    """The whole of it, for when it is the root cause."""
    return Told(round_no, fitting(outcome), encodable(disk[:_DISK_CHARACTERS]))


def fitting(outcome: RankOutcome, limit: int = TEXT_BYTES) -> str:
    """An outcome record as JSON, in at most so many bytes."""
    return outcome.as_told(limit).to_json()
