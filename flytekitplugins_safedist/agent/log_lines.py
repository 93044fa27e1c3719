"""Ranks' output, live in the node's log: whole lines, each with its rank.

Ranks write to files (so a rank never blocks on a slow reader, and its last words survive it); one thread here follows
all of them and passes on every complete line of the ranks that are to be shown, and at times how far a progress
bar is, which overwrites itself with ``\\r`` and is a line only in the end. What is passed on, or not to be shown, and
not among a file's last bytes any more, goes back to the disk: the file becomes a hole there, and a rank that prints for
weeks does not fill the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from ..config.options import Logs
from ..rank.context import RankContext
from ..rank.order import RankOrder

POLL_SECONDS = 0.1
BAR_SECONDS = 5.0
"""Between two looks at a progress bar. Of one rank, the node's first that is shown: they all go the same way."""

_MAX_LINE = 64 * 1024
_TAIL_BYTES = 256 * 1024
_BLOCK = 256 * 1024
"""Bytes of one file that are in memory at a time, however much a rank has printed."""

KEPT_BYTES = 16 << 20
"""The end of each rank's log that stays on disk, for the error's last lines and for whoever keeps scratch."""

_FREED_AT_ONCE = 4 << 20
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h

_CURSOR = re.compile(rb"\x1b\[[0-9;]*[A-HJKf]")
"""What moves a terminal's cursor or clears a line."""

_NATIVE_FRAME = re.compile(r"frame #\d+: ")
"""Of the stack that torch adds to the text of an exception of C++."""

DRAIN_SECONDS = 60.0
"""How long ranks' output may go on being passed on when they have ended: a reader that has stopped must not keep the
agent from reporting how they did."""


@dataclass
class _Followed:
    path: Path
    prefix: str | None
    """None: not shown."""
    offset: int = 0
    """Bytes read."""
    passed: int = 0
    """Bytes passed on, or not to be."""
    freed: int = 0
    """Bytes given back to the disk."""
    untaken: int = 0
    """Bytes of blocks that nobody took."""
    partial: bytes = b""
    bar_due: float | None = None
    """When the half line is shown, for it overwrites itself; None: it is an ordinary one."""
    bar: bytes = b""
    """How it was shown last."""


def to_stdout(text: str) -> None:
    """Ranks' output goes where the task's own would."""
    _write(sys.stdout, text)


def to_stderr(text: str) -> None:
    """The same of standard error, where that is apart."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    # A user's module may have put an object in its place that has no more than a write().
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # A log in ASCII shows other letters escaped; they must not end the thread that shows them.
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    with contextlib.suppress(AttributeError):
        stream.flush()


class LogFollower:
    """Follows the log files of one round; the last lines are passed on before ``stop`` returns."""

    def __init__(
        self,
        logs: Sequence[tuple[str | None, Path]],
        write: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            logs: prefix and file of each rank; None in place of the prefix of a rank that is not shown.
            write: takes one block of text made of whole lines.
            clock: tells seconds.
        """
        self._files = [_Followed(path, prefix) for prefix, path in logs]
        self._bars_of = next((followed for followed in self._files if followed.prefix is not None), None)
        self._write = write
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safedist rank logs", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self, within: float = DRAIN_SECONDS) -> int:
        """Pass on what is left, half lines included, and end.

        Args:
            within: seconds; whoever takes the output may have stopped reading.

        Returns:
            How many bytes were not passed on.
        """
        self._stop.set()
        if self._thread.ident is not None:  # never started: ranks that could not be started are torn down as well
            self._thread.join(within)
        shown = [followed for followed in self._files if followed.prefix is not None]
        return sum(max(0, _size(followed.path) - followed.passed) + followed.untaken for followed in shown)

    def _run(self) -> None:
        more = False
        while more or not self._stop.wait(POLL_SECONDS):
            more = self._pass_on_blocks()
        while self._pass_on_blocks():
            pass
        for followed in self._files:
            if followed.partial and self._is_taken(self._shown(followed, followed.partial)):
                followed.passed = followed.offset

    def _is_taken(self, text: str) -> bool:
        """Whether the node's log takes a text. Where nobody reads it any more (EPIPE), or it is full for now, the next
        ones are tried all the same: what a rank prints is to go back to the disk."""
        try:
            self._write(text)
        except Exception:  # of whatever stands in the place of standard output: stop() tells what was not shown
            return False
        return True

    def _pass_on_blocks(self) -> bool:
        """At most one block of each file, so that no rank's flood holds up another's lines; whether there was one."""
        return sum(map(self._pass_on_block, self._files)) > 0  # any() would stop early

    def _pass_on_block(self, followed: _Followed) -> bool:
        if followed.prefix is None:
            followed.passed = _size(followed.path)
            _free(followed)
            return False
        text = _read_block(followed)
        *lines, followed.partial = (followed.partial + text).split(b"\n")
        if lines:
            followed.bar_due = None
        bar = self._bar(followed)
        if len(followed.partial) > _MAX_LINE:
            lines.append(followed.partial)
            followed.partial = b""
        shown = [self._shown(followed, line) for line in [*lines, *bar] if not _is_of_bars(line)]
        if shown and not self._is_taken("".join(shown)):
            followed.untaken += len(text)
        followed.passed = followed.offset - len(followed.partial)
        _free(followed)
        return bool(text)

    def _bar(self, followed: _Followed) -> list[bytes]:
        """Where a progress bar is now, if it is time to show it. What it has overwritten is forgotten."""
        if b"\r" in followed.partial:
            overwritten = followed.partial.rstrip(b"\r").rfind(b"\r") + 1
            followed.partial = followed.partial[overwritten:]
            if followed.bar_due is None:
                followed.bar_due = self._clock() + BAR_SECONDS
        if followed is not self._bars_of or followed.bar_due is None or self._clock() < followed.bar_due:
            return []
        followed.bar_due = self._clock() + BAR_SECONDS
        before, followed.bar = followed.bar, followed.partial
        return [followed.bar] if followed.bar.strip() and followed.bar != before else []

    @staticmethod
    def _shown(followed: _Followed, line: bytes) -> str:
        return f"{followed.prefix}{printable(line)}\n"


