"""The ranks of one node in one round: whether they wait for too long, and what they do. Values go in and come out: who
they are said to, and what is done about it, is the agent's."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from ..config.options import Hangs
from . import processes, recorders, snapshot, stacks
from .evidence import text_of
from .recorders import Names, RankRecord
from .snapshot import Snapshot
from .stacks import Stack
from .waits import CALL, LEAST_SECONDS, Ages, Steps, Wait

logger = logging.getLogger(__name__)

_STILL_SECONDS = 5.0
"""Between two calls of :meth:`Watch.look`: this process stood still, and its ranks most likely as well."""

_MUTE_SECONDS = 300.0
"""For which a rank whose interpreter is held is not asked for its stack, but at a suspicion."""

_MESSAGES = ("send", "recv", "send_object_list", "recv_object_list", "monitored_barrier")
"""Calls that gloo makes of messages."""

Answers = tuple[dict[int, RankRecord], dict[int, Stack]]
"""Of ranks: what is known of their operations, and the main thread's stack."""

_FRAMES, _FRAMES_BESIDE = 40, 12
"""Of a rank's main thread, and of each other one, for who judges all of the job."""
_THREADS, _THREADS_OF_ALL = 8, 2048
"""Beside the main thread: of one rank, and of all ranks of the job, at most."""


@dataclass(frozen=True)
class LocalRank:
    """A rank that runs here, as its agent knows it.

    Attributes:
        rank, world_size: its place in the job.
        pid: its process.
        stacks, socket: where it leaves its stacks, and its torch answers.
        steps: how far it is.
        horovod: how many waits for Horovod it has begun, and ended, and what the latest is about.
        is_horovods: it runs under Horovod, whose own thread speaks to the others' a thousand times a second.
        debugged: a person is asked in its debugger.
        has_entered: it has entered the task's function.
    """

    rank: int
    world_size: int
    pid: int
    stacks: Path
    socket: Path
    steps: Steps
    horovod: tuple[int, int, str] = (0, 0, "")
    is_horovods: bool = False
    debugged: bool = False
    has_entered: bool = True


