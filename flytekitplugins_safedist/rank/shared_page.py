"""The memory that one rank shares with its agent: how far it is, at which step all ranks save, and how it ended.

All of it is set aside before the rank starts: a rank that fills the disk, or has no descriptor left, still says how it
ended. Nothing is a file of its own whose being there, or not, would mean something.

Reading one is a load from a mapped page: nothing to wait for, no lock, no system call; and the agent may write it while
the rank is in native code, in a compiler or in a collective. Each word has one writer, is 8 bytes and aligned, so that
the processor never shows half of one; what belongs together is packed into one word, because two words may be seen in
either order.

How all ranks of a job come to one step (:meth:`RankPage.at` and ``agreement`` are the two halves):

1. The agents *call*: the number of the call appears on every page of the job.
2. A rank that reaches a step first writes its *floor*, the earliest step at which it can still save, and then looks for
   a call. The agent writes the call first, and then reads the floor. So either the rank sees the call and waits for its
   answer, or the agent sees the floor of the step that the rank has begun. There is no third case, so no rank is ever
   past the step that comes out.
3. The answer is the highest floor of all ranks. Nobody waits for a rank to get anywhere, so a rank that is blocked in a
   collective until a waiting one comes holds nothing up.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ..hangs.waits import Steps
from ..record import layout

T = TypeVar("T")

NOWHERE = (1 << 62) - 1
"""As a step: never reached."""

RECORD_BYTES = 256 * 1024
"""The longest record of a rank's end."""

_WORDS_BYTES = mmap.PAGESIZE
_SUMMARY_AT = _WORDS_BYTES + RECORD_BYTES
_BYTES = _SUMMARY_AT + layout.SIZE
_STEP_BITS = 44
_STEP_MASK = (1 << _STEP_BITS) - 1
_URGENT, _FORCED = 1 << _STEP_BITS, -1 << 63
_CALL_SHIFT = _STEP_BITS + 1
_CALL_MASK = (1 << (63 - _CALL_SHIFT)) - 1  # without the sign, which says that a save is forced
_NO_STEP = _STEP_MASK
"""Written instead of a step: no rank takes part, or the call was given up."""

_PREEMPTED, _CALL, _ANSWER, _STAYS = 0, 1, 2, 3
_FLOOR, _ASKED, _LISTENS, _FINISHED, _LEFT, _DEBUGS, _BEGUN, _ENDED = 8, 9, 10, 11, 12, 13, 14, 15
_WAITS, _WAITED, _STEPS, _STEP, _SAVES, _WRITES, _OF, _FRESH, _FETCHED_FOR = 16, 17, 18, 19, 20, 21, 22, 23, 24
_SCRIPT, _BACK = 25, 26
"""Words of the agent, and of the rank, on cache lines of their own."""

_AWAITED_AT, _AWAITED_BYTES = 256, 128
"""Text beside the words: where it begins, and how much there is of it, the end of longer ones."""

_NO_COUNT = -1
"""As the step that is told: steps have fallen, so their numbers say nothing of how far the rank is."""

LATEST_STEP = _STEP_MASK - 2
ANSWER_SECONDS = 120.0
"""How long a rank stands still for an answer. The agents need milliseconds; where one is lost, its heartbeat or its
store ends the round, and the ranks with it."""

_LOOK = 0.001
"""Seconds between two looks of a rank that waits for an answer."""


def make(path: Path) -> AgentPage:
    """Make a page for a rank that is about to start.

    Raises:
        OSError: no space for it. Set aside at once: a page that cannot be filled later ends the process (SIGBUS).
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, _BYTES)
        return AgentPage(file)
    finally:
        os.close(file)


def open_page(path: Path) -> RankPage:
    """The page of this rank, as its agent made it."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return RankPage(file)
    finally:
        os.close(file)


def _seal(record: bytes) -> int:
    """Length and checksum, in one word: not 0 for any record."""
    return (zlib.crc32(record) >> 1) << 32 | len(record)


