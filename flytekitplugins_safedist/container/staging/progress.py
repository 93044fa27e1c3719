"""What a person sees while the code arrives: nothing for short waits, a bar on a terminal, sparse lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from ...log import PREFIX

logger = logging.getLogger(__name__)

_QUIET = 3.0
_LINE_FIRST, _LINE_MOST = 10.0, 60.0
_BAR = 0.2


def human(size: float) -> str:
    """``1.5 MB``: powers of ten, as networks and disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class StagingProgress:
    """Speaks about one staging: draws on ``stream`` where that is a terminal, and says lines to the log elsewhere.

    Args:
        stream: default stderr.
        clock: seconds, never going back.
        say: takes a line for the log.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = logger.info,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._log = say
        self._clock = clock
        self._start = clock()
        self._live = self._stream.isatty()
        self._next = self._start + _QUIET
        self._gap = _BAR if self._live else _LINE_FIRST
        self._drawn = False

    def fetching(self, done: int, total: int | None, files: int) -> None:
        """``done`` of ``total`` compressed bytes are in, ``files`` are written."""
        if not self._due():
            return
        elapsed = max(self._clock() - self._start, 1e-6)
        share = f" ({100 * done // total}%)" if total else ""
        of = f" of {human(total)}" if total else ""
        self._say(f"code: {human(done)}{of}{share}, {human(done / elapsed)}/s, {files} files, {elapsed:.0f} s")

    def waiting(self, owner: str, waited: float) -> None:
        """Another process of this node does the work."""
        if self._due():
            self._say(f"code: waiting for {owner}, {waited:.0f} s")

    def end(self) -> None:
        """Leave the bar's line."""
        if self._drawn:
            print(file=self._stream, flush=True)
            self._drawn = False

    def _due(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._gap
        if not self._live:
            self._gap = min(self._gap * 1.5, _LINE_MOST)
        return True

    def _say(self, text: str) -> None:
        if self._live:
            print(f"\r\033[K{PREFIX}{text}", end="", file=self._stream, flush=True)
            self._drawn = True
        else:
            self._log(text)
