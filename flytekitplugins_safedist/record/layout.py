"""What a rank notes of itself, in the memory that it shares with its agent: always up to date, whoever ends the rank
how, and of one size, whatever the length of the run. The rank writes (:mod:`.writer`), its agent reads (:func:`read`).

Each number has one writer and is aligned: the processor never shows half of one. What is read meanwhile may be one
event ahead of the number beside it.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .summary import SLICES, RankSummary, StageTimes, bucket, percentile, seconds_of

PHASES = ("import", "inputs", "function", "outputs")
"""Of a rank, one after the other."""

STAGES, VALUES, SHARES = 48, 8, 8
"""Names of stages, besides those that share one; values of a step; stages whose share of each slice is noted."""

NAME_BYTES, PATH_BYTES = 64, 200
_LONGEST, _SAVES = 12, 24
_FIRST_BUCKET, _BUCKETS = bucket(1e-6), 304
_FIRST_SLICE_SECONDS = 1 / 64

STALL_TIMES, STALL_SECONDS = 10.0, 1.0
"""A step is a stall that took ten times as long as most, and a second."""


class Span(ctypes.Structure):
    """A stretch of time: its begin, from the rank's, and seconds; and a number."""

    _fields_ = (("at", ctypes.c_double), ("seconds", ctypes.c_double), ("step", ctypes.c_int64))


