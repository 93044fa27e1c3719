"""Where the ranks of this life of the job meet: who I am among them, and keys and values that all of them see.

In this order: the corner of the job's coordinator (``meeting``), torchrun's agent store, the store of an initialised
process group, Horovod. A job of one process meets nobody.

Values are answers, so they must be of *this* life of the ranks. The corner is new in each round, and so is the store
that Horovod's rank 0 opens; torch's stores outlive the ranks, and no variable names one life (torchrun's restart count
differs from node to node). There the ranks agree on a name that nobody can have used before (:func:`agree`).
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import os
import queue
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

from .. import envvars
from .. import meeting as meetings
from ..compat import torch as torch_inside
from ..errors import FsError, FsIdentityError, FsIoError, FsTimeoutError
from .identity import current_identity, known_identity, timeout_s
from .paths import pauses

T = TypeVar("T")

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
            if answer.set_running_or_notify_cancel():
                _answer(answer, work)


Meeting = meetings.Meeting | TorchStore
"""Keys and values that all ranks see. Thread-safe; see the former's calls for what each raises."""


class Group:
    """This process among the ranks that meet.

    Args:
        meeting: where.
        rank: this process.
        size: how many they are.
        ends_with_rank_0: whether the place is gone as soon as rank 0's process has ended.

    Attributes:
        failed: tries of each work that have failed.
        token: of this process.
        at_work: its threads that work for all, by what at.
    """

    def __init__(self, meeting: Meeting, rank: int, size: int, *, ends_with_rank_0: bool = False) -> None:
        self.meeting, self.rank, self.size, self.ends_with_rank_0 = meeting, rank, size, ends_with_rank_0
        self.failed: Counter[str] = Counter()
        self.token, self.at_work = secrets.token_hex(8), dict[str, list[int]]()
        self._turns: Counter[str] = Counter()
        self._lock = threading.RLock()  # a signal's handler may meet others, too

    def turn(self, name: str) -> int:
        """How often ``name`` was called before: ranks that call in the same order mean the same turn.

        Raises:
            FsError: another process has come as this rank: what a rank has started has its variables, too.
        """
        with self._lock:
            me = there = f"process {os.getpid()} on {gethostname()}"
            if not self._turns:
                there = self.meeting.compare_set(f"rank/{self.rank}", b"", me.encode()).decode()
            if there != me:
                raise FsError(
                    "another process has come as this rank",
                    where={"rank": str(self), "process": me, "store": self.meeting.where},
                    seen=there,
                    hint="call what ranks do together in the rank's own process: not in one that it has started, such "
                    "as a DataLoader's worker",
                )
            self._turns[name] += 1
            return self._turns[name] - 1

    @property
    def node(self) -> str:
        """What the ranks of this node, and no others, have in common."""
        identity = known_identity()
        if identity is not None and identity.world_size == self.size:
            return f"node {identity.node_rank}"
        # Started by the program itself (mp.spawn): a container has a host name of its own, a machine a boot.
        return f"{gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node.

        Raises:
            FsIdentityError: nothing says so.
        """
        local = os.environ.get(envvars.LOCAL_RANK) or os.environ.get(envvars.HOROVOD_LOCAL_RANK)
        if local and local.isdecimal():
            return int(local) == 0
        identity = current_identity()
        if identity.world_size != self.size:
            raise FsIdentityError(
                "nothing says which rank is the first of its node",
                where={"rank": str(self)},
                expected=f"{envvars.LOCAL_RANK}, where the program starts its ranks itself",
                hint=f"set {envvars.LOCAL_RANK} in each of them",
            )
        return identity.local_rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {gethostname()}"


_lock = threading.RLock()
_made: dict[tuple[Any, ...], Group] = {}


def ranks(timeout: float | None = None) -> Group | None:
    """The ranks of this life of the job; None where this process is all of them.

    Over a store of torch's, and over Horovod, the first call waits for all of them.

    Raises:
        FsError: the ranks have nothing in common yet.
        FsIdentityError: it is not known which rank this is.
        FsTimeoutError: not all came; the error names them.
    """
    with _lock:
        found = _found(timeout_s(timeout))
        if found is None:
            return None
        key, make = found
        place = (os.getpid(), *key)  # a forked child shares no connection with its parent
        if place not in _made:
            _made[place] = make()
        return _made[place]


def _found(limit: float) -> tuple[tuple[Any, ...], Callable[[], Group]] | None:
    corner = meetings.of_rank(os.environ)
    dist = _initialised("torch.distributed", "get_rank", "get_world_size")
    hvd = _initialised("horovod.torch", "rank", "size")
    if corner is not None:
        me = current_identity()
        return (corner.where,), lambda: Group(corner, me.rank, me.world_size)
    if os.environ.get(envvars.TORCHELASTIC_USE_AGENT_STORE) == "True":
        me = current_identity()
        if not me.single:
            return ("agent",), lambda: _over(_agents_store(), me.rank, me.world_size, limit, of_rank_0=False)
    if dist is not None:
        store = torch_inside.default_store()
        return (store,), lambda: _over((store, "torch's process group"), *dist, limit, of_rank_0=True)
    if hvd is not None:
        return ("horovod",), lambda: _over_horovod(*hvd, limit)
    me = current_identity()
    if me.single:
        return None
    raise FsError(
        f"{me.world_size} ranks have nothing to meet over yet",
        seen="no safedist task, no torchrun, and neither torch.distributed nor horovod.torch is initialised",
        hint="call torch.distributed.init_process_group() or hvd.init() first",
    )


def _initialised(name: str, rank_of: str, size_of: str) -> tuple[int, int] | None:
    """Rank and size by a library, if the program has imported and initialised it for more than one rank.

    Raises:
        FsIdentityError: it counts other ranks than the environment does: taking either for true could split the job.
    """
    module = sys.modules.get(name)
    if module is None or not getattr(module, "is_initialized", bool)():
        return None
    rank, size = int(getattr(module, rank_of)()), int(getattr(module, size_of)())
    for names in ((envvars.RANK, envvars.WORLD_SIZE), (envvars.HOROVOD_RANK, envvars.HOROVOD_SIZE)):
        said = tuple(os.environ.get(name) or "" for name in names)
        if all(said) and said != (str(rank), str(size)):
            raise FsIdentityError(
                f"{name} and the environment count different ranks",
                seen=f"rank {rank} of {size} by {name}, rank {said[0]} of {said[1]} by {' and '.join(names)}",
                hint="start the ranks with torchrun, horovodrun or as a safedist task, or unset these variables",
            )
    return (rank, size) if size > 1 else None


# --- torch's stores, and Horovod's ranks ---------------------------------------------------------------------------
def _agents_store() -> tuple[Any, str]:
    import torch.distributed as dist

    address, port = os.environ.get(envvars.MASTER_ADDR, ""), os.environ.get(envvars.MASTER_PORT, "")
    try:
        store = dist.TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=60))
    except (RuntimeError, ValueError) as error:
        raise FsError("torchrun's store cannot be reached", where={"store": f"{address}:{port}"}, seen=error) from error
    return store, f"torchrun's store at {address}:{port}"


def _over(held: tuple[Any, str], rank: int, size: int, limit: float, *, of_rank_0: bool) -> Group:
    store = TorchStore(*held, size)
    store.life = agree(store, rank, size, limit)
    return Group(store, rank, size, ends_with_rank_0=of_rank_0)


def _over_horovod(rank: int, size: int, limit: float) -> Group:
    """Over a store that rank 0 opens and broadcasts the address of: Horovod itself cannot say who is missing."""
    import horovod.torch as hvd
    import torch.distributed as dist

    server = os.environ.get(envvars.HOROVOD_GLOO_RENDEZVOUS_ADDR)
    own = meetings.own_address(server, 9) if server else gethostname()

    def meet() -> tuple[Any, str]:
        place, store = None, None
        if rank == 0:
            store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
            place = (store.host, store.port)
        address, port = hvd.broadcast_object(place, root_rank=0, name="safedist.fs")
        return store or dist.TCPStore(address, port, is_master=False), f"Horovod rank 0's store at {address}:{port}"

    late = FsTimeoutError(
        f"waited {limit:.1f} s for Horovod's other {size - 1} ranks to meet",
        hint="every rank must make its first call of fs at the same point of the program",
    )
    try:
        store, where = bounded(meet, limit, late)
    except FsError:
        raise
    except Exception as error:
        raise FsError("Horovod's ranks could not meet", seen=f"{type(error).__name__}: {error}") from error
    return Group(TorchStore(store, where, size), rank, size, ends_with_rank_0=True)


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


def bounded(work: Callable[[], T], seconds: float, late: FsTimeoutError) -> T:
    """Run what has no deadline of its own on a thread that can be left behind; raise ``late`` if it is not done."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()  # flytekit's: where a task's file systems come from
    threading.Thread(target=context.run, args=(_answer, done, work), name="safedist-fs-bounded", daemon=True).start()
    if not concurrent.futures.wait([done], timeout=seconds).done:
        raise late
    return done.result()


def _answer(answer: concurrent.futures.Future[T], work: Callable[[], T]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:
        answer.set_exception(error)
