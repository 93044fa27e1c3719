"""What a node that waits for others says meanwhile: a line every 30 s, which names who is missing and since when."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY = 30.0
"""Seconds between two lines."""

NOT_THERE = "not there yet", "a machine with room for the pod, its image, or the end of the pod before it"
"""What is said of a node that node 0 waits for."""


def line(who: str, *, waited: float, limit: float, seen: str, awaits: str) -> str:
    """The line.

    Args:
        who: is missing.
        waited: seconds so far.
        limit: seconds in all.
        seen: what a look found.
        awaits: what Kubernetes may be waiting for.
    """
    left = max(0.0, limit - waited)
    times = f"{waited:.0f} s, {left:.0f} s more at most"
    return f"waiting for {who} for {times} ({seen}); Kubernetes may be waiting for {awaits}"


class Vigil:
    """One wait.

    Args:
        who: is missing.
        limit: seconds in all.
        say: takes a sentence for the node's log.
        clock: seconds that only grow.
    """

    def __init__(
        self, who: str, limit: float, say: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.who = who
        self.limit = limit
        self._say = say
        self._clock = clock
        self._since = self._reported = clock()

    @property
    def deadline(self) -> float:
        """When the wait is over, by its clock."""
        return self._since + self.limit

    def due(self) -> bool:
        """Whether it is time for a line: to find out what it says may cost something."""
        return self._clock() - self._reported >= EVERY

    def look(self, seen: str, awaits: str, who: str = "") -> None:
        """Say the line when it is time for one; see :func:`line`."""
        if self.due():
            self._reported = self._clock()
            waited = self._reported - self._since
            self._say(line(who or self.who, waited=waited, limit=self.limit, seen=seen, awaits=awaits))
