"""One line at the bottom of a terminal, and everything else above it.

By hand: rich's live display hides the cursor, wraps what is written above it, and does not know of a debugger in
another process that has the terminal meanwhile.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

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
