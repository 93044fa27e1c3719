"""How a rank ended, as a value; and the choice of the one root cause among many. Pure."""

from __future__ import annotations

import errno
import json
import re
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..hangs.gpus import GpuFault
from ..texts import encodable
from .context import RankContext
from .order import Record

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Of a disk that is full."""


class Status(str, Enum):
    """How a rank ended."""

    SUCCEEDED = "succeeded"
    RAISED = "raised"
    EXITED = "exited"
    """Left without an outcome record: ``os._exit``, ``sys.exit`` in a library, a crash at start."""
    KILLED = "killed"
    """Ended by a signal that we did not send."""
    STOPPED = "stopped"
    """Ended by us, because another rank had failed."""


class Fault(str, Enum):
    """Whose fault an exception is; decides what Flyte is told."""

    USER = "user"
    RECOVERABLE = "recoverable"
    """``FlyteRecoverableException`` or a subclass: Flyte retries."""
    SYSTEM = "system"
    """Storage and platform trouble: Flyte retries, nothing is uploaded."""


@dataclass(frozen=True)
class Raised(Record):
    """An exception as text: it crosses processes and machines without pickles. All text in it is encodable.

    Attributes:
        type: qualified name of the class.
        message: ``str(exception)``.
        traceback: the formatted traceback, causes included.
        fault: whose fault it is.
        repeats: whether a relaunch of the ranks would surely fail the same way (ImportError, SyntaxError, config, full
            disk).
        errnos: ``errno`` of every OSError in the chain of causes.
        consequence: whether it only says that a peer was lost (connection closed, collective aborted).
        told: whether it is another rank's failure, told here.
        code: the exception's own ``error_code``, which flytekit shows in place of its own; "" where it has none.
    """

    type: str
    message: str
    traceback: str
    fault: Fault = Fault.USER
    repeats: bool = False
    errnos: tuple[int, ...] = ()
    consequence: bool = False
    told: bool = False
    code: str = ""

    def __post_init__(self) -> None:
        for name in ("type", "message", "traceback", "code"):
            object.__setattr__(self, name, encodable(getattr(self, name)))


NO_RANK = -1
"""In the place of a rank: the node itself failed, before it had any."""


@dataclass(frozen=True)
class RankOutcome(Record):
    """How one rank ended. All text in it is encodable.

    Attributes:
        rank, local_rank, node_rank, round: which rank of which launch.
        host: its node's name.
        pid: its process id there.
        status: how it ended.
        time_ns: when, in nanoseconds since the epoch, by its node's clock.
        raised: the exception, where ``status`` is RAISED.
        exit_code: of the process; negative for a signal; None while it has not ended.
        log_tail: the last lines it printed.
        memory: what is known of memory on its node, where it was killed.
        out_of_memory: whether processes were OOM-killed there while the ranks ran.
        timed_out: whether a collective operation of it waited in vain for ranks that were there.
        others: where the other ranks of its node stood when it had failed for that; as text.
        step: at which it was, by what it saves; -1 where it saves nothing by steps.
        gpu: what its GPU has reported, of which this comes.
        seconds: how long each phase took, by name ("start", "inputs", "function", "outputs").
    """

    rank: int
    local_rank: int
    node_rank: int
    round: int
    host: str
    pid: int
    status: Status
    time_ns: int
    raised: Raised | None = None
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()
    memory: str = ""
    out_of_memory: bool = False
    timed_out: bool = False
    others: str = ""
    step: int = -1
    gpu: GpuFault | None = None
    seconds: dict[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("host", "memory", "others"):
            object.__setattr__(self, name, encodable(getattr(self, name)))
        object.__setattr__(self, "log_tail", tuple(map(encodable, self.log_tail)))
        object.__setattr__(self, "seconds", {encodable(phase): spent for phase, spent in self.seconds.items()})

    @classmethod
    def of(cls, at: RankContext, pid: int, status: Status, time_ns: int, **facts: Any) -> RankOutcome:
        """The outcome of a rank of this node."""
        place: dict[str, Any] = {
            "rank": at.rank,
            "local_rank": at.local_rank,
            "node_rank": at.node_rank,
            "round": at.round,
        }
        return cls(**place, host=socket.gethostname(), pid=pid, status=status, time_ns=time_ns, **facts)

    @property
    def failed(self) -> bool:
        """Whether this is a failure in itself, and not our own tearing down."""
        return self.status in (Status.RAISED, Status.EXITED, Status.KILLED)

    def shortened(self, limit: int) -> RankOutcome:
        """The same record with no text longer than ``limit`` characters: the middle is cut, the ends say most."""

        def short(text: str) -> str:
            half = limit // 2
            return text if len(text) <= limit else f"{text[:half]}\n... [cut] ...\n{text[len(text) - half :]}"

        raised = self.raised
        if raised is not None:
            raised = replace(raised, message=short(raised.message), traceback=short(raised.traceback))
        per_line = max(80, limit // max(1, len(self.log_tail)))
        lines = tuple(line[:per_line] for line in self.log_tail)
        return replace(self, raised=raised, log_tail=lines, others=short(self.others))

    def fitting(self, limit: int, dump: Callable[[RankOutcome], str]) -> RankOutcome:
        """The same record, its texts cut as far as it takes for ``dump(record)`` to have at most ``limit`` bytes.

        By the encoded size, because a character has up to four bytes, and a quote more in nested JSON.
        """
        record, characters = self, limit
        while len(dump(record).encode()) > limit and characters > 1:
            characters //= 2
            record = self.shortened(characters)
        while len(dump(record).encode()) > limit and record.log_tail:
            record = replace(record, log_tail=record.log_tail[len(record.log_tail) // 2 + 1 :])
        return record

    def to_json(self) -> str:
        """The record as one line of JSON, in as few bytes as its texts allow: there is a limit."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def root_cause(outcomes: Iterable[RankOutcome]) -> RankOutcome | None:
    """The failure that brought the others down, or None when nothing failed.

    Failures that speak for themselves come before those that only say "a peer is gone"; among equals the earliest
    wins, by nanoseconds, and then the lowest rank.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    return min(failed, key=_order, default=None)


def _order(outcome: RankOutcome) -> tuple[int, int, int]:
    return (echo(outcome), outcome.time_ns, outcome.rank)


def echo(outcome: RankOutcome) -> int:
    """How far this failure is from a cause: 0 where it speaks for itself, 1 for a collective that timed out (2 where no
    other rank of its node was elsewhere then), 3 for one that tells of another rank's, and for an abort, which may be
    the echo of a lost peer or the cause of one, and 4 for an exception that says that a peer was lost.

    Not by time alone: the peers of a rank that aborts raise before its end is seen. An abort that others had to wait
    for would have ended the round long before their time was up.
    """
    if not is_consequence(outcome):
        return 3 if outcome.raised is not None and outcome.raised.told else 0
    if outcome.timed_out:
        return 1 if outcome.others else 2
    return 4 if outcome.raised is not None else 3


def is_consequence(outcome: RankOutcome) -> bool:
    """Whether this failure may be only the echo of another rank's."""
    if outcome.gpu is not None:
        return False
    if outcome.raised is not None:
        return outcome.raised.consequence
    # Gloo and NCCL abort the process when a peer vanishes during set-up; nothing else of ours ends in SIGABRT.
    return outcome.exit_code == -signal.SIGABRT


