"""How fast the steps of a rank end, as somebody sees who looks at their count from time to time. Pure."""

from __future__ import annotations

from collections import deque

from .findings import shown_seconds

_LOOKS = 60
"""That a rate is taken over: about a minute."""


class Pace:
    """One rank's.

    Attributes:
        steps: that have ended, in all rounds.
        stalled: seconds in steps that were stalls, in all rounds.
    """

    def __init__(self) -> None:
        self.steps, self.stalled = 0, 0.0
        self.again()

    def again(self) -> None:
        """A round begins, which counts anew."""
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
        self._before = self.steps, self.stalled

    def see(self, ended: int, stalled: float, now: float) -> None:
        """So many steps of this round have ended now, in seconds of a clock that only grows, and so many seconds of it
        were stalls: more than before, where the usual step has become longer."""
        steps, seconds = self._before
        self.steps, self.stalled = steps + ended, max(self.stalled, seconds + stalled)
        if ended:
            self._looks.append((now, self.steps))

    @property
    def rate(self) -> float:
        """Steps a second, over the last minute; 0 where nobody knows yet."""
        if len(self._looks) < 2:
            return 0.0
        (began, first), (now, last) = self._looks[0], self._looks[-1]
        return (last - first) / (now - began) if now > began else 0.0


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
    facts = [f"step {step}" + (f" of {of}" if of else "")]
    if rate:
        facts.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{shown_seconds(1 / rate)} a step")
        facts += [f"about {shown_seconds((of - step) / rate)} left"] if of > step else []
    return ", ".join(facts)