@dataclass(frozen=True)
class AgreedSave:
    """What :meth:`RankPage.at` found: all ranks save at this step.

    Attributes:
        call: number of the agreement; for :meth:`RankPage.finish`.
        urgent: whether it is because a node of the job was told to stop: commit it before anything else. The same on
            every rank, other than what :attr:`RankPage.preempted` says at one moment.
        forced: save whether or not that is due, and commit it: the ranks are ended then, for a node joins.
    """

    call: int
    urgent: bool
    forced: bool = False

    @property
    def is_last(self) -> bool:
        """The ranks are ended after it."""
        return self.urgent or self.forced


def _call_of(answer: int) -> int:
    return (answer >> _CALL_SHIFT) & _CALL_MASK


def _under_way(words: memoryview) -> int:
    return int(max(words[_FLOOR], words[_STEP])) - 1


class _Page:
    """Either end.

    Attributes:
        summary: what the rank notes for the record of the run (:mod:`..record.layout`).
    """

    def __init__(self, file: int) -> None:
        mapped = memoryview(mmap.mmap(file, _BYTES))
        self._words = mapped[:_WORDS_BYTES].cast("q")
        self._awaited = mapped[_AWAITED_AT : _AWAITED_AT + _AWAITED_BYTES]
        self._record = mapped[_WORDS_BYTES:_SUMMARY_AT]
        self.summary = mapped[_SUMMARY_AT:]


class _Told(Generic[T]):
    """What one word tells, as an attribute of the end that reads it."""

    def __init__(self, word: int, meaning: Callable[[int], T]) -> None:
        self._word, self._meaning = word, meaning

    def __get__(self, page: _Page, _: object) -> T:
        return self._meaning(page._words[self._word])


class AgentPage(_Page):
    """The agent's end.

    Attributes:
        begun: whether the rank has come to the task's function: to its inputs.
        entered: whether the rank has its inputs, and has entered the function itself.
        wants_fresh: whether the rank has found that it must not be forked.
        asked: how often the rank has asked for a save.
        left: whether the rank has come back from the task's function, and has left what it returned.
        debugs: whether a person is asked in the rank's debugger: no deadline of the agent's counts then.
        runs_script: whether the rank runs a script, whose end with status 0 is its success, however it comes to that.
        steps_to_come: how many steps the rank will have ended in all, as it says; 0 where it does not.
    """

    begun = _Told(_BEGUN, bool)
    entered = _Told(_BEGUN, lambda come_to: come_to > 1)
    wants_fresh = _Told(_FRESH, bool)
    asked = _Told(_ASKED, int)
    left = _Told(_LEFT, bool)
    debugs = _Told(_DEBUGS, lambda changes: bool(changes & 1))
    runs_script = _Told(_SCRIPT, bool)
    steps_to_come = _Told(_OF, int)

    @property
    def record(self) -> str | None:
        """How the rank ended, as it says; None while it has not, and where it was killed before it had said all."""
        seal = self._words[_ENDED]
        record = bytes(self._record[: seal & 0xFFFFFFFF])
        return record.decode() if record and _seal(record) == seal else None

    def stays(self, seconds: float) -> None:
        """How long the rank's node stays at most when it is told to stop. Said once, before the rank starts."""
        self._words[_STAYS] = round(seconds * 1000)

    def leave(self) -> None:
        """The rank has ended well, and could not say so: see :meth:`RankPage.leave`."""
        self._words[_LEFT] = 1

    def preempt(self) -> None:
        """Tell the rank that a node of the job was told to stop."""
        self._words[_PREEMPTED] = 1

    def call(self, number: int) -> None:
        """From now on the rank stands still when it reaches a step, until this call is answered."""
        self._words[_CALL] = number

    def answer(self, number: int, step: int | None, *, urgent: bool, forced: bool = False) -> None:
        """Tell the rank at which step all save; None: there is nothing to agree on. And whether a node is to stop, or
        all save though that is not due."""
        bits = (_URGENT if urgent else 0) | (_FORCED if forced else 0) | (_NO_STEP if step is None else step)
        self._words[_ANSWER] = (number << _CALL_SHIFT) | bits

    @property
    def floor(self) -> int | None:
        """The earliest step at which the rank can still save; None while it takes no part."""
        floor = self._words[_FLOOR]
        return None if floor == 0 or self._words[_LEFT] else floor - 1

    @property
    def listens(self) -> bool:
        """Whether the rank would do something about a preemption: it saves by steps, or looks at the flag itself."""
        return bool(self._words[_LISTENS]) and not self._words[_LEFT]

    @property
    def waits(self) -> tuple[int, int, str]:
        """How many of Horovod's collectives the rank has begun to wait for, how many of these have ended, and what
        the latest is about; parts of two, where another begins meanwhile."""
        ended = int(self._words[_WAITED])  # first: what ends meanwhile is a wait that still goes on
        return int(self._words[_WAITS]), ended, bytes(self._awaited).rstrip(b"\0").decode(errors="replace")

    @property
    def steps(self) -> Steps:
        """How far the rank is, by the steps that it tells or saves by."""
        words = self._words
        told, under_way = (int(words[_STEPS]), int(words[_FLOOR])), _under_way(words)
        return Steps(
            told,
            under_way,
            is_saving=bool(words[_SAVES]),
            is_writing=bool(words[_WRITES]),
            is_fetched_for=bool(words[_FETCHED_FOR]),
            is_over=bool(words[_BACK]) or 0 < words[_OF] <= under_way,
        )

    def finished(self, call: int, *, urgent: bool) -> bool:
        """Whether nothing more is to be expected of the rank for this call, which has been answered.

        Args:
            call: its number.
            urgent: as answered. Where no node is to stop, a rank that only looks at that has nothing to do.
        """
        words = self._words
        concerned = words[_LISTENS] if urgent else words[_FLOOR]
        return not concerned or bool(words[_LEFT]) or words[_FINISHED] >= call


