"""Which nodes' heartbeats are overdue. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence


class HeartbeatMonitor:
    """Which nodes' heartbeats are overdue, from counters that are looked at now and then."""

    def __init__(self, limit: float) -> None:
        """
        Args:
            limit: seconds without a change after which a heartbeat is overdue.
        """
        self.limit = limit
        self._looked = time.monotonic()
        self._changed: dict[int, tuple[int, float]] = {}
        self._round: Hashable = None

    def due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= min(2.0, self.limit / 4)

    def overdue(self, round_no: Hashable, beats: Sequence[int]) -> tuple[int, ...]:
        """Take in one look at all counters of a round; returns the nodes whose counter has stood still for too long.

        Args:
            round_no: the round, or who is in it: whatever differs from one to the next.
            beats: the counters, by node rank.
        """
        now = self._looked = time.monotonic()
        if round_no != self._round:
            # In a range, a node's rank is another node's in the next round, or nobody's: it would seem overdue.
            self._round, self._changed = round_no, {}
        for node, heartbeat_interval in enumerate(beats):
            if node not in self._changed or self._changed[node][0] != heartbeat_interval:
                self._changed[node] = (heartbeat_interval, now)
        return tuple(node for node, (_, since) in self._changed.items() if now - since > self.limit)

    def forget(self) -> None:
        """Start over: every node gets its whole time again."""
        self._changed = {}
