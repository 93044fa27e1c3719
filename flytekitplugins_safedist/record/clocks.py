"""How two nodes' clocks differ, from messages that say when they were sent."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

_LATEST = 16
"""Messages that count: clocks drift, and a difference of hours ago says nothing."""


class Ahead:
    """By how much this node's clock is ahead of another one's, at most: each message was under way for some time."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_LATEST)

    def note(self, sent: float) -> None:
        """A message has come that was *sent* then, by the other clock."""
        self._seen.append(time.monotonic() - sent)

    @property
    def least(self) -> float | None:
        """Seconds; None before the first message."""
        return min(self._seen, default=None)


@dataclass(frozen=True)
class Offset:
    """What to add to a node's times for those of node 0.

    Attributes:
        seconds: the middle of what may be.
        error: how far that may be off; None where messages went in one direction alone, and nobody knows.
    """

    seconds: float
    error: float | None

    @classmethod
    def between(cls, ahead: float | None, behind: float | None) -> Offset:
        """From by how much node 0's clock is *ahead*, at most, and the other one's, *behind*."""
        if ahead is None or behind is None:
            return cls(ahead or 0.0, None)
        return cls((ahead - behind) / 2, abs(ahead + behind) / 2)
