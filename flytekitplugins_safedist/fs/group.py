"""The ranks of the job as a group that can agree on things, over whatever they have in common.

In this order: what ``use_group`` was given; torchrun's agent store; the store that safedist's agent holds; torch's
process group, if it is initialised; Horovod, if it is initialised; files in SAFEDIST_COORDINATION_DIR, for the run that
SAFEDIST_JOB_ID names. A job of one process needs none.

Notes are answers, so they must be of *this* run. Launchers' names are not names of one run: two torchruns may share an
``--rdzv-id``, and all tasks of a workflow an execution id. That is why only what lives as long as the run does (a
launcher's store) or the user's own word counts, and why a program under torchrun imports torch for it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from .. import envvars, meeting
from ..compat import torch as torch_inside
from ..errors import FsError, FsIdentityError, FsTimeoutError, MissingDependencyError
from ..handoff import HERE
from .context import current_identity, timeout_s
from .coordination import CoordinationStore, MemoryCoordinationStore
from .file_coordination import FileCoordinationStore
from .identity import Identity
from .torch_coordination import TorchCoordinationStore


class Group:
    """The ranks that coordinate, and the store they do it over. Make one with ``torch_group`` and its like.

    Args:
        coordination: where they leave each other notes. All ranks must be given the same one.
        identity: which of them the caller is.
    """

    def __init__(self, coordination: CoordinationStore, identity: Identity) -> None:
        self.coordination = coordination
        self.identity = identity
        self._turns: Counter[str] = Counter()
        self._failures: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def board(self) -> CoordinationStore:
        """The older name of ``coordination``."""
        warnings.warn("Group.board moved: read .coordination", DeprecationWarning, stacklevel=2)
        return self.coordination

    def turn(self, name: str) -> int:
        """How often ``name`` was called before: ranks that call in the same order mean the same turn."""
        with self._lock:
            self._turns[name] += 1
            return self._turns[name] - 1

    def failures(self, work: str) -> int:
        """How many tries of ``work`` this process has seen end in failure: the number of the next one."""
        with self._lock:
            return self._failures.get(work, 0)

    def failed(self, work: str, attempt: int) -> None:
        """A try of ``work`` has failed, and a caller here is told so."""
        with self._lock:
            self._failures[work] = max(attempt + 1, self._failures.get(work, 0))

    def __repr__(self) -> str:
        return f"<Group of {self.identity.world_size} over {self.coordination.where}, seen by {self.identity}>"


_lock = threading.RLock()
_made: dict[Any, Group] = {}
_of_process_group: dict[Any, tuple[Any, Group]] = {}


def use_group(group: Group | None) -> None:
    """Say what the helpers coordinate over, instead of leaving it to ``default_group``; None takes it back.

    Every rank must say the same.
    """
    with _lock:
        HERE.group = group


def default_group() -> Group:
    """The group that the helpers use when none is given; see the module's first lines for the order.

    Raises:
        FsError: the ranks have nothing in common that they could coordinate over. The hint says what to give them.
        FsIdentityError: the environment does not say which rank this is.
    """
    with _lock:
        given: Group | None = HERE.group
        if given is not None:
            return given
        identity = current_identity()
        over_torch = _over_torch(identity)
        if over_torch is not None:
            return over_torch
        if _initialised("horovod.torch", identity) is not None:
            return _cached(("horovod",), lambda: horovod_group(identity=identity))
        if identity.single:
            return _cached(("memory",), lambda: Group(MemoryCoordinationStore(), identity))
        return _cached(("files",), lambda: _files_from_env(os.environ, identity))


def _over_torch(identity: Identity) -> Group | None:
    """Over one of torch's stores, where there is one for more than one rank."""
    torch = _initialised("torch.distributed", identity)
    if identity.single:
        return None
    # Before the store of our own agent: a torchrun that a rank of ours has started inherits the name of that one.
    if os.environ.get(envvars.TORCHELASTIC_USE_AGENT_STORE) == "True":
        return _cached(("agent store",), lambda: torch_group(identity=identity))
    held = meeting.of_rank(os.environ)
    if held is not None:
        return _cached(("agent", held.where), lambda: _agent_group(held, identity))
    if torch is not None:
        return _over_process_group(torch_inside.default_store(), identity)
    return None


