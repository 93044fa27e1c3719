"""Coordination over a torch.distributed store: the agent's, a process group's, or one that Horovod's rank 0 opens.

torch is imported by whoever hands in the store. Each call runs on a thread that can be left behind: a call to a store
whose host is frozen (not dead) never returns, whatever timeout it was given.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import FsIoError, FsTimeoutError
from . import mount_info
from .waiting import brisk_pauses

T = TypeVar("T")

_GRACE_S = 1.0


class TorchCoordinationStore:
    """Args:
    store: a ``torch.distributed.Store``.
    where: its name, for messages.
    ranks: how many will ask it; sets the pace of polling.
    held_by_rank_0: whether rank 0's process serves it; False if an agent that outlives the ranks does.
    """

    lease_s = 60.0

    def __init__(self, store: Any, where: str, ranks: int = 1, *, held_by_rank_0: bool = True) -> None:
        self._store = store
        self.where = where
        self._ranks = ranks
        self.held_by_rank_0 = held_by_rank_0
        self._per_thread = threading.local()
        self._stuck = ""

    # --- notes -----------------------------------------------------------------------------------------------------
    def get(self, key: str, *, within: float = 30.0) -> str | None:
        return self._call(lambda store: _text(store.get(key)) if store.check([key]) else None, within)

    def put(self, key: str, text: str, *, within: float = 30.0) -> None:
        self._call(lambda store: store.set(key, text), within)

    def put_once(self, key: str, text: str, *, within: float = 30.0) -> str:
        # With "" expected, compare_set sets a key that is not there, and returns what is there afterwards.
        return self._call(lambda store: _text(store.compare_set(key, "", text)), within)

    def wait(self, key: str, seconds: float) -> str | None:
        # Polling, not store.wait: each of its time-outs prints two warnings, it holds the connection for all threads
        # meanwhile, and a thread left behind in it can abort the process at exit.
        deadline = time.monotonic() + seconds
        for pause in brisk_pauses(self._ranks):
            note = self.get(key)
            left = deadline - time.monotonic()
            if note is not None or left <= 0:
                return note
            time.sleep(min(pause, left))
        return None

    # --- arrivals --------------------------------------------------------------------------------------------------
    def arrive(self, key: str, member: int, *, within: float = 30.0) -> int:
        def arrive(store: Any) -> int:
            mine = f"{key}/came/{member}"
            first = not store.check([mine])
            store.set(mine, "1")
            return int(store.add(f"{key}/came", 1 if first else 0))

        return self._call(arrive, within)

    def count(self, key: str, *, within: float = 30.0) -> int:
        return self._call(lambda store: int(store.add(f"{key}/came", 0)), within)

    def members(self, key: str, candidates: Iterable[int], *, within: float = 30.0) -> set[int]:
        wanted = list(candidates)
        return self._call(lambda store: {rank for rank in wanted if store.check([f"{key}/came/{rank}"])}, within)

    def forget(self, key: str, member: int) -> None:
        gone = _of_member(key, member)
        if member == 0:
            gone += _of_all(key)
        self._call(lambda store: [store.delete_key(name) for name in gone], 30.0)

    def clear(self, key: str, ranks: int) -> None:
        gone = [*_of_all(key), *(name for rank in range(ranks) for name in _of_member(key, rank))]
        self._call(lambda store: [store.delete_key(name) for name in gone], 30.0)

    # --- threads ---------------------------------------------------------------------------------------------------
    def _call(self, work: Callable[[Any], T], within: float) -> T:
        if self._stuck:
            raise self._unanswered(self._stuck)
        lane: _Lane | None = getattr(self._per_thread, "lane", None)
        if lane is None:
            lane = self._per_thread.lane = _Lane(self._store)
        try:
            return lane.run(work, within + _GRACE_S)
        except TimeoutError:
            self._stuck = f"did not answer within {within + _GRACE_S:.1f} s at {time.strftime('%H:%M:%S')}"
            raise self._unanswered(self._stuck) from None
        except RuntimeError as error:  # torch.distributed.DistError is one
            raise FsIoError(
                "the store that the ranks talk through is gone",
                where={"store": self.where, "host": mount_info.host()},
                seen=str(error).splitlines()[0] if str(error) else type(error).__name__,
                hint="see why the process that holds it (rank 0, or node 0's agent) has ended",
            ) from error

    def _unanswered(self, seen: str) -> FsTimeoutError:
        return FsTimeoutError(
            "the store that the ranks talk through does not answer",
            where={"store": self.where, "host": mount_info.host()},
            seen=seen,
            hint="see whether the process that holds it (rank 0, or node 0's agent) is frozen or cut off",
        )


class _Lane:
    """The thread that makes the calls of one thread of the program."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._work: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="safedist-fs-store", daemon=True).start()

    def run(self, work: Callable[[Any], T], within: float) -> T:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work.put((work, answer))
        try:
            done, value = answer.get(timeout=within)
        except queue.Empty:
            raise TimeoutError from None
        if not done:
            raise value
        result: T = value
        return result

    def _serve(self) -> None:
        while True:
            work, answer = self._work.get()
            try:
                answer.put((True, work(self._store)))
            except BaseException as error:
                answer.put((False, error))


def _of_member(key: str, member: int) -> list[str]:
    return [f"{key}/came/{member}", f"{key}/left/came/{member}", f"{key}/text/{member}"]


def _of_all(key: str) -> list[str]:
    return [key, f"{key}/came", f"{key}/left/came", f"{key}/end"]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
