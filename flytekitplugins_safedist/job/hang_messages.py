"""What nodes and the coordinator say to each other about a job that may hang."""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnosis.picture import Standing
from .messages import Message


@dataclass(frozen=True)
class Stalled(Message):
    """A rank here has been in one collective, or one step, for so many seconds, which is suspicious; said again while
    it is."""

    round: int
    waited: float


@dataclass(frozen=True)
class Seen(Message):
    """The answer to :class:`Look`: what the ranks here do."""

    round: int
    number: int
    standing: tuple[Standing, ...]


@dataclass(frozen=True)
class Look(Message):
    """The job may hang: say what your ranks do (:class:`Seen`)."""

    round: int
    number: int


@dataclass(frozen=True)
class Hung(Message):
    """The job hangs, and a rank here is to fail for it, if the task's ``Hangs`` say so.

    Attributes:
        rank: that is to fail.
        hang, why: its kind, and why, as in :class:`..diagnosis.verdict.Hang`.
        waited: seconds.
        may_end: waiting longer may help.
        picture, evidence: all ranks, as in :class:`.inquiry.Found`.
        step, by_steps: as in :class:`..diagnosis.verdict.Hang`.
    """

    round: int
    rank: int
    hang: str
    why: str
    waited: float
    may_end: bool
    picture: str
    step: int = -1
    by_steps: bool = False
    evidence: str = ""
