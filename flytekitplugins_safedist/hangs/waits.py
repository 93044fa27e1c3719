"""What a rank waits for, and since when; and after how long that is too long. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

TIMES = 5.0
"""A wait is too long that is so many times the longest one that came to an end; and so is a step."""

MARGIN_SECONDS = 30.0
"""Before a library gives a wait up by itself, and cannot say for whom: for two looks at all ranks. Half of its timeout,
where that is less."""

TOLD_SECONDS = 600.0
"""After which the log tells of a wait that no library would ever give up."""

MOST_SECONDS, LEAST_SECONDS = 30.0, 0.1
"""Between two looks of a node at its ranks."""

_SHARE = 0.05

CALL, STEP, HOROVOD = "call", "step", "Horovod"
"""Sources beside the backends of torch's: the stack alone, what a rank says of its steps, Horovod."""


@dataclass(frozen=True)
class Wait:
    """A rank is in an operation with others, or in one step.

    Attributes:
        rank: which.
        group: name of those who take part; "" where nobody knows.
        members: their ranks, as :func:`.evidence.text_of`; "" where nobody knows.
        operation: with what it is about: ``all_reduce of Float[3]``.
        number: counts what the group does, the same on each member; 0 where nothing counts it.
        since: seconds since the epoch, of the clock of the rank's machine; 0.0 where only looks can tell.
        source: who says so.
        timeout: seconds after which its library gives it up.
        limit: seconds after which it is too long.
        age: seconds that it has lasted, at the look that has shown it.
    """

    rank: int
    group: str
    members: str
    operation: str
    number: int
    since: float
    source: str
    timeout: float = math.inf
    limit: float = math.inf
    age: float = 0.0

    @cached_property
    def key(self) -> str:
        """Of those who take part: groups of two backends may have one name, and groups of other ranks, too."""
        return f"{self.source} {self.group} {self.members}"

    @property
    def identity(self) -> tuple[object, ...]:
        """The same as long as it is the same wait, as its source tells of it."""
        return (self.rank, self.key, self.number, self.since)

    @property
    def is_late(self) -> bool:
        """Whether it is too long."""
        return self.age >= self.limit

    @property
    def kind(self) -> str:
        """What is measured apart: steps, and calls, of which the first of a job take long."""
        return self.source if self.source in (STEP, CALL) else "recorded"

    def __str__(self) -> str:
        """For people."""
        number = f"#{self.number} of " if self.number else ""
        return f"{self.operation} ({number}group {self.group})" if self.group else self.operation


@dataclass(frozen=True)
class Steps:
    """How far a rank is, by its steps.

    Attributes:
        told: changes with each step that it tells, or comes to a save with; (0, 0) before the first.
        step: that it is in; -1 where nobody knows.
        is_saving: it saves or restores a checkpoint, or waits for that.
        is_writing: a thread of it writes one, beside the training.
        is_fetched_for: another rank of its node downloads an input that it waits for.
        is_over: it has told all steps that there are to be, or has come back from the task's function.
    """

    told: tuple[int, int] = (0, 0)
    step: int = -1
    is_saving: bool = False
    is_writing: bool = False
    is_fetched_for: bool = False
    is_over: bool = False

    def wait(self, rank: int) -> Wait | None:
        """The step as a wait; None where it tells none, is in none any more, or saves."""
        if not any(self.told) or self.is_over or self.is_saving:
            return None
        return Wait(rank, str(self.told), "", f"step {self.step}", max(self.step, 0), 0.0, STEP)


class Ages:
    """How long the waits of one node's ranks have lasted, in one round.

    Args:
        floor, ceiling: seconds, as in ``Hangs``.
        began: when, in seconds since the epoch.
    """

    def __init__(self, floor: float | None, ceiling: float, began: float) -> None:
        self._floor, self._ceiling, self._began = floor, ceiling, began
        self._before: dict[tuple[object, ...], Wait] = {}
        self._longest = defaultdict[str, float](float)
        self._shifts: list[tuple[float, float]] = []
        self._looked = began

    def shift(self, at: float, seconds: float) -> None:
        """What began before a moment is so many seconds younger: this machine stood still, or its clock was set."""
        self._shifts.append((at, seconds))
        self._looked += seconds
        self._before = {identity: replace(wait, since=wait.since + seconds) for identity, wait in self._before.items()}

    def see(self, waits: Iterable[Wait], running: Collection[int], silent: Collection[int], now: float) -> list[Wait]:
        """The same waits, each with its age and its limit.

        Args:
            waits: of all ranks that have said so, now.
            running: ranks. Others are forgotten: a rank that has returned waits no more.
            silent: of these the ones whose recorders have not answered: they are where they were.
            now: seconds since the epoch.
        """
        current = {wait.identity: replace(wait, since=self._since(wait, now)) for wait in waits}
        kept = {}
        for identity, wait in self._before.items():
            if identity in current or wait.rank not in running:
                continue
            if wait.rank in silent and wait.source != STEP:
                kept[identity] = wait
                continue
            # When it ended, between two looks, nobody knows; but steps may all be shorter than that.
            ended = now if wait.source == STEP else self._looked
            self._longest[wait.kind] = max(self._longest[wait.kind], ended - wait.since)
        self._before, self._looked = {**kept, **current}, now
        return [replace(wait, limit=self.limit(wait), age=now - wait.since) for wait in current.values()]

    def limit(self, wait: Wait) -> float:
        """Seconds after which it is too long. The first step, which may compile, is not measured by others."""
        own = wait.timeout - min(MARGIN_SECONDS, wait.timeout / 2)
        longest = self._longest[wait.kind]
        if wait.source == STEP and (self._floor is None or not longest):
            return self._ceiling
        if self._floor is None:
            return own if own < math.inf else TOLD_SECONDS
        return min(max(TIMES * longest, self._floor), self._ceiling, own)

    def next_look(self, waits: Iterable[Wait], timeout: float, took: float, now: float) -> float:
        """Seconds until it is worth looking again; also for a wait that begins right now.

        Args:
            waits: of this look.
            timeout: the shortest one of any operation so far.
            took: seconds that this look has taken: no more than a twentieth of the time is spent so.
            now: seconds since the epoch.
        """
        often = timeout / 4 if self._floor is None else min(timeout, self._floor) / 4
        young = max(1.0, (now - self._began) / 4)  # a group with a short timeout may just have been made
        left = [wait.limit - wait.age for wait in waits]
        soon = min(max(min(often, young), took / _SHARE), *(seconds for seconds in left if seconds > 0), MOST_SECONDS)
        return max(LEAST_SECONDS, soon)

    def _since(self, wait: Wait, now: float) -> float:
        before = self._before.get(wait.identity)
        if before is not None or not wait.since:
            return before.since if before is not None else now
        # Of a clock that was set back: what is not in the future by now began after that, as far as one can know.
        past = [seconds for at, seconds in self._shifts if wait.since < at and (seconds > 0 or wait.since > now)]
        return wait.since + sum(past)
