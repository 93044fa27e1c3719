"""The stacks of a rank's threads: it writes them itself, into a file, when it gets a signal.

That needs no ptrace, so it works in any pod; and not Python's lock, so it works while native code holds that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from . import processes
from .evidence import ASK, FORCE, HANDLES, START

WRITE_SECONDS = 1.0
"""For a rank to write its stacks. It takes milliseconds; a process that is stopped never does."""

_WAKES = 20
"""Python's lock is asked for every 5 ms by whoever waits for it, and whoever runs Python gives it away then: who has
asked as often has seen native code hold it, and no frame changes meanwhile."""

_LOOK = 0.05
_MOST_BYTES = 1 << 20
"""Of a rank's file, which grows with each look."""

_MOST_THREADS = 100
"""That faulthandler shows, the newest first."""

_START = re.compile(rf'  File "{re.escape(str(START))}/(?:main|task)\.py"')
_THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """A call in progress."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """A line of a stack, as Python shows it."""
        return f'  File "{self.file}", line {self.line} in {self.function}'

    @property
    def short(self) -> str:
        """For a sentence: ``loader.py:88 in read``."""
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    def matches(self, calls: re.Pattern[str]) -> bool:
        """Whether its file and function are among these."""
        return calls.search(f"{self.file} {self.function}") is not None


Stack = tuple[Frame, ...]
"""Of one thread, the innermost call first."""


class Threads(tuple[Stack, ...]):
    """The stacks of a rank's threads, the main thread's first.

    Attributes:
        handles: the exception that the main thread handles: its class, and what it says; "" for none.
        by_force: native code in it holds Python's lock, so that it has answered :data:`~.evidence.FORCE` alone.
    """

    handles = ""
    by_force = False


_HANDLES = re.compile(rf"^{HANDLES}(.+)$", re.MULTILINE)

HOROVODS = re.compile(r"/horovod/(common|torch)/")
"""Horovod's own calls. A project may be in a directory of that name, too."""

_WAITS = re.compile(
    r"/torch/distributed/(distributed_c10d|rendezvous|c10d_logger|_functional_collectives)\.py "
    r"|/torch/distributed/utils\.py (_verify_param_shape_across_processes|_sync_(module_states|params_and_buffers))$"
    rf"|{HOROVODS.pattern}|/flytekitplugins_safedist/fs/"
)
"""Calls, as files and functions, that wait for other ranks. With those of utils.py DistributedDataParallel and FSDP
begin."""

_DOOR = "/torch/_ops.py"
"""The file through which Python calls what is registered with torch."""

_DEBUGGERS = re.compile(r"/pdb\.py interaction$|/pydevd\.py do_wait_suspend$")
"""Calls that ask a person."""

_OURS = "/flytekitplugins_safedist/"
_WRAPPERS = ("wrapper", "inner", "_call_impl", "<lambda>")


def collective(stack: Stack) -> str:
    """The operation with other ranks that a thread is in; "" where it is in none."""
    called = [frame for frame in takewhile(is_librarys, _before_the_door(stack)) if frame.matches(_WAITS)]
    names = [frame.function for frame in called if frame.function not in _WRAPPERS]
    return names[-1] if names else ""  # what the user has called says most


def torchs(stack: Stack) -> str:
    """The same of torch.distributed's own code alone."""
    inner = _before_the_door(stack)
    return collective(stack) if inner and "/torch/distributed/" in inner[0].file else ""


def _before_the_door(stack: Stack) -> Stack:
    return tuple(dropwhile(lambda frame: frame.file.endswith(_DOOR), stack))


def asks_a_person(threads: Iterable[Stack]) -> bool:
    """Whether one of them stands in a debugger of any make, which asks a person: pdb's descendants, and pydevd, by
    which editors look into a process from afar."""
    return any(frame.matches(_DEBUGGERS) for stack in threads for frame in stack)


def is_librarys(frame: Frame) -> bool:
    """Whether a call is of what waits for other ranks, or ours."""
    return frame.matches(_WAITS) or _OURS in frame.file


