"""How fast the steps of a rank end, as somebody sees who looks at their count from time to time. Pure."""

from __future__ import annotations

from collections import deque

from ..record.findings import shown_seconds
from ..record.node import STALL_SECONDS, STALL_TIMES

_LOOKS = 60
"""That a rate is taken over: about a minute."""


class Pace:
    """One rank's.

    Attributes:
        steps: that have ended, in all rounds.
        stalled: seconds in steps that took ten times as long as the others, and a second.
    """

    def __init__(self) -> None:
        self.steps, self.stalled = 0, 0.0
        self._seconds, self._usual_steps = 0.0, 0  # of steps that were no stall
        self.again()

    def again(self) -> None:
        """A round begins, which counts anew."""
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
        self._ended, self._since, self._still = 0, 0.0, 0.0

    def see(self, ended: int, now: float) -> None:
        """So many steps of this round have ended now, in seconds of a clock that only grows."""
        new = ended - self._ended
        if new:
            if self._ended and not self._still:
                self._seconds, self._usual_steps = self._seconds + now - self._since, self._usual_steps + new
            self.steps, self._ended, self._since, self._still = self.steps + new, ended, now, 0.0
        elif self._usual_steps:
            lasts = now - self._since
            if lasts > max(STALL_SECONDS, STALL_TIMES * self._seconds / self._usual_steps):
                self.stalled, self._still = self.stalled + lasts - self._still, lasts
        if ended:
            self._looks.append((now, self.steps))

    @property
    def rate(self) -> float:
        """Steps a second, over the last minute; 0 where nobody knows yet."""
        if len(self._looks) < 2:
            return 0.0
        (began, first), (now, last) = self._looks[0], self._looks[-1]
        return (last - first) / (now - began)


def status(step: int, of: int, rate: float, seconds: float) -> str:
    """How far a job is, for people.

    Args:
        step: that its slowest rank is in; -1 where nobody knows.
        of: steps that there are; 0 where nobody knows.
        rate: steps a second; 0 where nobody knows.
        seconds: since its round began.
    """
    if step < 0:
        return f"running for {seconds:.0f} s" if seconds < 60 else f"running for {shown_seconds(seconds)}"
    told = [f"step {step}" + (f" of {of}" if of else "")]
    if rate:
        told.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{shown_seconds(1 / rate)} a step")
        told += [f"about {shown_seconds((of - step) / rate)} left"] if of > step else []
    return ", ".join(told)
