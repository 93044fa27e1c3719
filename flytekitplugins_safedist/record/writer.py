"""A rank's own side: what it notes of itself, and the user's ``stage`` blocks.

A stage costs microseconds and no system call. Nothing here may harm the rank.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any

from ..handoff import Slot
from ..scrub import scrubber
from . import layout
from .profile import StepProfile
from .summary import SLICES

_SAMPLE_SECONDS = 1.0
"""Between two looks at the processor's time and the memory, at least."""

_OTHERS = "(others)"
_DEPTH = 4
"""Of stages within stages; what is deeper counts as the stage around it."""

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
    return nullcontext() if recorder is None or recorder.pid != os.getpid() else Stage(recorder, name)


class Stage:
    """One run through a stage."""

    __slots__ = ("_name", "_recorder", "_row", "_since", "_stack")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._row, self._stack = self._recorder.enter(self._name)
        self._since = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.leave(self._row, self._stack, self._since, time.monotonic())


class Recorder:
    """Notes what its rank does.

    Args:
        memory: the rank's, :data:`.layout.SIZE` bytes.
        at: when it had its order.
        profile: what looks into some of its steps.

    Attributes:
        pid: of the rank: a process that is forked from it has the same memory, and nothing of it is the rank's.
    """

    def __init__(self, memory: memoryview, *, at: float, profile: StepProfile | None = None) -> None:
        self._noted, self._at, self.pid = layout.of(memory), at, os.getpid()
        self._noted.clear(at)
        self._shares = list(self._noted.shares)
        self._pace = self._noted.pace
        self._names: dict[str, str] = {}
        self._rows: dict[str, layout.StageRow] = {}
        self._shown = 0
        self._open = threading.local()
        self._values: dict[str, layout.ValueRow] = {}
        self._is_told, self._cycle = False, ""
        self._stepped, self._profile = 0.0, profile
        self._due = at

    # --- what the rank says ----------------------------------------------------------------------------------------
    def phase(self, name: str, since: float, seconds: float) -> None:
        """A phase has ended."""
        row = self._noted.phases[layout.PHASES.index(name)]
        row.at, row.seconds, row.step = since - self._at, seconds, 1
        self._sample(since + seconds)

    def meet(self) -> None:
        """The rank works with others: it makes a process group, or has begun Horovod."""
        self._noted.met = 1

    def saved(self, step: int, since: float, seconds: float) -> None:
        """A step is saved."""
        self._noted.note_save(step, since - self._at, seconds)

    @property
    def values(self) -> dict[str, float]:
        """The latest that :meth:`progress` was told."""
        return {name: row.number for name, row in self._values.items()}

    def progress(self, step: int, values: Mapping[str, float]) -> None:
        """A step has ended; what is known of it."""
        if self.pid != os.getpid():
            return
        now = time.monotonic()
        if not self._is_told:  # whatever was counted by its stages is not counted twice
            self._is_told, self._stepped = True, 0.0
            self._noted.clear_steps()
        with suppress(OverflowError):  # of any library's kind, and size
            self._noted.step = int(step)
        for name, value in values.items():
            with suppress(TypeError, ValueError, RuntimeError):  # no number: nothing that a run should end for
                self._note_value(name, float(value))
        self._end_step(now)
        if self._profile is not None:
            self._profile.ended(int(step))
            self._stepped = time.monotonic()  # what the profiler takes for itself is no step's

    def close(self, *, failed: bool) -> None:
        """The rank ends. Where it has failed, without what the profiler saw: that waits for what its GPU still does,
        which may be a collective without its peers."""
        self._sample(time.monotonic())
        if self._profile is not None and not failed:
            self._profile.end()

    def _note_value(self, name: str, number: float) -> None:
        row = self._values.get(name)
        if row is None and len(self._values) < layout.VALUES:
            row = self._values[name] = self._noted.values[len(self._values)]
            row.name = _fitting(name, layout.NAME_BYTES)
        if row is not None:
            row.number = number

    # --- stages ----------------------------------------------------------------------------------------------------
    def enter(self, name: str) -> tuple[layout.StageRow, list[str]]:
        """A stage begins; its row, and the open ones of this thread, for :meth:`leave`."""
        stack = self._open.__dict__.setdefault("stack", [])
        known = self._names.get(name) or self._new_name(name)
        path = known
        if stack:
            path = f"{stack[-1]}/{known}" if len(stack) < _DEPTH else stack[-1]
        row = self._rows.get(path)
        if row is None:
            path, row = self._new_row(path, is_outer=not stack)
        stack.append(path)
        if not stack[1:] and not self._is_told:
            self._cycle = self._cycle or path
            if path == self._cycle:  # no steps are told: the first stage, begun again, ends one
                self._end_step(time.monotonic())
        return row, stack

    def leave(self, row: layout.StageRow, stack: list[str], since: float, now: float) -> None:
        """It has ended, in any thread."""
        if self.pid != os.getpid():
            return
        stack.pop()
        seconds = now - since
        row.times += 1
        row.seconds += seconds
        row.ends += now - self._at
        if row.share:
            self._spread(self._shares[row.share - 1], seconds, since - self._at, now - self._at)
        if now >= self._due:
            self._sample(now)

    def _new_name(self, name: str) -> str:
        if len(self._names) >= layout.STAGES:
            return _OTHERS
        shown = scrubber(os.environ)(str(name)).replace("/", "-").replace("|", "-")
        shown = _fitting(shown, layout.NAME_BYTES).decode(errors="ignore") or _OTHERS
        return self._names.setdefault(name, shown)

    def _new_row(self, path: str, *, is_outer: bool) -> tuple[str, layout.StageRow]:
        name = _fitting(path, layout.PATH_BYTES)
        path = name.decode(errors="ignore") if len(self._rows) < layout.STAGES else _OTHERS
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = self._noted.stages[len(self._rows)]
            row.name = path.encode()
            if is_outer and self._shown < layout.SHARES:
                self._shown += 1
                row.share = self._shown
        return path, row

    def _end_step(self, now: float) -> None:
        began, self._stepped = self._stepped, now
        self._noted.stepped = now - self._at
        if began:
            self._noted.note_step(began - self._at, now - began)
            self._spread(self._pace, 1.0, began - self._at, now - self._at)
        if now >= self._due:
            self._sample(now)

    # --- over time -------------------------------------------------------------------------------------------------
    def _spread(self, slices: Any, amount: float, since: float, until: float) -> None:
        """Add an amount to the slices of a stretch of time, to each its part."""
        every = self._noted.every
        while until >= SLICES * every:
            self._noted.halve()
            every = self._noted.every
        first, last = max(0, int(since / every)), int(until / every)
        if first == last:
            slices[last] += amount
            return
        each = amount / (until - since)
        for at in range(first, last + 1):
            slices[at] += each * (min(until, (at + 1) * every) - max(since, at * every))

    def _sample(self, now: float) -> None:
        self._due = now + _SAMPLE_SECONDS
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._noted.cpu, self._noted.peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        self._noted.gpu = max(self._noted.gpu, _on_gpu())


def _fitting(text: str, most: int) -> bytes:
    """The first bytes of a text, whole letters, without what ends a name there."""
    return text.replace("\0", "").encode("utf-8", "replace")[: most - 1].decode(errors="ignore").encode()


def _on_gpu() -> int:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return int(cuda.max_memory_allocated()) if cuda is not None and cuda.is_initialized() else 0
    except Exception:  # a broken driver; a stand-in of the user's: a number less in the record
        return 0
