"""torch.profiler between two steps of a rank, as text of bounded size."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..compat import torch as torch_inside
from ..scrub import scrubber
from .summary import squeezed

_MARK = "safedist: the clock"
_MOST_SLICES = 20_000
_CHARACTERS = 128 << 10
"""Of the text; the shortest slices are left out."""


class StepProfile:
    """Runs torch.profiler from the end of the step before the first one to the end of the last one.

    No job fails for it: what torch cannot do is said in the rank's log.

    Args:
        first, last: the steps.
        file: where what it saw is left (:func:`packed`).
    """

    def __init__(self, first: int, last: int, file: Path) -> None:
        self._first, self._last, self._file = first, last, file
        self._running: Any = None
        self._since = 0.0
        self._is_over = False

    def ended(self, step: int) -> None:
        """A step has ended: begin, go on, or end."""
        if step >= self._last:
            self.end()
        elif self._running is None and not self._is_over and step + 1 >= self._first:
            self._begin()

    def _begin(self) -> None:
        try:
            from torch import profiler

            if torch_inside.is_profiled():  # a process has one: starting another one ends it
                self._fails("a profiler of the task's own is running")
                return
            begun = profiler.profile()
            begun.start()
            for _ in range(2):  # the first one takes milliseconds
                with profiler.record_function(_MARK):
                    self._since = time.monotonic()
            self._running = begun
        except Exception as error:  # no torch, or whatever it raises
            self._fails(f"{type(error).__name__}: {error}")

    def end(self) -> None:
        """Leave what ran since it began, if anything did."""
        begun, self._running, self._is_over = self._running, None, True
        if begun is None:
            return
        draft = self._file.with_name(f"{self._file.name}.draft")  # groups that are noted meanwhile have one as well
        try:
            begun.stop()
            begun.export_chrome_trace(str(draft))
            events = json.loads(draft.read_text(errors="replace"))["traceEvents"]
            draft.write_text(packed(events, self._since, scrubber(os.environ)))
            draft.replace(self._file)
        except Exception as error:  # torch's, a full disk
            self._fails(f"{type(error).__name__}: {error}")
            draft.unlink(missing_ok=True)

    def _fails(self, why: str) -> None:
        self._is_over = True
        print(f"no profile of this rank: {why}", file=sys.stderr)  # noqa: T201  (its log)


def packed(events: Sequence[Mapping[str, Any]], since: float, scrub: Callable[[str], str]) -> str:
    """A trace of torch's as text (:func:`.summary.squeezed`): when its clock began, as its last mark did, *since*; the
    names of its tracks; of each slice the name, the track, and nanoseconds from there, and how many it took."""
    whole = [event for event in events if event["ph"] == "X" and event.get("cat") != "Trace"]
    zero = max(event["ts"] for event in whole if event["name"] == _MARK)
    slices = sorted((event for event in whole if event["name"] != _MARK), key=lambda event: -event["dur"])
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown, tracks, rows = functools.cache(lambda name: scrub(name)[:100]), dict[tuple[Any, Any], int](), []
    for event in slices[:_MOST_SLICES]:
        track = tracks.setdefault((event["pid"], event["tid"]), len(tracks))
        at, took = event["ts"] - zero, event["dur"]
        rows.append((shown(event["name"]), track, round(at * 1e3), round(took * 1e3)))
    names = [named.get(track, str(track[1])).strip() for track in tracks]
    while len(text := squeezed((since, names, rows))) > _CHARACTERS:
        del rows[len(rows) // 2 :]
    return text
