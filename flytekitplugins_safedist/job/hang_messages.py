"""What nodes and the coordinator say to each other about a job that may hang."""

from __future__ import annotations

from dataclasses import dataclass

from ..hangs.judge import Hang
from ..hangs.snapshot import Snapshot
from .messages import Message


@dataclass(frozen=True)
class Stalled(Message):
    """A rank here waits for too long; said again while it does.

    Attributes:
        is_urgent: a library will end that, or the user wants it ended; else it is only to be told.
    """

    round: int
    is_urgent: bool


@dataclass(frozen=True)
class Seen(Message):
    """The answer to :class:`Look`: what the ranks here do."""

    round: int
    number: int
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Look(Message):
    """The job may hang: say what your ranks do (:class:`Seen`)."""

    round: int
    number: int


@dataclass(frozen=True)
class Hung(Message):
    """The job hangs, and a rank here is to fail for it, if the task's ``Hangs`` say so."""

    round: int
    hang: Hang
