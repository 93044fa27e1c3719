"""The stacks of a rank's threads: it writes them itself, into a file, when it gets a signal (faulthandler).

That needs neither ptrace nor the GIL, so it works in any pod, and while native code holds the interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import processes

SIGNAL = signal.SIGRTMAX - 3
"""Nobody else's: users and schedulers take SIGUSR1 and SIGUSR2, C libraries the first of the real-time signals."""

WRITE_SECONDS = 1.0
"""For a rank to write its stacks. It takes milliseconds; a process that is stopped never does."""

_LOOK = 0.05
_START = f'  File "{Path(__file__).parents[1] / "ranks" / "worker.py"}"'
_THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """A call in progress."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """As Python shows it."""
        return f'File "{self.file}", line {self.line} in {self.function}'

    @property
    def short(self) -> str:
        """For a sentence: ``loader.py:88 in read``."""
        return f"{Path(self.file).name}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""Of one thread, the innermost call first."""


def listen(path: Path) -> None:
    """In a rank: from now on, write all threads' stacks to a file at each :data:`SIGNAL`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=file, all_threads=True)


def ask(ranks: Mapping[int, tuple[int, Path]], send: Callable[[int], object]) -> dict[int, tuple[Stack, ...]]:
    """The threads of each rank that answers in :data:`WRITE_SECONDS`, the main thread first.

    Args:
        ranks: process id and file by rank.
        send: sends :data:`SIGNAL` to a process. It is called for those only that run and have a handler for it.
    """
    asked = {rank: at for rank, at in ranks.items() if processes.listens(at[0], SIGNAL)}
    before = {rank: _size(path) for rank, (_, path) in asked.items()}
    for pid, _ in asked.values():
        send(pid)
    sizes, deadline = dict(before), time.monotonic() + WRITE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK)
        now = {rank: _size(path) for rank, (_, path) in asked.items()}
        # All have written, and none has written more since: there is no mark at the end.
        if now == sizes and all(now[rank] > before[rank] for rank in asked):
            break
        sizes = now
    found = {rank: parse(_since(path, before[rank])) for rank, (_, path) in asked.items()}
    return {rank: threads for rank, threads in found.items() if threads}


def parse(text: str) -> tuple[Stack, ...]:
    """What faulthandler wrote: the main thread first, without safedist's own start of the rank."""
    threads = []
    for part in _THREAD.split(text)[1:]:
        frames = _FRAME.findall(part.partition(_START)[0])
        threads.append(tuple(Frame(file, int(line) if line.isdigit() else 0, name) for file, line, name in frames))
    # The oldest thread comes last. Two who asked at once have two answers in a row: this is of the later one.
    return tuple(reversed(threads))


def _size(path: Path) -> int:
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
