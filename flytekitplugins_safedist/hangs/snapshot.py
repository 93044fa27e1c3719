"""What the ranks of one node do right now: looked at several times, each as one value."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import processes, stacks
from .gpus import GpuFault, GpuUse
from .processes import Process
from .stacks import Stack
from .waits import CALL, STEP, Steps, Wait

SAMPLES = 3
PAUSE_SECONDS = 0.4
"""Between two looks: who moves is elsewhere by then, or has used the CPU."""

_MOVED_BYTES = 16 * 1024
"""A second, that a rank reads or writes if it does so at all: libraries ask a group's store for a few each second."""

_ASKED_BYTES = 2048
"""Of one connection while ranks are looked at, that may be such questions: rank 0, which has the store, has all."""

_FILE = r"/orders/round-\d+-rank-\d+\.stacks$"
_BETWEEN = re.compile("/torch/(autograd/|distributed/|nn/|optim/|utils/|_)")
"""What calls a collective on behalf of the user: no place to look for a mistake. Who does, is the innermost call that
is neither this nor a library's, as far as one can tell."""

Places = Mapping[int, tuple[int, Path]]
"""By rank: its process, and the file that it writes its stacks to."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank does at one moment.

    Attributes:
        rank: of the job.
        process: what the kernel says of it.
        threads: their stacks, the main thread's first; () where the rank has not answered.
        cpu: cores that it used meanwhile, with all that it has started.
        moved: its main thread was in different calls within the short time that it was looked at.
        data: bytes a second that it reads and writes, with all that it has started.
        stays: the state of its process, where that was the same at the first look and at the last; "" else.
        waits: the first operation of each group that has not ended; one that its stack shows, where nothing records it;
            and its step.
        begun, latest, is_whole: of its operations, as in :class:`.recorders.RankRecord`.
        quiet: seconds since it has begun an operation, or ended a step, as far as looks have shown.
        steps: how far it is, by the steps that it tells.
        holds_gil: native code in it holds Python's lock.
        returned: it has left the task's function, successfully.
        debugged: a person is asked in its debugger.
        has_entered: it has entered the task's function. What comes before (imports, inputs) has limits of its own.
        handles: the exception that the main thread handles: its class, and what it says; "" for none.
        gpus, faults: its own ones, and what they have reported.
    """

    rank: int
    process: Process
    threads: tuple[Stack, ...] = ()
    cpu: float = 0.0
    moved: bool = False
    data: int = 0
    stays: str = ""
    waits: tuple[Wait, ...] = ()
    begun: dict[str, int] = field(default_factory=dict)
    latest: tuple[tuple[str, int, str], ...] = ()
    is_whole: bool = False
    quiet: float = 0.0
    steps: Steps = field(default_factory=Steps)
    holds_gil: bool = False
    returned: bool = False
    debugged: bool = False
    has_entered: bool = True
    handles: str = ""
    gpus: tuple[GpuUse, ...] = ()
    faults: tuple[GpuFault, ...] = ()

    @property
    def stack(self) -> Stack:
        """The main thread's."""
        return self.threads[0] if self.threads else ()

    @property
    def recorded(self) -> tuple[Wait, ...]:
        """Those of its waits that a library has recorded."""
        return tuple(wait for wait in self.waits if wait.source not in (CALL, STEP))

    @property
    def waits_in(self) -> str:
        """The operation with other ranks that its main thread is in, by Python's frames; "" where it is in none."""
        return stacks.collective(self.stack)

    @property
    def works(self) -> str:
        """What it does beside computing: a verb; "" for nothing that one sees."""
        if not self.has_entered:
            return "is not in the task's function yet"
        if self.steps.is_saving or self.steps.is_writing:
            return "saves or restores a checkpoint"
        if self.steps.is_fetched_for:
            return "waits for an input that another rank of its node downloads"
        if self.moved:
            return "moves"
        return f"reads or writes ({self.data / 1e6:.1f} MB a second)" if self.data >= _MOVED_BYTES else ""

    @property
    def where(self) -> str:
        """One phrase: ``in all_reduce, called at train.py:33 in step``, ``at loader.py:88 in read``; where that is a
        library's with the user's line: ``at selectors.py:415 in select, called at train.py:12 in main``."""
        if self.returned:
            return "after the end of the task's function"
        if not self.process.state and not self.threads:
            return "nowhere: its process has ended"
        if not self.threads:
            return f"{self.process}; it has not answered"
        if not self.stack:
            return "where nobody knows: its main thread is not among the hundred whose stacks Python shows"
        handles = f" as it handles {self.handles}" if self.handles else ""
        if not self.waits_in:
            at, users = self.stack[0].short, stacks.led_by(self.stack)
            return f"at {at}" + (f", called at {users}" if users != at else "") + handles
        outside = (frame for frame in self.stack if not (stacks.is_librarys(frame) or frame.matches(_BETWEEN)))
        caller = next(outside, None)
        return f"in {self.waits_in}" + (f", called at {caller.short}" if caller is not None else "") + handles


