"""From a root cause, or the error that ended an agent, to what Flyte and the user are told. Pure.

A verdict is uploaded once, and the pods then exit 0. Its kind and its origin decide what Flyte does (v1.16,
flytepropeller's ``executor.go``, ``isEligibleForRetry``):

- NON_RECOVERABLE: the task fails.
- RECOVERABLE, origin USER: another attempt if the task's ``retries`` allow one.
- RECOVERABLE, origin SYSTEM: another attempt from the platform's own budget (three by default); none of ``retries``.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..agent.disk import DiskLimit
from ..errors import FencedError, RankFailedError, RankKilledError, SafedistError
from ..rank.outcome import (
    FULL_ERRNOS,
    Fault,
    Raised,
    RankOutcome,
    Status,
    is_consequence,
    speaks_of_full_shared_memory,
    speaks_of_gpu_hardware,
)
from ..rank.outcome_text import describe, error_code


class Kind(str, Enum):
    """Whether Flyte may try again."""

    NON_RECOVERABLE = "non-recoverable"
    RECOVERABLE = "recoverable"


class Origin(str, Enum):
    """Whose doing a failure is: it decides which budget another attempt is taken from."""

    USER = "user"
    SYSTEM = "system"


class Code(str, Enum):
    """What failures that are not the user's own exception are called. Stable: metrics and alerts are keyed on them.

    A user's exception is ``USER:`` and its class, or its own ``error_code``; a rank that left without a word is
    ``USER:Exit`` and its status; one that a signal ended is ``USER:`` or ``SYSTEM:`` and the signal's name.
    """

    OUT_OF_MEMORY = "USER:OutOfMemory"
    """A rank was OOM-killed."""
    PEERS_LOST = "USER:PeersLost"
    """Every rank that failed had only lost another one, and none of those is known to have failed."""
    COLLECTIVE_TIMEOUT = "USER:CollectiveTimeout"
    """Ranks waited in vain for others that were there."""
    STOPPED = "SYSTEM:Stopped"
    """The pod was told to stop: drained, preempted, evicted; or Ctrl-C."""
    NODE_LOST = "SYSTEM:NodeLost"
    """A node is gone and was not replaced in time, or nodes were lost too often."""
    RENDEZVOUS = "SYSTEM:RendezvousTimeout"
    """Not every node came within ``Timeouts.rendezvous``."""
    LAUNCH = "SYSTEM:RanksNotStarted"
    """Ranks could not be started, or what starts them died."""
    STORAGE = "SYSTEM:Storage"
    """The object store failed, also after the tries that could have helped."""
    DISK = "SYSTEM:NodeDisk"
    """The disk of a node failed; a full one is the task's own doing."""
    GPU = "SYSTEM:GpuHardware"
    """A GPU's memory, or a link between GPUs, failed, by CUDA's word. What the driver has reported has codes of its own
    (:mod:`..hangs.gpus`)."""


BROKEN_ERRNOS = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EUCLEAN})
"""What a disk, or a file server, says when it fails by itself."""

_PLATFORM_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
"""Sent from outside the program. The others (SIGSEGV, SIGABRT, ...) are the program's own doing, and would repeat."""


@dataclass(frozen=True)
class Verdict:
    """The one error of a failed job, as it is uploaded.

    Attributes:
        kind: whether Flyte may try again.
        origin: whose doing it is.
        code: its stable name (:class:`Code`).
        error: what the user reads.
        time_ns: when the root cause happened, in nanoseconds since the epoch.
        decks: name and HTML of those that a failed rank left.
    """

    kind: Kind
    origin: Origin
    code: str
    error: SafedistError
    time_ns: int
    decks: tuple[dict[str, str], ...] = ()


def is_infrastructure(error: SafedistError) -> bool:
    """Whether an error that kept a job from running, or ended its agent, is the platform's and worth a retry."""
    return bool(error.platforms)


def of_error(error: SafedistError) -> Verdict | None:
    """The verdict on an error that kept a job from running, or ended its agent.

    None where the error says nothing about the job: it is the user's or a mistake (flytekit uploads it as it is), or
    this process is fenced off: another one has taken its place, and it has no say.
    """
    if isinstance(error, FencedError) or not is_infrastructure(error):
        return None
    return Verdict(Kind.RECOVERABLE, Origin.SYSTEM, error.platforms, error, time.time_ns())


