"""A ``torch.distributed.Store`` as a place to meet: one name for each life of the ranks, and calls that end."""

from __future__ import annotations

import concurrent.futures
import queue
import secrets
import threading
import time
from collections.abc import Callable
from socket import gethostname
from typing import Any

from ..errors import FsIoError, FsTimeoutError
from .paths import pauses

_ANSWER_SECONDS = 30.0
"""For an answer that waits for nobody."""

_BRISKLY = {"per_s": 5_000, "first": 0.0003, "least": 0.004}
"""How ranks look at a store, which costs less than a look at a file system: see :func:`pauses`."""


class TorchStore:
    """A ``torch.distributed.Store``, its calls made by one thread: each for all threads of the process, in turn.

    A call to a store whose host is frozen (not dead) never returns, whatever timeout it was given. Then the caller
    goes; what was not begun of it is not done later, and the next caller is answered if the host is back by then.

    Args:
        store: the store.
        where: its name, for messages.
        ranks: how many ask it; sets the pace of polling.
    """

    def __init__(self, store: Any, where: str, ranks: int) -> None:
        self.where = where
        self.life = ""
        self._store = store
        self._ranks = ranks
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="safedist-fs-store", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(self._key(key), value.decode()))

    def wait(self, key: str, seconds: float) -> bytes | None:
        # Polling, not store.wait: each of its time-outs prints two warnings, and it holds the connection meanwhile.
        name, deadline = self._key(key), time.monotonic() + seconds
        pause = pauses(self._ranks, **_BRISKLY)
        while True:
            value: bytes | None = self._call(lambda: self._store.get(name) if self._store.check([name]) else None)
            left = deadline - time.monotonic()
            if value is not None or left <= 0:
                return value
            time.sleep(min(next(pause), left))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda: self._store.add(self._key(key), amount)))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        there: bytes = self._call(lambda: self._store.compare_set(self._key(key), expected.decode(), desired.decode()))
        return there

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(self._key(key)))

    def _key(self, key: str) -> str:
        return f"safedist/fs/{self.life}/{key}"

    def _call(self, work: Callable[[], Any]) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((work, answer))
        try:
            return answer.result(_ANSWER_SECONDS)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            raise FsTimeoutError(
                "the store that the ranks meet over does not answer",
                where={"store": self.where, "host": gethostname()},
                seen=f"nothing within {_ANSWER_SECONDS:g} s",
                hint="see whether the process that holds it (rank 0, or node 0's agent) is frozen or cut off",
            ) from None
        except RuntimeError as error:  # torch.distributed.DistError is one
            raise FsIoError(
                "the store that the ranks meet over is gone",
                where={"store": self.where, "host": gethostname()},
                seen=str(error).partition("\n")[0] or type(error).__name__,
                hint="see why the process that holds it (rank 0, or node 0's agent) has ended",
            ) from error

    def _serve(self) -> None:
        while True:
            work, answer = self._calls.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)


def agree(store: TorchStore, rank: int, size: int, limit: float) -> str:
    """A name for this life of the ranks, in a store in which earlier ones have left theirs.

    Each rank shows a number that it has just drawn; rank 0 draws the name and gives it to exactly those numbers; each
    rank takes it only beside its own. Rank 0 lets them go on when all have: these processes know the name, no others;
    whatever an earlier process left under any key is passed over.

    Raises:
        FsTimeoutError: not all came.
    """
    mine, name = secrets.token_hex(8), ""
    shown: list[bytes | None] = []
    store.set(f"shown/{rank}", mine.encode())
    deadline = time.monotonic() + limit
    for pause in pauses(size, **_BRISKLY):
        if rank == 0:
            now = _of_others(store, "shown", size)
            if None not in now and now != shown:  # somebody's is new: the one before was an earlier life's
                shown, name = now, secrets.token_hex(8)
                for other, its in enumerate(now, 1):
                    store.set(f"given/{other}", f"{(its or b'').decode()} {name}".encode())
            if name and set(_of_others(store, "taken", size)) == {name.encode()}:
                store.set(f"go/{name}", b"1")
                return name
        elif name and store.wait(f"go/{name}", 0) is not None:
            return name
        else:
            of, _, given = (store.wait(f"given/{rank}", 0) or b"").decode().partition(" ")
            if of == mine and given != name:
                name = given
                store.set(f"taken/{rank}", name.encode())
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
    raise _not_all(store, rank, size, name, limit)


def _of_others(store: TorchStore, what: str, size: int) -> list[bytes | None]:
    return [store.wait(f"{what}/{other}", 0) for other in range(1, size)]


def _not_all(store: TorchStore, rank: int, size: int, name: str, limit: float) -> FsTimeoutError:
    if name:
        late = [other for other, its in enumerate(_of_others(store, "taken", size), 1) if its != name.encode()]
    else:  # a number that is there may be an earlier life's; whose is missing has never come
        late = [other for other in range(size) if store.wait(f"shown/{other}", 0) is None]
    who = ", ".join(map(str, late)) or "0, or ranks that it waits for"
    return FsTimeoutError(
        f"ranks did not come to their first meeting: {who}",
        where={"rank": f"{rank} of {size}", "host": gethostname(), "store": store.where},
        seen=f"waited {limit:.1f} s",
        expected="every rank, at the same point of the program",
        hint="see what these ranks do instead: they may be late, hang, or not call the helpers of fs",
    )