class Watch:
    """Over the ranks of one node in one round.

    Args:
        hangs: what the user wants to be done.
    """

    def __init__(self, hangs: Hangs) -> None:
        self._hangs = hangs
        self._ages = Ages(hangs.floor, hangs.ceiling, time.time())
        self._names: dict[int, Names] = {}
        self._marks: dict[object, tuple[object, float]] = {}
        self._unwatched: set[str] = set()
        self._mute: dict[int, float] = {}
        self._answers: SimpleQueue[Answers] = SimpleQueue()
        self._asks, self._took = False, 0.0
        self._real, self._ticks = time.time(), time.monotonic()
        self._next = time.monotonic() + LEAST_SECONDS

    def look(self, ranks: Sequence[LocalRank]) -> tuple[Wait, ...]:
        """Where it is time, ask how far the ranks are; the waits that have lasted for too long, as soon as the answers
        to that are there. To be called every few milliseconds; it does not wait."""
        self._keep_time()
        late: tuple[Wait, ...] = ()
        if not self._answers.empty():
            self._asks = False
            late = self._late(ranks, self._answers.get())
        if not self._asks and time.monotonic() >= self._next:
            sockets = {each.rank: each.socket for each in ranks}
            with contextlib.suppress(RuntimeError):  # the container may have no further thread: at the next look
                threading.Thread(target=self._ask, args=(sockets,), name="safedist-hangs", daemon=True).start()
                self._asks = True
        return late

    def is_urgent(self, late: Iterable[Wait]) -> bool:
        """Whether something is to be ended for these waits, by us or by a library; else they are only to be told."""
        return self._hangs.floor is not None or any(math.isfinite(wait.timeout) for wait in late)

    def snapshots(self, ranks: Sequence[LocalRank], send: Callable[[int, int], object]) -> list[Snapshot]:
        """What the ranks do right now, but for their GPUs; takes a second or two.

        Args:
            ranks: that run here.
            send: sends :data:`~.evidence.SIGNAL` to a process.
        """
        places = {each.rank: (each.pid, each.stacks) for each in ranks}
        taken = snapshot.take(places, send, is_chatty=any(each.is_horovods for each in ranks))
        awake = {each.rank for each in taken if each.process.state not in ("", "T", "Z")}
        records = recorders.read({each.rank: each.socket for each in ranks if each.rank in awake}, self._names)
        waits = self._waits(ranks, (records, {each.rank: each.stack for each in taken}))
        found = []
        for one, each in zip(sorted(ranks, key=lambda one: one.rank), taken, strict=True):
            record = records.get(one.rank, RankRecord())
            found.append(
                replace(
                    each,
                    threads=_cut(each.threads, one.world_size),
                    waits=tuple(wait for wait in waits if wait.rank == one.rank),
                    begun=record.begun,
                    latest=tuple(record.latest),
                    is_whole=record.is_whole,
                    quiet=time.time() - self._marks[one.rank][1],
                    steps=one.steps,
                    debugged=one.debugged,
                    has_entered=one.has_entered,
                )
            )
        return found

    # --- how long ----------------------------------------------------------------------------------------------------
    def _keep_time(self) -> None:
        real, ticks = time.time(), time.monotonic()
        gone = (real - self._real) - min(ticks - self._ticks, _STILL_SECONDS)
        if abs(gone) > 1:
            self._ages.shift(self._real, gone)
        self._real, self._ticks = real, ticks

    def _ask(self, sockets: Mapping[int, Path]) -> None:
        began = time.monotonic()
        answers: Answers = ({}, {})
        records, main = answers
        try:
            records.update(recorders.read(sockets, self._names))
            for rank in sorted(records):
                if time.monotonic() < self._mute.get(rank, 0.0):
                    continue
                stack = recorders.stack(sockets[rank])
                if stack is None:
                    self._mute[rank] = time.monotonic() + _MUTE_SECONDS
                else:
                    main[rank] = stack
        finally:  # whatever fails here: at the next look
            self._took = time.monotonic() - began
            self._answers.put(answers)

    def _late(self, ranks: Sequence[LocalRank], answers: Answers) -> tuple[Wait, ...]:
        waits = self._waits(ranks, answers)
        timeout = min((record.timeout for record in answers[0].values()), default=math.inf)
        self._next = time.monotonic() + self._ages.next_look(waits, timeout, self._took, time.time())
        return tuple(wait for wait in waits if wait.is_late)

    def _waits(self, ranks: Sequence[LocalRank], answers: Answers) -> list[Wait]:
        """What recorders say of each rank, Horovod's in the place of torch's where it has waited for any, what its
        stack shows, and its step."""
        records, main = answers
        waits: list[Wait] = []
        for each in ranks:
            stack = main.get(each.rank, ())
            if each.horovod[0]:
                records[each.rank] = recorders.of_horovod(each.rank, each.world_size, each.horovod, stack)
            record = records.get(each.rank)
            marks = (record.count if record is not None else 0, each.steps.told, each.horovod[:2])
            call = self._call(each, record, stack, self._since(each.rank, marks))
            recorded = record.waits.values() if record is not None else ()
            waits += [*recorded, *filter(None, (call, each.steps.wait(each.rank)))]
        unwatched = {name for record in records.values() for name in record.unwatched} - self._unwatched
        for backend in sorted(unwatched):
            logger.warning(f"hangs in collectives of {backend} are not found: this torch does not record them")
        self._unwatched |= unwatched
        running = {each.rank for each in ranks}
        return self._ages.see(waits, running, running - records.keys(), time.time())

    def _call(self, one: LocalRank, record: RankRecord | None, stack: Stack, quiet_since: float) -> Wait | None:
        """A call of torch's that a rank stands in, and that nothing records; since the first look that has shown it, if
        nothing of the rank has changed. Where operations are not recorded, nobody knows whether it goes on."""
        operation = stacks.torchs(stack)
        if not operation or record is None or record.waits or record.unwatched:
            self._marks.pop((CALL, one.rank), None)
            return None
        # Messages of gloo's are in no record: whoever takes one after the other has been woken for each. What waits for
        # a communicator of NCCL's wakes by itself.
        is_woken = operation in _MESSAGES and "gloo" in record.backends
        marks = stack, quiet_since, processes.woken(one.pid) if is_woken else 0
        since = self._since((CALL, one.rank), marks)
        return Wait(one.rank, "", text_of(range(one.world_size)), operation, 0, since, CALL)

    def _since(self, what: object, marks: object) -> float:
        """Since when these marks have been the same, as far as looks have shown."""
        if what not in self._marks or self._marks[what][0] != marks:
            self._marks[what] = marks, time.time()
        return self._marks[what][1]


def _cut(threads: Sequence[Stack], world_size: int) -> tuple[Stack, ...]:
    beside = threads[1 : 1 + min(_THREADS, _THREADS_OF_ALL // world_size)]
    return (*(stack[:_FRAMES] for stack in threads[:1]), *(stack[:_FRAMES_BESIDE] for stack in beside))