def judge(
    cause: RankOutcome, reason: str, *, disk: str, limit: DiskLimit | None, returned: Sequence[int] = ()
) -> Verdict:
    """What a job that failed with this root cause, and is not restarted any more, ends as.

    Args:
        cause: the root cause.
        reason: why there is no further restart.
        disk: what scratch held on the root cause's node, as text.
        limit: how much ranks may write there, or None.
        returned: ranks that had returned before, where the root cause is only the echo of a lost peer.
    """
    kind, origin, code = _judged(cause, returned)
    text = f"{describe(cause)}\n\nNot restarted in place: {reason}."
    if cause.raised is not None and speaks_of_full_shared_memory(cause.raised):
        error: SafedistError = RankFailedError(
            f"rank {cause.rank} found the node's shared memory (/dev/shm) full.\n\n{text}",
            hint="give the task more: @task(shared_memory=...); or have DataLoader workers hand over less at a time",
        ).with_code(code)
    elif _is_full(cause):
        allowed = f"limited to {limit}" if limit is not None else "with no size limit"
        error = RankFailedError(
            f"rank {cause.rank} ran out of disk space. Scratch is {allowed}: {disk}\n\n{text}",
            hint="write less, give the task more ephemeral storage, or move scratch to a larger volume "
            "(Scratch(path=...))",
        ).with_code(code)
    elif code == Code.PEERS_LOST.value:
        error = RankFailedError(f"{_echo(returned)}\n\n{text}", hint=_ECHO_HINT[bool(returned)]).with_code(code)
    elif code == Code.COLLECTIVE_TIMEOUT.value:
        error = RankFailedError(f"{_TIMED_OUT}. {text}", hint=_TIMED_OUT_HINT).with_code(code)
    elif cause.gpu is not None and not cause.gpu.is_hardware:
        error = RankFailedError(text, hint=_USERS_XID_HINT).with_code(code)
    elif origin is Origin.SYSTEM:
        error = RankKilledError(text, hint=_HARDWARE_HINT if cause.gpu is not None else "")
    else:
        error = RankFailedError(text).with_code(code)
    return Verdict(kind, origin, code, error, cause.time_ns)


_USERS_XID_HINT = (
    "run it with CUDA_LAUNCH_BLOCKING=1, or a small case of it under compute-sanitizer, to see which kernel does it; "
    "where one GPU alone reports this with every program, it is the hardware's after all"
)
_HARDWARE_HINT = (
    "drain that node (kubectl cordon, kubectl drain) until the GPU is reset or replaced; nvidia-smi -q there says more"
)


def _judged(cause: RankOutcome, returned: Sequence[int]) -> tuple[Kind, Origin, str]:
    if cause.timed_out and not returned and cause.gpu is None:
        return Kind.RECOVERABLE, Origin.USER, Code.COLLECTIVE_TIMEOUT.value
    # SIGABRT is an echo where somebody was gone; else native code of this rank's may have given up by itself.
    if is_consequence(cause) and (cause.raised is not None or returned):
        return Kind.RECOVERABLE, Origin.USER, Code.PEERS_LOST.value
    platforms = _platforms(cause)
    if platforms is not None:
        return Kind.RECOVERABLE, Origin.SYSTEM, platforms
    if cause.raised is not None and cause.raised.fault is Fault.RECOVERABLE:
        return Kind.RECOVERABLE, Origin.USER, error_code(cause)
    if _signal_of(cause) == signal.SIGKILL:
        # Out of memory: it will most likely come again. Whether it is tried is for the user's retries to say.
        return Kind.RECOVERABLE, Origin.USER, Code.OUT_OF_MEMORY.value
    return Kind.NON_RECOVERABLE, Origin.USER, error_code(cause)


def _platforms(cause: RankOutcome) -> str | None:
    """The code of a failure that is the platform's; None for the program's own. The user's word wins: an error that
    the user calls recoverable is the user's, and a disk that is full stays full."""
    number = _signal_of(cause)
    if cause.gpu is not None:
        return cause.gpu.code if cause.gpu.is_hardware else None  # a kernel at fault fails again: no retry for that
    if cause.raised is not None:
        is_the_users = cause.raised.fault is Fault.RECOVERABLE or _is_full(cause)
        return None if is_the_users else _platforms_exception(cause.raised)
    if number not in _PLATFORM_SIGNALS or (number == signal.SIGKILL and cause.out_of_memory):
        return None
    return f"SYSTEM:{signal.Signals(number).name}"


def _platforms_exception(raised: Raised) -> str | None:
    if BROKEN_ERRNOS.intersection(raised.errnos):
        return Code.DISK.value
    if speaks_of_gpu_hardware(raised):
        return Code.GPU.value
    return (raised.code or Code.STORAGE.value) if raised.fault is Fault.SYSTEM else None


def _echo(returned: Sequence[int]) -> str:
    lost = "every rank that failed had only lost its connection to others: none failed by itself, and no node was lost"
    if not returned:
        return f"{lost}. The first to lose one:"
    ranks = ", ".join(map(str, returned))
    return f"{lost}. Rank(s) {ranks} had already returned from the task's function. The first to miss them:"


_ECHO_HINT = {
    True: "let every rank take part in the same number of collective operations (uneven data: drop the last batch, or "
    "torch's Join), or end the function with a barrier",
    False: "look at the network between the nodes (NCCL_DEBUG=INFO, the NIC's counters), and at their timeouts",
}


_TIMED_OUT = "a collective timed out: most likely ranks called different collectives"
_TIMED_OUT_HINT = (
    "compare where the ranks were (stacks are in the nodes' logs): all have to call the same collectives in the "
    "same order, also where data are uneven or one rank alone evaluates or saves. If all were in the same one, raise "
    "init_process_group(timeout=...), or look at the network between the nodes"
)


def _signal_of(cause: RankOutcome) -> int:
    """The signal that ended a rank; 0 for every other end."""
    return -(cause.exit_code or 0) if cause.status is Status.KILLED else 0


def _is_full(cause: RankOutcome) -> bool:
    return cause.raised is not None and bool(FULL_ERRNOS.intersection(cause.raised.errnos))
