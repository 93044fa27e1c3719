"""How long ranks of one node have been in one collective, or one step, and when that is too long. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from .records import Begun, Recorded

TIMES = 5.0
"""A wait is suspicious that is so many times the longest one that came to an end; and so is a step."""

PART = 0.9
"""Of a collective's own timeout: torch ends the job then anyway, and cannot say for whom."""

T = TypeVar("T")


@dataclass(frozen=True)
class Steps:
    """How far a rank is, by its steps.

    Attributes:
        told: changes with each step that it tells, or comes to a save with; (0, 0) before the first.
        step: that it is in; -1 where nobody knows.
        is_saving: it saves or restores a checkpoint, or waits for that.
        is_writing: a thread of it writes one, beside the training.
    """

    told: tuple[int, int] = (0, 0)
    step: int = -1
    is_saving: bool = False
    is_writing: bool = False


class Progress:
    """The ranks of one round.

    Args:
        floor, ceiling: seconds. No shorter wait is suspicious, and every longer one. Without a floor, a wait is that
            lasts for nearly as long as torch lets it; of Horovod, which gives up none, for the ceiling. So is a step.
        every: seconds between two looks.
    """

    def __init__(self, floor: float | None, ceiling: float, every: float) -> None:
        self._floor, self._ceiling, self._every = floor, ceiling, every
        self._waits: _Since[Recorded] = _Since()
        self._steps: _Since[tuple[tuple[int, int], bool]] = _Since()
        self._longest_wait = self._longest_step = 0.0
        self._looked: float | None = None

    def threshold(self, begun: Begun) -> float:
        """Seconds after which it is suspicious to be in this collective."""
        if self._floor is None:
            return self._ceiling if math.isinf(begun.timeout) else PART * begun.timeout
        return min(max(TIMES * self._longest_wait, self._floor), self._ceiling)

    @property
    def step_threshold(self) -> float:
        """Seconds after which a step is suspicious. The first one, which may compile, is not measured by others."""
        if self._floor is None or not self._longest_step:
            return self._ceiling
        return min(max(TIMES * self._longest_step, self._floor), self._ceiling)

    def look(self, records: Mapping[int, Recorded], steps: Mapping[int, Steps], now: float) -> float | None:
        """How long the one has waited that waits longest, or has been in its step, where that is too long.

        Args:
            records: of the ranks that have answered. One that has not is where it was.
            steps: of the ranks that run.
            now: seconds, of a clock that only grows.
        """
        paused = 0.0 if self._looked is None else now - self._looked - self._every
        self._looked = now
        if paused > self._every:  # this process stood still, and the ranks beside it most likely as well
            self._waits.pass_over(paused)
            self._steps.pass_over(paused)
        for before, lasted in self._waits.see(records, now):
            if before.pending:
                self._longest_wait = max(self._longest_wait, lasted)
        told = {rank: (at.told, at.is_saving) for rank, at in steps.items() if any(at.told)}
        for (_, was_saving), lasted in self._steps.see(told, now):
            if not was_saving:
                self._longest_step = max(self._longest_step, lasted)
        waits = [(now - since, record.pending) for record, since in self._waits.known.values() if record.pending]
        late = [waited for waited, begun in waits if waited >= self.threshold(begun[0])]
        late += [lasts for lasts in self.still(steps, now).values() if lasts >= self.step_threshold]
        return max(late, default=None)

    def still(self, steps: Mapping[int, Steps], now: float) -> dict[int, float]:
        """For how long ranks have been in the step that they are in: of those that tell steps, and save nothing now."""
        known = {rank: self._steps.known.get(rank) for rank, at in steps.items() if not at.is_saving}
        return {
            rank: now - seen[1]
            for rank, seen in known.items()
            if seen is not None and seen[0] == (steps[rank].told, False)
        }


class _Since(Generic[T]):
    """Since when each rank's value is what it is."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[T, float]] = {}

    def pass_over(self, seconds: float) -> None:
        """Nothing could change in these."""
        self.known = {rank: (value, since + seconds) for rank, (value, since) in self.known.items()}

    def see(self, values: Mapping[int, T], now: float) -> Iterator[tuple[T, float]]:
        """Take in what is seen now: the values that are no longer so, and how long they were."""
        for rank, value in values.items():
            before = self.known.get(rank)
            if before is None or before[0] != value:
                self.known[rank] = value, now
                if before is not None:
                    yield before[0], now - before[1]
