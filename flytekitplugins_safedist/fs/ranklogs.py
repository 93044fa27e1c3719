"""Append-only logs, one file per rank, that merge into one: no rank waits for another, no line is ever torn apart.

Appending to one shared file is not safe on network file systems: NFS has no atomic append (open(2), O_APPEND).
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..errors import FsError
from .calls import explain, retry_os_call
from .context import current_identity
from .dirs import ensure_dir, listed


@dataclass(frozen=True)
class Entry:
    """One line of a merged log. ``time_ns``: nanoseconds since 1970, by the writing host's clock."""

    time_ns: int
    rank: int
    number: int
    value: Any


class RankLog:
    """This rank's log in ``directory``; thread-safe; a context manager.

    Args:
        directory: shared or not; made if it is not there. Files of several runs may lie in it together.
        rank: whose; without it the caller's.
        durable: fsync after every line.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int | None = None, durable: bool = False) -> None:
        self.rank = current_identity().rank if rank is None else rank
        # A new name for every process: two of them never write to one file, not even a rank and its successor.
        name = f"rank-{self.rank:05d}.{time.time_ns()}.{secrets.token_hex(4)}.jsonl"
        self.path = ensure_dir(directory) / name
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._handle = retry_os_call(lambda: os.open(self.path, flags, 0o666), self.path, "open the log")
        self._durable = durable
        self._lock = threading.Lock()
        self._number = 0

    def append(self, value: Any) -> None:
        """Append a value that JSON can say.

        Raises:
            FsError: it cannot be said, or not be written (NoSpaceError, …).
        """
        with self._lock:
            entry = {"t": time.time_ns(), "r": self.rank, "n": self._number, "v": value}
            try:
                line = json.dumps(entry).encode() + b"\n"  # JSON escapes newlines: one entry, one line
            except (TypeError, ValueError) as error:
                raise FsError("this value cannot be logged", seen=str(error), expected="what JSON can hold") from error
            self._number += 1
            try:
                written = os.write(self._handle, line)
                if written < len(line):  # the disk has just become full: end the line, so that the next is its own
                    os.write(self._handle, b"\n")
                if self._durable:
                    os.fsync(self._handle)
            except OSError as error:
                raise explain(error, self.path, "append to the log") from error
            if written < len(line):
                raise explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.path, "append to the log")

    def close(self) -> None:
        """Close the file; a second call does nothing.

        Raises:
            FsError: a network file system says only now that lines could not be written.
        """
        with self._lock:
            if self._handle >= 0:
                handle, self._handle = self._handle, -1
                try:
                    os.close(handle)
                except OSError as error:
                    raise explain(error, self.path, "close the log") from error

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


def merge_logs(directory: str | os.PathLike[str]) -> Iterator[Entry]:
    """The entries of all ranks' logs in ``directory``, ordered by time, then rank, then number.

    A rank's own entries keep their order even if its clock was set back. Lines cut off by a crash or a full disk are
    left out. Holds one line per file in memory.

    Raises:
        FsError: the subclass that fits, if the directory or a log cannot be read.
    """
    names = (entry.path for entry in listed(Path(directory)))
    files = [name for name in names if name.match("rank-*.jsonl")]
    yield from heapq.merge(*map(_entries, files), key=lambda entry: (entry.time_ns, entry.rank, entry.number))


def _entries(path: Path) -> Iterator[Entry]:
    latest = 0
    with retry_os_call(lambda: path.open(encoding="utf-8", errors="replace"), path, "open the log") as file:
        while line := _line(file, path):
            try:
                values = json.loads(line)
                latest = max(latest, int(values["t"]))
                entry = Entry(latest, int(values["r"]), int(values["n"]), values["v"])
            except (ValueError, KeyError, TypeError):
                continue
            yield entry


def _line(file: IO[str], path: Path) -> str:
    try:
        return file.readline()
    except OSError as error:
        raise explain(error, path, "read the log") from error