def ask(
    ranks: Mapping[int, tuple[int, Path]], send: Callable[[int, int], object], *, forces: bool = True
) -> dict[int, Threads]:
    """The threads of each rank that answers, the main thread first; within :data:`WRITE_SECONDS`, or twice that.

    Args:
        ranks: process id and file by rank.
        send: sends a process a signal: :data:`~.evidence.ASK`, or :data:`~.evidence.FORCE`. It is called for those
            only that run and have a handler.
        forces: ask those, too, in which native code holds Python's lock.
    """
    able = {rank: at for rank, at in ranks.items() if processes.listens(at[0], FORCE)}
    for _, path in able.values():
        if size(path) > _MOST_BYTES:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)
    before = {rank: size(path) for rank, (_, path) in able.items()}
    wakes = {rank: processes.wakes(pid, FORCE) for rank, (pid, _) in able.items()} if forces else {}
    silent = _silent(able, before, lambda pid: send(pid, ASK))
    stuck = [rank for rank in silent if forces and processes.wakes(able[rank][0], FORCE) - wakes[rank] >= _WAKES]
    _silent({rank: able[rank] for rank in stuck}, before, lambda pid: send(pid, FORCE))
    found = {rank: parse(_since(path, before[rank])) for rank, (_, path) in able.items()}
    for rank in stuck:
        found[rank].by_force = True
    return {rank: threads for rank, threads in found.items() if threads}


def _silent(
    asked: Mapping[int, tuple[int, Path]], before: Mapping[int, int], send: Callable[[int], object]
) -> list[int]:
    """Send a signal to ranks, and wait until their files have grown; those whose have not."""
    for pid, _ in asked.values():
        send(pid)
    sizes, deadline = {rank: before[rank] for rank in asked}, time.monotonic() + WRITE_SECONDS
    while asked and time.monotonic() < deadline:
        time.sleep(_LOOK)
        now = {rank: size(path) for rank, (_, path) in asked.items()}
        # All have written, and none has written more since: there is no mark at the end.
        if now == sizes and all(now[rank] > before[rank] for rank in asked):
            break
        sizes = now
    return [rank for rank, (_, path) in asked.items() if size(path) <= before[rank]]


def parse(text: str) -> Threads:
    """What a rank wrote: the main thread first, without safedist's own start of the rank; () in its place where
    it is not among the hundred that faulthandler shows.

    Two who ask at once have two answers in a row: this is of the later one.
    """
    threads: list[Stack] = []
    main = None
    for part in reversed(_THREAD.split(text)[1:]):  # the oldest thread comes last
        own, *start = _START.split(part, maxsplit=1)
        if start and main is not None:
            break
        threads.append(_frames(own))
        main = len(threads) - 1 if start else main
    if main is None and len(threads) >= _MOST_THREADS:
        return Threads(((), *threads))
    found = Threads((*threads[main or 0 : (main or 0) + 1], *threads[: main or 0], *threads[(main or 0) + 1 :]))
    found.handles = _HANDLES.findall(text)[-1] if _HANDLES.search(text) is not None else ""
    return found


def _frames(text: str) -> Stack:
    found = _FRAME.findall(text)
    return tuple(Frame(file, int(line) if line.isdigit() else 0, name) for file, line, name in found)


def crashed_at(text: str) -> str:
    """Where a process was as it crashed, by what faulthandler wrote into its log: the user's own line that led there,
    else the innermost; "" where it wrote nothing.

    Args:
        text: of its log.
    """
    _, mark, last = text.rpartition("Fatal Python error: ")
    _, _, current = last.partition("Current thread ") if mark else ("", "", "")
    return led_by(_frames(_THREAD.split(current)[0]))


def raised_at(error: BaseException) -> str:
    """Where an exception was raised, in the same words; "" where it was not."""
    trace = reversed(list(traceback.walk_tb(error.__traceback__)))
    return led_by(Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in trace)


def led_by(calls: Iterable[Frame]) -> str:
    """Of calls, the innermost first: the user's own line that led there, else the innermost; "" for none."""
    frames = list(calls)
    installed = ("/site-packages/", "/dist-packages/", _OURS, f"{sysconfig.get_path('stdlib')}/", "<frozen ")
    own = [frame for frame in frames if not any(part in frame.file for part in installed)]
    return next((frame.short for frame in (*own, *frames)), "")


def size(path: Path) -> int:
    """Of a rank's file, in bytes."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _since(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""
