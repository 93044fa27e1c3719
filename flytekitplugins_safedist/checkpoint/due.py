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
                hint="count steps over all epochs, and begin with what resume() returns",
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


@dataclass
class EverySeconds:
    """Due when so much time has passed since the last save was begun. By one rank's clock: only that rank can tell."""

    every: float
    clock: Callable[[], float] = time.monotonic
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.clock()

    def passed(self) -> bool:
        """Whether the time has come."""
        return self.clock() - self.last >= self.every

    def begun(self) -> None:
        """A save is begun now."""
        self.last = self.clock()
