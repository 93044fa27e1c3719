"""Ranks' output, live in the node's log: whole lines, each with its rank.

Ranks write to files (so a rank never blocks on a slow reader, and its last words survive it); one thread here follows
all of them and passes on every complete line of the ranks that are to be shown.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.1
_MAX_LINE = 64 * 1024
_TAIL_BYTES = 256 * 1024


@dataclass
class _Followed:
    path: Path
    prefix: str
    offset: int = 0
    partial: bytes = b""


class LogFollower:
    """Follows the log files of one round; the last lines are passed on before ``stop`` returns."""

    def __init__(self, logs: Sequence[tuple[str, Path]], write: Callable[[str], object]) -> None:
        """
        Args:
            logs: prefix and file of each rank to show.
            write: takes one block of text made of whole lines.
        """
        self._files = [_Followed(path, prefix) for prefix, path in logs]
        self._write = write
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safedist rank logs", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Pass on what is left, half lines included, and end."""
        self._stop.set()
        if self._thread.ident is not None:  # never started: ranks that could not be started are torn down as well
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._drain()
        self._drain()
        for followed in self._files:
            if followed.partial:
                self._write(self._shown(followed, followed.partial))

    def _drain(self) -> None:
        for followed in self._files:
            text = b"".join(_read_new(followed))
            if not text:
                continue
            *lines, followed.partial = (followed.partial + text).split(b"\n")
            if len(followed.partial) > _MAX_LINE:
                lines.append(followed.partial)
                followed.partial = b""
            if lines:
                self._write("".join(self._shown(followed, line) for line in lines))

    @staticmethod
    def _shown(followed: _Followed, line: bytes) -> str:
        return f"{followed.prefix}{printable(line)}\n"


def _read_new(followed: _Followed) -> list[bytes]:
    try:
        with followed.path.open("rb") as file:
            file.seek(followed.offset)
            data = file.read()
    except FileNotFoundError:
        return []
    followed.offset += len(data)
    return [data]


def printable(line: bytes) -> str:
    """A line as a person at a terminal would see it in the end: progress bars overwrite themselves with ``\\r``."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")


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