_LOST_PEER_TYPES = ("HorovodInternalError", "DistBackendError", "DistNetworkError", "DistStoreError")
# Only what gloo, NCCL and Horovod write: a service that the task calls loses connections too. Gloo's texts begin with
# the file of its own that they come from.
_LOST_PEER_TEXTS = (
    "gloo/transport",
    "gloo/rendezvous",
    "failed to pass monitoredbarrier",
    "nccl communicator was aborted",
    "remote process exited or there was a network error",
    "horovod has been shut down",
)


def speaks_of_lost_peer(type_name: str, message: str) -> bool:
    """Whether an exception of a collective operation says that another rank is gone, if there are others."""
    short = type_name.rpartition(".")[2]
    if short in _LOST_PEER_TYPES:
        # Horovod compares what ranks submit under one name, and tells all of them (horovod/common/controller.cc).
        return not message.startswith("Mismatched ")
    text = message.lower()
    return short == "RuntimeError" and any(part in text for part in _LOST_PEER_TEXTS)


# gloo; torch's store, where ranks meet for a new group; NCCL's watchdog, which ends its process.
_TIMED_OUT = re.compile(
    r"gloo/.*Timed out waiting \d+ ?ms for |^wait timeout after \d+ ?ms, keys: |"
    "Watchdog caught collective operation timeout"
)


def speaks_of_timeout(text: str) -> bool:
    """Whether a failed collective, or the log of a rank that aborted, says that its time was up, and no more."""
    return _TIMED_OUT.search(text) is not None


# torch's own texts, which have no errno: of the rank, and of a DataLoader's worker (as a cause, in the traceback).
_SHARED_MEMORY_FULL = re.compile(
    r"</torch_[^>]*>[^\n]*No space left on device|No space left on device[^\n]*/dev/shm/|"
    r"DataLoader worker \([^)]*\) is killed by signal: Bus error"
)


def speaks_of_full_shared_memory(raised: Raised) -> bool:
    """Whether an exception says that /dev/shm is full."""
    return any(_SHARED_MEMORY_FULL.search(text) for text in (raised.message, raised.traceback))


# CUDA's own texts of cudaErrorECCUncorrectable (214) and cudaErrorNvlinkUncorrectable (220), as torch passes them on:
# both are the hardware's alone (CUDA Runtime API, "Data types used by CUDA Runtime"). A message only begins with them
# where torch wrote it.
_GPU_HARDWARE = re.compile(r"CUDA error: uncorrectable (ECC|NVLink) error ")
_OF_CUDA = ("RuntimeError", "AcceleratorError")


def speaks_of_gpu_hardware(raised: Raised) -> bool:
    """Whether an exception of torch's says that a GPU's memory, or a link between GPUs, failed by itself."""
    return raised.type.rpartition(".")[2] in _OF_CUDA and _GPU_HARDWARE.match(raised.message) is not None
