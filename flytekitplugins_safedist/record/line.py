"""How fast the steps of a rank end; and one line at the bottom of a terminal that says it, and everything else above
it.

By hand: rich's live display hides the cursor, wraps what is written above it, and does not know of a debugger in
another process that has the terminal meanwhile.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from .findings import shown_seconds

_LOOKS = 60
"""That a rate is taken over: about a minute."""

GONE = "\r\x1b[K"
"""Clears the line that the cursor is in."""


def on_terminal(environment: Mapping[str, str]) -> bool:
    """Whether a person sees what this process writes, on a terminal that can clear a line."""
    try:
        return sys.stdout.isatty() and sys.stderr.isatty() and environment.get("TERM", "dumb") != "dumb"
    except (AttributeError, ValueError):  # streams of the user's own; closed
        return False


class Line:
    """The line.

    Args:
        taken: whether somebody else has the terminal now, who clears the line first.
    """

    def __init__(self, taken: Callable[[], bool]) -> None:
        self._taken = taken
        self._lock = threading.RLock()
        self._stream = sys.stderr
        self._is_drawn = self._is_within = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, what is written to standard output and error goes above it."""
        out, err = (cast(TextIO, _Above(stream, self)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            try:
                yield
            finally:
                with self._lock:
                    self._clear()

    def draw(self, text: str) -> None:
        """Show a text in the place of the one before, as much of it as the terminal is wide."""
        with self._lock:
            if self._taken():
                self._is_drawn = False  # who took the terminal has cleared it
                return
            if self._is_within:
                return
            self._stream.write(GONE + text[: shutil.get_terminal_size().columns - 1])
            self._stream.flush()
            self._is_drawn = True

    def write(self, stream: TextIO, text: str) -> int:
        """Write to one of the streams."""
        with self._lock:
            self._clear()
            written = stream.write(text)
            stream.flush()
            self._is_within = not text.endswith("\n") if text else self._is_within
            return written

    def _clear(self) -> None:
        if self._is_drawn and not self._taken():
            self._stream.write(GONE)
            self._stream.flush()
        self._is_drawn = False


class _Above:
    """A stream whose text goes above the line."""

    def __init__(self, stream: TextIO, line: Line) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        """As the stream does."""
        return self._line.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Pace:
    """One rank's in one round, which counts anew.

    Attributes:
        steps: that have ended, in all rounds.
        stalled: seconds in steps that were stalls, in all rounds.
    """

    def __init__(self, steps: int = 0, stalled: float = 0.0) -> None:
        self.steps, self.stalled = self._before = steps, stalled
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)

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