def _over_process_group(store: Any, identity: Identity) -> Group:
    """Over the store of the process group that there is now.

    A later one (destroyed, initialised again) has a store of its own. Objects are compared, and kept, because an id
    alone is used again as soon as its object is gone.
    """
    key = (os.getpid(), current_identity(), "process group")
    known = _of_process_group.get(key)
    if known is None or known[0] is not store:
        known = _of_process_group[key] = (store, torch_group(store, identity=identity))
    return known[1]


def _initialised(name: str, identity: Identity) -> Any:
    """The module, if the program has imported and initialised it for more than one rank.

    Raises:
        FsIdentityError: it counts other ranks than the environment does: taking either for true could split the job.
    """
    module = sys.modules.get(name)
    if module is None or not getattr(module, "is_initialized", bool)():
        return None
    size = module.size() if hasattr(module, "size") else module.get_world_size()
    rank = module.rank() if hasattr(module, "size") else module.get_rank()
    if (rank, size) == (identity.rank, identity.world_size):
        return module if size > 1 else None
    raise FsIdentityError(
        f"{name} and the environment count different ranks",
        seen=f"rank {rank} of {size} by {name}, {identity} by the environment",
        hint="start the ranks with torchrun, horovodrun or as a safedist task, or say which is true: use_identity(...)",
    )


def _cached(key: tuple[Any, ...], make: Callable[[], Group]) -> Group:
    key = (os.getpid(), current_identity(), *key)  # a forked child shares no connection with its parent
    if key not in _made:
        _made[key] = make()
    return _made[key]


# --- torch ---------------------------------------------------------------------------------------------------------
def torch_group(store: Any = None, *, identity: Identity | None = None) -> Group:
    """Coordinate over a ``torch.distributed`` store; without one, over the agent's at MASTER_ADDR:MASTER_PORT.

    Raises:
        MissingDependencyError: torch is not installed.
        FsError: there is no store to be found.
    """
    identity = identity or current_identity()
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError("torch is not installed", hint="pip install torch") from error
    if store is not None:
        coordination = TorchCoordinationStore(
            dist.PrefixStore("safedist/fs", store), "torch's process group", identity.world_size
        )
        return Group(coordination, identity)
    address, port = os.environ.get(envvars.MASTER_ADDR), os.environ.get(envvars.MASTER_PORT, "")
    if not address or not port or os.environ.get(envvars.TORCHELASTIC_USE_AGENT_STORE) != "True":
        raise FsError(
            "there is no torch store to coordinate over",
            seen=f"MASTER_ADDR={address}, MASTER_PORT={port}, no agent store",
            hint="initialise torch.distributed first, start with torchrun, or pass a store",
        )
    store = _connected(address, port)
    # torchrun keeps its store over restarts; torch's own env:// rendezvous sets rounds apart by the same number.
    prefix = f"safedist/fs/{identity.round}"
    where = f"the agent's store at {address}:{port}"
    coordination = TorchCoordinationStore(
        dist.PrefixStore(prefix, store), where, identity.world_size, held_by_rank_0=False
    )
    return Group(coordination, identity)


def _agent_group(held: meeting.Meeting, identity: Identity) -> Group:
    """Over what the job's coordinator holds until the round is over, whatever becomes of its ranks."""
    store = _MeetingStore(held, f"safedist/fs/{identity.world_size}")
    where = f"the job's coordinator at {held.where}"
    return Group(TorchCoordinationStore(store, where, identity.world_size, held_by_rank_0=False), identity)


