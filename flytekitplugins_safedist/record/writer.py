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
from typing import Any, NamedTuple

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

    __slots__ = ("_name", "_place", "_recorder", "_since", "_stack")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._place, self._stack = self._recorder.enter(self._name)
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._recorder.leave(self._place, self._stack, self._since, time.monotonic())


class Place(NamedTuple):
    """Where a stage's times are noted: its path, its row, and its share of each slice of the time, where that is
    noted."""

    path: str
    row: layout.StageRow
    share: Any


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
        self._noted, self._at, self.pid = layout.RankMemory.from_buffer(memory), at, os.getpid()
        self._noted.clear(at)
        self._pace = self._noted.pace
        self._places: dict[tuple[str, str], Place] = {}  # by the path of the stage around, and the name
        self._others = Place(_OTHERS, self._noted.stages[layout.STAGES], None)
        self._others.row.name = _OTHERS.encode()
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
        """A step is saved; training stood still for some seconds since then."""
        row = self._noted.saves[self._noted.saved % len(self._noted.saves)]
        row.at, row.seconds, row.step = since - self._at, seconds, step
        self._noted.saved += 1

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
            row.name = _shown(name).encode()
        if row is not None:
            row.number = number

    # --- stages ----------------------------------------------------------------------------------------------------
    def enter(self, name: str) -> tuple[Place, list[Place]]:
        """A stage begins; where it is noted, and the open ones of this thread, for :meth:`leave`."""
        stack: list[Place] = self._open.__dict__.setdefault("stack", [])
        around = stack[-1].path if stack else ""
        known = stack[-1] if len(stack) >= _DEPTH else self._places.get((around, name))
        place = known or self._new_place(around, name)
        stack.append(place)
        if not around and not self._is_told:
            self._cycle = self._cycle or place.path
            if place.path == self._cycle:  # no steps are told: the first stage, begun again, ends one
                self._end_step(time.monotonic())
        return place, stack

    def leave(self, place: Place, stack: list[Place], since: float, now: float) -> None:
        """It has ended, in any thread."""
        if self.pid != os.getpid():
            return
        stack.pop()
        seconds, row = now - since, place.row
        row.times += 1
        row.seconds += seconds
        row.ends += now - self._at
        if place.share is not None:
            self._spread(place.share, seconds, since - self._at, now - self._at)
        if now >= self._due:
            self._sample(now)

    def _new_place(self, around: str, name: str) -> Place:
        if len(self._places) >= layout.STAGES:
            return self._others
        shown = _shown(name).replace("/", "-").replace("|", "-") or _OTHERS
        path = _fitting(f"{around}/{shown}" if around else shown, layout.PATH_BYTES)
        place = next((each for each in self._places.values() if each.path == path), None)
        if place is None:
            row, outer = self._noted.stages[len(self._places)], sum(not path for path, _ in self._places)
            row.name, row.share = path.encode(), outer + 1 if not around and outer < layout.SHARES else 0
            place = Place(path, row, self._noted.shares[outer] if row.share else None)
        return self._places.setdefault((around, name), place)

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


def _shown(name: str) -> str:
    """As much of a name of the user's as is kept, without secrets."""
    return _fitting(scrubber(os.environ)(str(name)), layout.NAME_BYTES)


def _fitting(text: str, most: int) -> str:
    """The first bytes of a text, whole letters, without what ends a name there."""
    return text.replace("\0", "").encode("utf-8", "replace")[: most - 1].decode(errors="ignore")


def _on_gpu() -> int:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return int(cuda.max_memory_allocated()) if cuda is not None and cuda.is_initialized() else 0
    except Exception:  # a broken driver; a stand-in of the user's: a number less in the record
        return 0