def take(ranks: Places, send: Callable[[int, int], object], *, is_chatty: bool = False) -> list[Snapshot]:
    """Look at ranks, :data:`SAMPLES` times.

    Args:
        ranks: to be looked at.
        send: sends a process a signal, as :func:`.stacks.ask` has it.
        is_chatty: a library of theirs exchanges messages all the time: the network's bytes say nothing.
    """
    pids = [pid for pid, _ in ranks.values()]
    began, first = time.monotonic(), processes.look(pids)
    answers = {rank: [stacks.Threads()] for rank in ranks}
    before = {rank: stacks.size(path) for rank, (_, path) in ranks.items()}
    for number in range(SAMPLES):
        if number:
            time.sleep(PAUSE_SECONDS)
        for rank, answer in stacks.ask(ranks, send).items():
            answers[rank].append(answer)
    last, took = processes.look(pids), time.monotonic() - began
    found = []
    for rank, (pid, path) in sorted(ranks.items()):
        earlier, process, latest = first[pid], last[pid], answers[rank][-1]
        grown = max(0, stacks.size(path) - before[rank])
        found.append(
            Snapshot(
                rank=rank,
                process=replace(process, data=0, stored=0, received={}),
                threads=tuple(latest),
                handles=latest.handles,
                holds_gil=latest.by_force,
                cpu=max(0.0, process.cpu - earlier.cpu) / took,
                moved=len({_way(answer[0]) for answer in answers[rank] if answer}) > 1,
                data=round(_moved(earlier, process, grown, is_chatty=is_chatty) / took),
                stays=process.state if process.state == earlier.state else "",
            )
        )
    return found


def running_below(root: Path) -> dict[Path, Places]:
    """The ranks that run on this machine, or in this container, found by the files that they have open; by the scratch
    directory of their job.

    Args:
        root: only jobs whose scratch directory lies below.
    """
    found: dict[Path, dict[int, tuple[int, Path]]] = {}
    for path, pid in processes.holding(_FILE).items():
        if root in path.parents:
            found.setdefault(path.parents[1], {})[int(path.stem.rpartition("-")[2])] = (pid, path)
    return dict(found)


def by_ourselves(pid: int, number: int) -> None:
    """Send a signal from this process."""
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def _moved(first: Process, last: Process, stacks_grown: int, *, is_chatty: bool) -> int:
    """Bytes, but for those of its stacks. Of what is mapped, or is read in one long call, only the disk knows."""
    stored = max(0, last.stored - first.stored - stacks_grown)
    if is_chatty:
        return stored
    network = [max(0, count - first.received.get(each, 0)) for each, count in last.received.items()]
    asked = sum(each for each in network if each <= _ASKED_BYTES)  # which may be in the data, too
    return max(stored, last.data - first.data - stacks_grown - asked) + sum(network) - asked


def _way(stack: Stack) -> tuple[object, ...]:
    """What stays the same while one call goes on: the calls, and the lines of all but the innermost."""
    return (*((frame.file, frame.function) for frame in stack[:1]), *stack[1:])
