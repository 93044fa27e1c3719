"""When a save is due. Pure, but for the clock that is handed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from ..errors import ConfigError, Problem


def check(keep: int | None, every: int | timedelta | None) -> None:
    """Raise ConfigError naming all that cannot work."""
    problems = []
    if keep is not None and keep < 1:
        problems.append(Problem("keep", keep, "is less than 1", "the newest save must stay; None keeps all"))
    if isinstance(every, timedelta) and every <= timedelta(0):
        problems.append(Problem("every", every, "is not a time", "more than 0 seconds"))
    if isinstance(every, int) and every < 1:
        problems.append(Problem("every", every, "is less than 1", "a number of steps, a timedelta, or None"))
    if problems:
        raise ConfigError(problems)


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
