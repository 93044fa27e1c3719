"""How long ranks of one node have been in a collective that does not end, and when that is too long. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .records import Begun, Recorded

TIMES = 5.0
"""A wait is suspicious that is so many times the longest one that came to an end."""

PART = 0.9
"""Of a collective's own timeout: torch ends the job then anyway, and cannot say for whom."""


@dataclass
class _Rank:
    record: Recorded
    since: float


class Progress:
    """The ranks of one round.

    Args:
        floor, ceiling: seconds. No shorter wait is suspicious, and every longer one. Without a floor, a wait is that
            lasts for nearly as long as torch lets it; of Horovod, which gives up none, for the ceiling.
        every: seconds between two looks.
    """

    def __init__(self, floor: float | None, ceiling: float, every: float) -> None:
        self._floor, self._ceiling, self._every = floor, ceiling, every
        self._ranks: dict[int, _Rank] = {}
        self._longest = 0.0
        self._looked: float | None = None

    def threshold(self, begun: Begun) -> float:
        """Seconds after which it is suspicious to be in this collective."""
        if self._floor is None:
            return self._ceiling if math.isinf(begun.timeout) else PART * begun.timeout
        return min(max(TIMES * self._longest, self._floor), self._ceiling)

    def look(self, records: Mapping[int, Recorded], now: float) -> float | None:
        """How long the one has waited that waits longest, where that is too long.

        Args:
            records: of the ranks that have answered. One that has not is where it was.
            now: seconds, of a clock that only grows.
        """
        paused = 0.0 if self._looked is None else now - self._looked - self._every
        self._looked = now
        if paused > self._every:  # this process stood still, and the ranks beside it most likely as well
            for rank in self._ranks.values():
                rank.since += paused
        for number, record in records.items():
            known = self._ranks.get(number)
            if known is None or known.record != record:
                if known is not None and known.record.pending:
                    self._longest = max(self._longest, now - known.since)
                self._ranks[number] = _Rank(record, now)
        waits = [(now - rank.since, rank.record.pending) for rank in self._ranks.values() if rank.record.pending]
        return max((waited for waited, begun in waits if waited >= self.threshold(begun[0])), default=None)