class RankPage(_Page):
    """The rank's end. Steps are numbers from 0 that only grow; several threads may look, one takes steps.

    Attributes:
        preemption_seconds: ``Timeouts.preemption``: how long a node that is told to stop stays for its ranks to save.
        may_end_anywhere: whether the rank's task has no outputs, so that nothing is missing where its script ends the
            process.
    """

    preemption_seconds = _Told(_STAYS, lambda milliseconds: milliseconds / 1000)

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self._call = 0
        self._target = NOWHERE
        self._urgent = self._forced = False
        self._counting = threading.RLock()  # a signal's handler may save, too
        self.may_end_anywhere = False

    @property
    def preempted(self) -> bool:
        """Whether a node of the job was told to stop. Looking says that this rank cares: see :meth:`saved`."""
        words = self._words
        words[_LISTENS] = 1
        return words[_PREEMPTED] == 1

    @property
    def step(self) -> int:
        """The step that this rank is in, by what it tells or saves by; -1 where it does neither."""
        return _under_way(self._words)

    def progress(self, step: int, of: int) -> None:
        """The rank has come to the end of ``step``, of any number: the count of these words goes on in any case."""
        self._words[_OF] = of if 0 < of <= LATEST_STEP else 0
        words, under_way = self._words, step + 2
        is_count = 0 <= step <= LATEST_STEP and 0 <= words[_STEP] <= under_way
        words[_STEP] = under_way if is_count else _NO_COUNT
        words[_STEPS] += 1

    def saving(self, *, background: bool) -> AbstractContextManager[None]:
        """Inside, this rank saves or restores, or waits for that; or a thread of it does, and the rank goes on."""
        return self._counted(_WRITES if background else _SAVES)

    def fetched_for(self) -> AbstractContextManager[None]:
        """Inside, a thread of this rank waits for an input that another rank of its node downloads."""
        return self._counted(_FETCHED_FOR)

    @contextmanager
    def _counted(self, word: int) -> Iterator[None]:
        # Of several threads (two Checkpoints, each with one that writes) any may be the last to leave.
        with self._counting:
            self._words[word] += 1
        try:
            yield
        finally:
            with self._counting:
                self._words[word] -= 1

    def take_part(self, step: int) -> None:
        """This rank saves by steps, and ``step`` is the next one that :meth:`at` will be told."""
        if not 0 <= step <= LATEST_STEP:
            raise ValueError(f"a step is a number from 0 to {LATEST_STEP}, not {step}")
        self._words[_FLOOR] = step + 1
        self._words[_LISTENS] = 1

    def ask(self) -> None:
        """Ask for a save by all ranks, soon. Asked again before it has come to pass, or by several ranks: once."""
        self._words[_ASKED] += 1

    def at(self, step: int) -> AgreedSave | None:
        """Between two steps: whether all ranks save now, with ``step`` as the number of the next one.

        Args:
            step: from 0 to :data:`LATEST_STEP`; the same on each rank for the same state.
        """
        words = self._words
        words[_FLOOR] = step + 2  # first the floor, then the look: see the module's text
        if words[_CALL] != self._call:
            self._hear(words[_CALL])
        if step < self._target:
            return None
        self._target = NOWHERE
        return AgreedSave(self._call, self._urgent, self._forced)

    def finish(self, call: int) -> None:
        """Nothing more will come of this rank for a call: its save is committed, or has failed."""
        self._words[_FINISHED] = max(call, self._words[_FINISHED])

    def saved(self) -> None:
        """For who looks at :attr:`preempted`: all worth keeping is kept, and the node need not wait for this rank."""
        self._words[_LISTENS] = 1
        self._words[_FINISHED] = NOWHERE

    def wait_begins(self, about: str) -> None:
        """The rank is about to wait for a collective of Horovod's; what it is *about*."""
        self._awaited[:] = about.encode()[-_AWAITED_BYTES:].ljust(_AWAITED_BYTES, b"\0")
        self._words[_WAITS] += 1

    def wait_ends(self) -> None:
        """It has come to its end."""
        self._words[_WAITED] += 1

    def want_fresh(self) -> None:
        """The rank must not be forked, in no round: it starts again as a fresh interpreter."""
        self._words[_FRESH] = 1

    def begin(self) -> None:
        """The rank has come to the task's function: to its inputs."""
        self._words[_BEGUN] = 1

    def enter(self) -> None:
        """The rank enters the task's function."""
        self._words[_BEGUN] = 2

    def come_back(self) -> None:
        """The rank has come back from the task's function: it is in no step any more."""
        self._words[_BACK] = 1

    def end(self, record: str) -> None:
        """How the rank ended; of several the last. At most :data:`RECORD_BYTES` in UTF-8."""
        data = record.encode()
        self._words[_ENDED] = 0
        self._record[: len(data)] = data
        self._words[_ENDED] = _seal(data)  # last: a record that is cut short by SIGKILL is none

    def leave(self) -> None:
        """The rank's function has returned or raised: nobody need wait for this rank any more."""
        self._words[_LEFT] = 1

    def run_script(self, run: Callable[[], object]) -> None:
        """Run a script (:attr:`AgentPage.runs_script`)."""
        self._words[_SCRIPT] = int(self.may_end_anywhere)
        try:
            run()
        finally:
            self._words[_SCRIPT] = 0

    @contextmanager
    def debugging(self) -> Iterator[None]:
        """Inside, a person is asked in this rank's debugger."""
        self._words[_DEBUGS] += 1
        try:
            yield
        finally:
            self._words[_DEBUGS] += 1

    def stand_still(self) -> None:
        """After an urgent save: do nothing, so that nothing is lost, until the agent ends this rank for the next round.

        Bounded, for the case that the node which was told to stop is kept after all.
        """
        time.sleep(ANSWER_SECONDS)

    def _hear(self, call: int) -> None:
        """Stand still until the call is answered; then know the step."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while _call_of(self._words[_ANSWER]) < call:
            if time.monotonic() > deadline:
                self._call = call
                return
            time.sleep(_LOOK)
        answer = self._words[_ANSWER]
        step = answer & _STEP_MASK
        self._call, self._urgent, self._forced = _call_of(answer), bool(answer & _URGENT), bool(answer & _FORCED)
        self._target = NOWHERE if step == _NO_STEP else step
        if step == _NO_STEP:
            self.finish(self._call)
