"""When a save is due. Pure, but for the clock that is handed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from ..errors import ConfigError, Problem


def check(keep: object, every: object) -> None:
    """Raise ConfigError naming all that cannot work."""
    problems = []
    if keep is not None and (type(keep) is not int or keep < 1):
        problems.append(Problem("keep", keep, "is not a number of saves", "an int from 1; None keeps all"))
    is_time = isinstance(every, timedelta) and every > timedelta(0)
    if every is not None and not is_time and (type(every) is not int or every < 1):  # passed over, never due
        expected = "an int from 1, a timedelta of more than 0 seconds, or None"
        problems.append(Problem("every", every, "is neither a number of steps nor a time", expected))
    if problems:
        raise ConfigError(problems)


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
        self.begin()

    def begin(self) -> None:
        """A save is begun now, whatever for; or training is, from one."""
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
