"""What nodes and the coordinator say to each other of the checks before a job's first rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..preflight.judge import NodeReport
from .messages import Message


@dataclass(frozen=True)
class Checked(Message):
    """What this node has found, as :attr:`.messages.Go.checks` asked for; its ranks wait."""

    round: int
    report: NodeReport


@dataclass(frozen=True)
class Cleared(Message):
    """All nodes have checked: start the ranks. ``text``: what came of it, for the log."""

    round: int
    text: str