def followers(orders: Sequence[RankOrder], logs: Logs, show: Callable[[str], object]) -> list[LogFollower]:
    """Of all ranks' logs, whose lines *show* takes; and of their standard errors, where these are apart."""
    named = [(_prefix(order.context, logs), order) for order in orders]
    errors = [(prefix, order.errors) for prefix, order in named if order.errors is not None]
    found = [LogFollower([(prefix, order.log) for prefix, order in named], show)]
    return [*found, LogFollower(errors, to_stderr)] if errors else found


def _prefix(at: RankContext, logs: Logs) -> str | None:
    if logs.show is not None and at.rank not in logs.show:
        return None
    return logs.prefix.format(rank=at.rank, local_rank=at.local_rank, node_rank=at.node_rank)


def _read_block(followed: _Followed) -> bytes:
    try:
        with followed.path.open("rb", buffering=0) as file:
            file.seek(followed.offset)
            data = file.read(_BLOCK) or b""
    except OSError:  # it is not there yet; or there are no descriptors left, for a moment
        return b""
    followed.offset += len(data)
    return data


def _free(followed: _Followed) -> None:
    """Give back to the disk what is passed on and not to be kept.

    A hole, and not a new file or a cut one: ranks and all that they started hold this very file open, and a byte that
    is written between a look and a cut would be lost. Whoever reads the file finds zeros there.
    """
    until = followed.passed - KEPT_BYTES
    if until - followed.freed >= _FREED_AT_ONCE:
        # Where the file system has no holes (NFS before 4.2), the log stays whole, and counts in the ranks' limit.
        _punch_hole(followed.path, followed.freed, until)
        followed.freed = until


def _punch_hole(path: Path, start: int, end: int) -> None:
    fallocate = ctypes.CDLL(None).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fallocate(file.fileno(), _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, end - start)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_of_bars(line: bytes) -> bool:
    """Whether a line is only there to move the cursor."""
    return b"\x1b[" in line and not printable(line).strip()


def printable(line: bytes) -> str:
    """A line as a person at a terminal would see it in the end: progress bars overwrite themselves with ``\\r``, and
    nested ones move the cursor up and down, which a log has not."""
    return _CURSOR.sub(b"", line.rstrip(b"\r").rsplit(b"\r", 1)[-1]).decode("utf-8", "replace")


def tail(path: Path, lines: int) -> tuple[str, ...]:
    """The last ``lines`` lines of a log file; nothing if it cannot be read.

    A rank prints its traceback last; the tail is for what it logged before, so callers cut that off.
    """
    if lines <= 0:
        return ()
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return ()
    # Lines as the log shows them: bytes.splitlines would make one of every step of a progress bar.
    return tuple(printable(line) for line in data.removesuffix(b"\n").split(b"\n")[-lines:]) if data else ()


def without_traceback(lines: Sequence[str], traceback: str) -> tuple[str, ...]:
    """``lines`` without the ``traceback`` at their end: an error shows it once."""
    # As a rank prints it (rank.py) and as tail() reads it back.
    end = [printable(line.encode(errors="backslashreplace")) for line in traceback.rstrip().split("\n")]
    if traceback and list(lines[-len(end) :]) == end:
        return tuple(lines[: -len(end)])
    return tuple(lines)


def last_words(lines: Sequence[str], wanted: int) -> tuple[str, ...]:
    """The last ``wanted`` lines, one or more, of a process that crashed: of the stacks that faulthandler and torch
    write then, no more than where the thread that crashed was. They are long, and what says why (the text of a C++
    exception, an assertion) stands before them."""
    marks = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    before, stacks = (lines[: marks[-1] + 1], lines[marks[-1] + 1 :]) if marks else (lines, ())
    current = next((at for at, line in enumerate(stacks) if line.startswith("Current thread 0x")), len(stacks))
    frames = tuple(takewhile(lambda line: line.startswith("  "), stacks[current + 1 :]))[: wanted // 2]
    said = [line for line in before if not _NATIVE_FRAME.match(line)]
    return (*said[len(frames) - wanted :], *frames)