class _MeetingStore:
    """A :class:`..meeting.Meeting` under the names of a torch store."""

    def __init__(self, held: meeting.Meeting, prefix: str) -> None:
        self._held = held
        self._prefix = prefix

    def get(self, key: str) -> bytes:
        return self._held.get(self._key(key)) or b""

    def check(self, keys: list[str]) -> bool:
        return all(self._held.get(self._key(key)) is not None for key in keys)

    def set(self, key: str, text: str) -> None:
        self._held.set(self._key(key), text.encode())

    def add(self, key: str, amount: int) -> int:
        return self._held.add(self._key(key), amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._held.compare_set(self._key(key), expected.encode(), desired.encode())

    def delete_key(self, key: str) -> None:
        self._held.delete(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _connected(address: str, port: str) -> Any:
    import torch.distributed as dist

    try:
        return dist.TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=60))
    except (RuntimeError, ValueError) as error:
        raise FsError(
            "the agent's store cannot be reached", where={"store": f"{address}:{port}"}, seen=error
        ) from error


# --- Horovod -------------------------------------------------------------------------------------------------------
def horovod_group(*, timeout: float | None = None, identity: Identity | None = None) -> Group:
    """Coordinate over a store that Horovod's rank 0 opens and broadcasts the address of.

    A collective: every rank must call it, at the same point of its program, after ``horovod.torch.init()``. Horovod
    itself has no way to ask who is missing, nor to tell one rank something that the others do not wait for.

    Raises:
        FsTimeoutError: not every rank came.
    """
    try:
        import horovod.torch as hvd
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError("horovod.torch is not installed", seen=str(error)) from error
    seen = Identity(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    identity = identity or seen

    def meet() -> Any:
        if hvd.rank() == 0:
            address = _own_address()
            store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
            hvd.broadcast_object([address, store.port], root_rank=0, name="safedist.fs.group")
            return store, address, store.port
        address, port = hvd.broadcast_object(None, root_rank=0, name="safedist.fs.group")
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        return store, address, port

    store, address, port = _bounded(meet, timeout_s(timeout), f"Horovod's other {hvd.size() - 1} ranks")
    prefix = dist.PrefixStore("safedist/fs", store)
    return Group(
        TorchCoordinationStore(prefix, f"Horovod rank 0's store at {address}:{port}", identity.world_size), identity
    )


def _own_address() -> str:
    """An address of this host that the other ranks reach: the one by which it reaches Horovod's rendezvous server."""
    import socket

    server = os.environ.get(envvars.HOROVOD_GLOO_RENDEZVOUS_ADDR)
    if not server:
        return socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server, 9))  # sends nothing: only asks the kernel for the route
        return str(probe.getsockname()[0])


def _bounded(work: Callable[[], Any], limit: float, who: str) -> Any:
    """Run a collective on a thread that can be left behind: it has no time-out of its own."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="safedist-fs-group", daemon=True)
    thread.start()
    thread.join(limit)
    if failed:
        raise FsError("the ranks could not form a group", seen=f"{type(failed[0]).__name__}: {failed[0]}") from failed[
            0
        ]
    if not done:
        raise FsTimeoutError(
            f"waited {limit:.1f} s for {who} to form a group",
            hint="every rank must call horovod_group, or its first fs helper, at the same point of the program",
        )
    return done[0]


# --- files ---------------------------------------------------------------------------------------------------------
def file_group(root: str | os.PathLike[str], *, identity: Identity | None = None) -> Group:
    """Coordinate over files in ``root``: a directory of *this run* of the job that all its ranks share.

    A directory that an earlier run has used holds that run's answers: give each run (attempt, round) a fresh one.
    """
    identity = identity or current_identity()
    return Group(FileCoordinationStore(root, identity.world_size), identity)


def _files_from_env(env: Mapping[str, str], identity: Identity) -> Group:
    name, root = env.get(envvars.JOB_ID), env.get(envvars.COORDINATION_DIR)
    if not name or not root:
        raise FsError(
            f"{identity.world_size} ranks have nothing to coordinate over",
            seen="no agent's store, no torch process group, no Horovod, "
            + (f"no {envvars.COORDINATION_DIR}" if not root else f"no {envvars.JOB_ID}"),
            hint="call this after torch.distributed or Horovod is initialised, or say use_group(file_group(DIR)), or "
            f"set {envvars.JOB_ID} (new for each run) and {envvars.COORDINATION_DIR} (shared by all ranks)",
        )
    launch = re.sub(r"[^\w-]", "-", f"{name}-{identity.attempt}-{identity.round}")
    return file_group(Path(root) / launch, identity=identity)