class StageRow(ctypes.Structure):
    """As :class:`.StageTimes`, with the sum of its ends; ``share`` is its place in the slices, from 1."""

    _fields_ = (
        ("times", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("ends", ctypes.c_double),
        ("share", ctypes.c_int64),
        ("name", ctypes.c_char * PATH_BYTES),
    )


class ValueRow(ctypes.Structure):
    """A number that the user has named."""

    _fields_ = (("number", ctypes.c_double), ("name", ctypes.c_char * NAME_BYTES))


class RankMemory(ctypes.Structure):
    """All of it, as in :class:`.RankSummary`.

    ``began`` is when the rank had its order, by the node's clock: 0 where it has noted nothing; other times count from
    there. ``stepped`` is when the latest step ended.
    """

    _fields_ = (
        ("began", ctypes.c_double),
        ("phases", Span * len(PHASES)),
        ("steps", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("stepped", ctypes.c_double),
        ("met", ctypes.c_int64),
        ("durations", ctypes.c_int64 * _BUCKETS),
        ("longest", Span * _LONGEST),
        ("saved", ctypes.c_int64),
        ("saves", Span * _SAVES),
        ("values", ValueRow * VALUES),
        ("cpu", ctypes.c_double),
        ("peak", ctypes.c_int64),
        ("gpu", ctypes.c_int64),
        ("every", ctypes.c_double),
        ("pace", ctypes.c_float * SLICES),
        ("shares", ctypes.c_float * SLICES * SHARES),
        ("stages", StageRow * (STAGES + 1)),
    )

    def clear(self, began: float) -> None:
        """As a rank begins that had its order then."""
        ctypes.memset(ctypes.addressof(self), 0, SIZE)
        self.step, self.every, self.began = -1, _FIRST_SLICE_SECONDS, began

    def clear_steps(self) -> None:
        """Forget those that were counted so far."""
        self.steps, self.stepped = 0, 0.0
        for array in (self.durations, self.longest, self.pace):
            ctypes.memset(ctypes.addressof(array), 0, ctypes.sizeof(array))

    def note_step(self, at: float, seconds: float) -> None:
        """A step has ended that began *at* that time."""
        self.steps += 1
        self.durations[min(_BUCKETS - 1, bucket(seconds) - _FIRST_BUCKET)] += 1
        if seconds > STALL_SECONDS:
            shortest = min(self.longest, key=lambda each: each.seconds)
            if seconds > shortest.seconds:
                shortest.seconds, shortest.at = seconds, at

    def halve(self) -> None:
        """Have slices that are twice as long."""
        for row in (self.pace, *self.shares):
            pairs = [row[at] + row[at + 1] for at in range(0, SLICES, 2)]
            row[:] = pairs + [0.0] * (SLICES - len(pairs))
        self.every *= 2


SIZE = ctypes.sizeof(RankMemory)
"""Bytes of it."""


def stall_seconds(memory: memoryview, now: float) -> float:
    """In steps that took much longer than most, with the one that goes on."""
    noted = RankMemory.from_buffer_copy(memory)
    durations = _durations(noted)
    limit, goes_on = _limit(durations), _step_goes_on(noted, now)
    ended = sum(count * seconds_of(number) for number, count in durations.items() if seconds_of(number) > limit)
    return ended + (goes_on if goes_on > limit else 0.0)


def read(memory: memoryview, rank: int, *, since: float, until: float, how: str) -> RankSummary:
    """What a rank has noted.

    Args:
        memory: its.
        rank: its number.
        since: when its round began, by the node's clock.
        until: when it ended; or now.
        how: see :class:`.RankSummary`.
    """
    noted = RankMemory.from_buffer_copy(memory)
    if not noted.began or not math.isfinite(noted.began):
        return RankSummary(rank, since, until, how, [("start", 0.0, max(0.0, until - since))])
    summary = RankSummary(rank, noted.began, until, how)
    with suppress(ValueError, ArithmeticError):  # what code of the task may write there: no numbers
        found = replace(summary, **_facts(noted, since, until, has_returned=how == "returned"))
        json.dumps(found.to_dict(), allow_nan=False)
        # The user's own, and any number: a loss that has become none is no reason to hide what the rank did.
        return replace(found, values={_name(each): each.number for each in noted.values if each.name})
    return summary


def has_met(memory: memoryview) -> bool:
    """Whether a rank that has noted this has worked with others: see :attr:`.RankSummary.met`."""
    return bool(RankMemory.from_buffer_copy(memory).met)


def _facts(noted: RankMemory, since: float, until: float, *, has_returned: bool) -> dict[str, Any]:
    lasted, durations = until - noted.began, _durations(noted)
    count, most = max(1, min(SLICES, math.ceil(lasted / noted.every))), max(noted.pace)
    stages = {_name(row): row for row in noted.stages if row.times}
    shares = {name: noted.shares[row.share - 1] for name, row in stages.items() if 0 < row.share <= SHARES}
    saves = [noted.saves[number % _SAVES] for number in range(max(0, noted.saved - _SAVES), noted.saved)]
    steps = [(each.at, each.seconds) for each in noted.longest]
    phases = [(name, row.at, row.seconds) for name, row in zip(PHASES, noted.phases, strict=True) if row.step]
    if not has_returned:
        steps.append((noted.stepped, _step_goes_on(noted, until)))
        ended = sum(phases[-1][1:]) if phases else 0.0
        phases += [(name, ended, max(0.0, lasted - ended)) for name in PHASES[len(phases) :][:1]]
    return {name: getattr(noted, name) for name in ("steps", "step", "met", "saved", "cpu", "peak", "gpu", "every")} | {
        "phases": [("start", since - noted.began, noted.began - since), *phases],
        "stages": {name: StageTimes(row.times, row.seconds, row.ends / row.times) for name, row in stages.items()},
        "durations": durations,
        "rate": most / noted.every,
        "pace": _digits(noted.pace[:count], most) if most else "",
        "shares": {name: _digits(row[:count], noted.every) for name, row in shares.items()},
        "stalls": sorted(each for each in steps if each[1] > _limit(durations)),
        "saves": [(each.at, each.seconds, each.step) for each in saves],
    }


def _durations(noted: RankMemory) -> dict[int, int]:
    return {_FIRST_BUCKET + at: count for at, count in enumerate(noted.durations) if count}


def _limit(durations: dict[int, int]) -> float:
    """Seconds of a step that are no stall."""
    return max(STALL_SECONDS, STALL_TIMES * percentile(durations, 0.5)) if durations else math.inf


def _step_goes_on(noted: RankMemory, now: float) -> float:
    """Seconds of the step that has not ended; 0 where the rank makes none any more."""
    is_over = noted.phases[PHASES.index("function")].step
    return max(0.0, now - noted.began - noted.stepped) if noted.stepped and not is_over else 0.0


def _name(row: StageRow | ValueRow) -> str:
    return bytes(row.name).decode("utf-8", "replace")


def _digits(amounts: Iterable[float], whole: float) -> str:
    return "".join(str(min(9, max(1, round(9 * each / whole)))) if each > 0.001 * whole else "0" for each in amounts)
