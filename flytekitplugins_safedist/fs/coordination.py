"""The small store in which ranks leave each other notes: who does the work, how it ended, who has arrived.

An interface with three implementations: memory (the threads of one process), files (``file_coordination``), and torch's
stores (``torch_coordination``). Values are short texts; nothing is ever unpickled.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import Protocol


class CoordinationStore(Protocol):
    """What ``once_*``, ``barrier``, ``shared_scope`` and ``publish`` stand on. Thread-safe.

    ``within`` is the longest that a call may take, in seconds. A store that does not answer raises FsTimeoutError, and
    one that is gone FsIoError.
    """

    where: str
    """For messages: "the torch store at 10.0.0.1:29500"."""
    lease_s: float
    """Seconds without a sign of life after which a worker that nobody here can judge counts as lost."""
    held_by_rank_0: bool
    """Whether it may be gone as soon as rank 0's process has ended."""

    def get(self, key: str, *, within: float = 30.0) -> str | None:
        """The note under ``key``, or None."""

    def put(self, key: str, text: str, *, within: float = 30.0) -> None:
        """Leave or replace a note. One writer per key."""

    def put_once(self, key: str, text: str, *, within: float = 30.0) -> str:
        """Leave a note if there is none; return the one that is there: the first wins, for every caller the same."""

    def wait(self, key: str, seconds: float) -> str | None:
        """The note under ``key``, as soon as it is there; None after ``seconds``, or a little earlier."""

    def arrive(self, key: str, member: int, *, within: float = 30.0) -> int:
        """Count ``member`` in under ``key`` (again changes nothing); return how many have come."""

    def count(self, key: str, *, within: float = 30.0) -> int:
        """How many have come."""

    def members(self, key: str, candidates: Iterable[int], *, within: float = 30.0) -> set[int]:
        """Which of ``candidates`` have come."""

    def forget(self, key: str, member: int) -> None:
        """``member`` will not ask for ``key`` and what is below it again; when all have said so, it may be gone."""

    def clear(self, key: str, ranks: int) -> None:
        """Nobody will ask for ``key`` and what ``ranks`` ranks have left below it again: it goes."""


class MemoryCoordinationStore:
    """For a job of one process: its threads are the callers."""

    where = "this process's memory"
    lease_s = math.inf
    held_by_rank_0 = False

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._notes: dict[str, str] = {}
        self._came: dict[str, set[int]] = {}

    def get(self, key: str, *, within: float = 30.0) -> str | None:
        with self._changed:
            return self._notes.get(key)

    def put(self, key: str, text: str, *, within: float = 30.0) -> None:
        with self._changed:
            self._notes[key] = text
            self._changed.notify_all()

    def put_once(self, key: str, text: str, *, within: float = 30.0) -> str:
        with self._changed:
            winner = self._notes.setdefault(key, text)
            self._changed.notify_all()
            return winner

    def wait(self, key: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while key not in self._notes and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            return self._notes.get(key)

    def arrive(self, key: str, member: int, *, within: float = 30.0) -> int:
        with self._changed:
            self._came.setdefault(key, set()).add(member)
            return len(self._came[key])

    def count(self, key: str, *, within: float = 30.0) -> int:
        with self._changed:
            return len(self._came.get(key, ()))

    def members(self, key: str, candidates: Iterable[int], *, within: float = 30.0) -> set[int]:
        with self._changed:
            return self._came.get(key, set()) & set(candidates)

    def forget(self, key: str, member: int) -> None:
        self.clear(key, 1)

    def clear(self, key: str, ranks: int) -> None:
        with self._changed:
            for kept in (self._came, self._notes):
                for name in [name for name in kept if name == key or name.startswith(key + "/")]:
                    del kept[name]
