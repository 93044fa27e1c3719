"""A rank's own side: what it notes of itself, and the user's ``stage`` blocks.

A stage costs microseconds and no system call; a line is written at most twice a second, and more seldom the longer a
rank runs, so that its file stays below a megabyte. Nothing here may harm the rank: what cannot be written is not.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

from ..handoff import Slot
from ..scrub import scrubber
from .events import VERSION, Event, Interval, PhaseDone, Profiled, RankStarted, SaveDone, bucket
from .profile import StepProfile

_FIRST_SECONDS = 0.5
"""Between two lines, at first."""

_FIRST_LINES = 4
"""So many steps are written at once: a rank that hangs, or is killed, after a moment is to be seen, too."""

_LINES = 256
"""After so many the time between two of them is doubled."""

_MOST_NAMES, _MOST_VALUES = 48, 8
_NAME_CHARACTERS = 60
_OTHERS = "(others)"
_DEPTH = 4
"""Of stages within stages; what is deeper counts as the stage around it."""

_MOST_SAVES = 500

RECORDER: Slot[Recorder] = Slot()
"""What notes this rank's stages and steps: from the rank to the user's function."""


def stage(name: str) -> AbstractContextManager[object]:
    """``with stage("load"):`` says what the block is: a part of each step, or of the whole run.

    The record of the run then says where each rank's time went, and which rank held the others back in which stage.
    Stages within stages are told apart by their path (``train/forward``). Outside a rank, and in processes that it
    starts, it does nothing.

    Args:
        name: a short word, the same in every rank and step; of more than 48 names the others count as one.
    """
    recorder = RECORDER.value
    return nullcontext() if recorder is None else Stage(recorder, name)


class Stage:
    """One run through a stage."""

    __slots__ = ("_name", "_path", "_recorder", "_since")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._path = self._recorder.enter(self._name)
        self._since = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.leave(self._path, self._since, time.monotonic())


class Recorder:
    """Notes what its rank does.

    Args:
        path: the rank's file.
        rank, round_no: which rank of which launch.
        at: when it had its order.
        profile: what looks into some of its steps.
    """

    def __init__(self, path: Path, *, rank: int, round_no: int, at: float, profile: StepProfile | None = None) -> None:
        self._path, self._at, self._pid = path, at, os.getpid()
        self._names: dict[str, str] = {}
        self._paths: set[str] = set()
        self._open = threading.local()
        self._writing = threading.Lock()
        self._every, self._lines, self._saves = _FIRST_SECONDS, 0, 0
        self._values: dict[str, float] = {}
        self._step, self._is_told, self._cycle = -1, False, ""
        self._stepped, self._profile = 0.0, profile
        self._clear(at)
        self._write(RankStarted(VERSION, rank, round_no, at))

    def _clear(self, now: float) -> None:
        self._since, self._due = now, now + self._every
        self._stages: dict[str, list[float]] = {}
        self._steps, self._slowest = 0, (0.0, 0.0)
        self._durations: dict[int, int] = {}

    # --- what the rank says ----------------------------------------------------------------------------------------
    def phase(self, name: str, since: float, seconds: float) -> None:
        """A phase has ended."""
        self._flush(since + seconds)
        self._write(PhaseDone(name, round(since, 4), round(seconds, 4)))

    def saved(self, step: int, since: float, seconds: float) -> None:
        """A step is saved."""
        self._saves += 1
        if self._saves <= _MOST_SAVES:
            self._write(SaveDone(step, round(since, 4), round(seconds, 4)))

    def progress(self, step: int, values: Mapping[str, float]) -> None:
        """A step has ended; what is known of it."""
        now = time.monotonic()
        if not self._is_told:  # whatever was counted by its stages is not counted twice
            self._is_told, self._stepped, self._durations, self._steps = True, 0.0, {}, 0
        self._step = int(step)  # of any library's kind
        for name, value in values.items():
            if name in self._values or len(self._values) < _MOST_VALUES:
                with suppress(TypeError, ValueError):  # no number: nothing that a run should end for
                    self._values[name] = float(value)
        self._ended_step(now)
        if self._profile is not None:
            self._profiled(self._profile.ended(self._step))
            self._stepped = time.monotonic()  # what the profiler takes for itself is no step's

    def close(self, *, failed: bool) -> None:
        """The rank ends: write what is left. Where it has failed, without what the profiler saw: it waits for what its
        GPU still does, which may be a collective without its peers."""
        self._flush(time.monotonic())
        if self._profile is not None and not failed:
            self._profiled(self._profile.end())

    def _profiled(self, text: str) -> None:
        if text:
            self._write(Profiled(text))

    # --- stages ----------------------------------------------------------------------------------------------------
    def enter(self, name: str) -> str:
        """A stage begins; its path."""
        stack = self._open.__dict__.setdefault("stack", [])
        known = self._names.get(name) or self._new(name)
        path = known
        if stack:
            path = f"{stack[-1]}/{known}" if len(stack) < _DEPTH else stack[-1]
        if path not in self._paths:
            path = _OTHERS if len(self._paths) >= _MOST_NAMES else path
            self._paths.add(path)
        stack.append(path)
        if not stack[1:] and not self._is_told:
            self._cycle = self._cycle or path
            if path == self._cycle:  # no steps are told: the first stage, begun again, ends one
                self._ended_step(time.monotonic())
        return path

    def leave(self, path: str, since: float, now: float) -> None:
        """It has ended."""
        stack = self._open.stack
        if stack:
            stack.pop()
        seconds = now - since
        found = self._stages.get(path)
        if found is None:
            found = self._stages.setdefault(path, [0, 0.0, 0.0, 0.0])
        found[0] += 1
        found[1] += seconds
        found[2] = max(found[2], seconds)
        found[3] += now - self._at
        if now >= self._due:
            self._flush(now)

    def _new(self, name: str) -> str:
        if len(self._names) >= _MOST_NAMES:
            return _OTHERS
        shown = scrubber(os.environ)(str(name))[:_NAME_CHARACTERS].replace("/", "-").replace("|", "-") or _OTHERS
        return self._names.setdefault(name, shown)

    def _ended_step(self, now: float) -> None:
        began, self._stepped = self._stepped, now
        if not began:
            return
        seconds, self._steps = now - began, self._steps + 1
        number = bucket(seconds)
        self._durations[number] = self._durations.get(number, 0) + 1
        if seconds > self._slowest[1]:
            self._slowest = (round(began, 4), round(seconds, 4))
        if now >= self._due or self._lines < _FIRST_LINES:
            self._flush(now)

    # --- the file --------------------------------------------------------------------------------------------------
    def _flush(self, now: float) -> None:
        # Of a process that was forked from the rank nothing is the rank's. Another thread that writes does it for both.
        if os.getpid() != self._pid or not self._writing.acquire(blocking=False):
            return
        try:
            if self._stages or self._steps:
                self._write(self._interval(now))
                self._lines += 1
                if self._lines % _LINES == 0:
                    self._every *= 2
            self._clear(now)
        finally:
            self._writing.release()

    def _interval(self, now: float) -> Interval:
        used = resource.getrusage(resource.RUSAGE_SELF)
        stages = {name: (int(n), round(s, 6), round(m, 6), round(e, 6)) for name, (n, s, m, e) in self._stages.items()}
        return Interval(
            since=round(self._since, 4),
            seconds=round(now - self._since, 4),
            stages=stages,
            steps=self._steps,
            step=self._step,
            durations=self._durations,
            slowest=self._slowest,
            values=self._values,
            cpu=round(used.ru_utime + used.ru_stime, 3),
            peak=used.ru_maxrss * 1024,
            gpu=_on_gpu(),
        )

    def _write(self, event: Event) -> None:
        # By name each time: a task may close every descriptor that is not its own, and the number be another file's.
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, event.line().encode())
            finally:
                os.close(file)


def _on_gpu() -> int:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return int(cuda.max_memory_allocated()) if cuda is not None and cuda.is_initialized() else 0
    except Exception:  # a broken driver; a stand-in of the user's: a number less in the record
        return 0
