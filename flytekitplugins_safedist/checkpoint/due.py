"""When a save is due. Pure, but for the clock that is handed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from ..errors import CheckpointError, ConfigError, Problem


def check(keep: int | None, every: int | timedelta | None) -> None:
    """Raise ConfigError naming all that cannot work."""
    problems = [problem for problem in (_problem_of_keep(keep), _problem_of_every(every)) if problem is not None]
    if problems:
        raise ConfigError(problems)


def _problem_of_keep(keep: object) -> Problem | None:
    if keep is None or (type(keep) is int and keep >= 1):
        return None
    if type(keep) is not int:
        return Problem("keep", keep, "is not a number of saves", "an int; None keeps all")
    return Problem("keep", keep, "is less than 1", "the newest save must stay; None keeps all")


def _problem_of_every(every: object) -> Problem | None:
    if every is None:
        return None
    if isinstance(every, timedelta):
        return Problem("every", every, "is not a time", "more than 0 seconds") if every <= timedelta(0) else None
    if type(every) is not int:  # passed over, it would never be due
        return Problem("every", every, "is neither a number of steps nor a time", "an int, a timedelta, or None")
    return Problem("every", every, "is less than 1", "a number of steps, a timedelta, or None") if every < 1 else None


@dataclass
class StepProgress:
    """The steps of a training, as it tells them.

    The save with the highest step is the one that is resumed, so steps that begin again with each epoch would bring
    back the end of the first one.

    Attributes:
        last: the last step that was told, or resumed from.
    """

    last: int = -1

    def reach(self, step: int) -> None:
        """Training has done ``step``; told again, nothing happens.

        Raises:
            CheckpointError: it is no number, or less than the last one.
        """
        if type(step) is not int or step < max(self.last, 0):
            raise CheckpointError(
                "a step is a number from 0 that never falls",
                where={"step": repr(step)},
                seen=f"the one before was {self.last}" if self.last >= 0 else type(step).__name__,
                hint="count steps over all epochs, and begin with what restore() returns",
            )
        self.last = step


@dataclass
class EverySteps:
    """Due when a multiple of ``every`` steps is done. By step numbers alone: every rank comes to the same answer.

    Attributes:
        every: steps.
        done: how many steps are done.
    """

    every: int
    done: int = 0

    def due(self, step: int) -> bool:
        """Whether to save after ``step``."""
        before, self.done = self.done, step + 1
        return self.done // self.every > before // self.every

    def saved(self, step: int) -> None:
        """``step`` is saved, whatever for."""
        self.done = step + 1


@dataclass
class EverySeconds:
    """Due when so much time has passed since the last save was begun, by rank 0's clock.

    Only that rank can tell, and all save at one step: so at a step that all know, rank 0 says whether to save, and at
    which step it will say so again. The steps so far tell it when; and it never leaves out more of them than there were
    since it began, so that a slow first step costs some early looks and nothing else.

    Attributes:
        every: seconds.
        look: the step at which rank 0 is asked next; None: at the next one, whichever that is.
    """

    every: float
    clock: Callable[[], float] = time.monotonic
    look: int | None = None
    begun: float = field(init=False)
    _first: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def judge(self, step: int, *, busy: bool) -> tuple[bool, int]:
        """In rank 0, at the step of a look: whether to save now, and the step of the next look.

        Args:
            step: that is done.
            busy: whether the save before is still being written; then not now, but as soon as it is.
        """
        now = self.clock()
        passed = now - self.begun >= self.every
        if passed and not busy:
            self.begun = now
        if self._first is None:
            self._first = (step, now)
            return passed and not busy, step + 1
        steps, seconds = step - self._first[0], now - self._first[1]
        left = max(self.begun + self.every - now, 0.0)
        ahead = int(left * steps / seconds) if seconds > 0 else steps
        return passed and not busy, step + max(1, min(ahead, steps))

    def saved(self, _: int) -> None:
        """A save is begun now, whatever for."""
        self.begun = self.clock()
