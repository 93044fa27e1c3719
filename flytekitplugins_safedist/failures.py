"""What a failure is: the one table from the evidence of one end to its code, who pays, and whose echo it is. Pure.

A rank names the row of its own exception (:func:`of_exception`): it alone has the whole of it. Its agent knows more
(the signal, the container's memory, the GPU), and asks :class:`EndOfRank` for the row of the end.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Of a disk that is full."""

BROKEN_ERRNOS = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EUCLEAN})
"""What a disk, or a file server, says when it fails by itself."""

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
"""Sent from outside the program. The others (SIGSEGV, SIGABRT, ...) are the program's own doing, and would repeat."""

_MOST_LINKS = 64
"""Of an exception's chain that are read: a group may have thousands of members."""


class Payer(str, Enum):
    """Who pays for another attempt."""

    NOBODY = "nobody"
    """The task fails."""
    RETRIES = "retries"
    """The task's own ``retries``."""
    FLYTE = "flyte"
    """The platform's budget."""


class Failure(str, Enum):
    """The row of a failure."""

    OWN = "own"
    """The rank's own, also where nothing is known of it."""
    RECOVERABLE = "recoverable"
    """One that the user calls recoverable (``FlyteRecoverableException``), and a hang."""
    MISTAKE = "mistake"
    """One that a library of collectives refuses by its text: of this rank, whatever the exception's class."""
    FULL_DISK = "full disk"
    FULL_SHARED_MEMORY = "full shared memory"
    NODE_DISK = "node's disk"
    GPU_HARDWARE = "GPU hardware"
    """By CUDA's word."""
    STORAGE = "storage"
    """Storage and platform trouble, by the class of the exception."""
    WORKER_KILLED = "worker killed"
    """A DataLoader's worker was killed."""
    OUT_OF_MEMORY = "out of memory"
    PEER_LOST = "peer lost"
    """It only says that another rank is gone."""
    NOT_MET = "not met"
    """The ranks did not come together in ``init_process_group``."""
    TIMED_OUT = "timed out"
    """A collective waited in vain for ranks that were there."""
    GPU_FAULT = "GPU fault"
    """By the driver's word, of the hardware."""
    GPU_PROGRAM = "GPU program"
    """By the driver's word, of the program."""
    ABORTED = "aborted"
    """SIGABRT: of gloo and NCCL when a peer vanishes, else the program's own."""
    KILLED = "killed"
    """By a signal from outside."""
    CRASHED = "crashed"
    """By a signal of the program's own."""
    LEFT = "left"
    """Without a word: ``os._exit``, a native crash."""


@dataclass(frozen=True)
class Row:
    """What becomes of one kind of failure.

    Attributes:
        payer: of another attempt.
        code: as Flyte shows it; "" where the end has one of its own (an exception's class, a signal's name).
        echo: how far it is from a cause: 0 for a cause, 4 for a mere word of another's loss.
        hint: what the user can do.
    """

    payer: Payer = Payer.NOBODY
    code: str = ""
    echo: int = 0
    hint: str = ""


_NOT_MET_HINT = (
    "call init_process_group() without world_size, rank and init_method (the ranks have them in their variables), in "
    "every rank; a file:// or a store of an earlier round does not bring them together again"
)
_TIMED_OUT_HINT = (
    "compare where the ranks were (stacks are in the nodes' logs): all have to call the same collectives in the "
    "same order, also where data are uneven or one rank alone evaluates or saves. If all were in the same one, raise "
    "init_process_group(timeout=...)"
)
_GPU_PROGRAM_HINT = (
    "run it with CUDA_LAUNCH_BLOCKING=1, or a small case of it under compute-sanitizer, to see which kernel does it; "
    "where one GPU alone reports this with every program, it is the hardware's after all"
)
_GPU_FAULT_HINT = (
    "drain that node (kubectl cordon, kubectl drain) until the GPU is reset or replaced; nvidia-smi -q there says more"
)

ROWS: dict[Failure, Row] = {
    Failure.OWN: Row(),
    Failure.RECOVERABLE: Row(Payer.RETRIES),
    Failure.MISTAKE: Row(),
    Failure.FULL_DISK: Row(
        hint="write less, give the task more ephemeral storage, or move scratch to a larger volume (Scratch(path=...))"
    ),
    Failure.FULL_SHARED_MEMORY: Row(
        hint="give the task more: @task(shared_memory=...); or have DataLoader workers hand over less at a time"
    ),
    Failure.NODE_DISK: Row(Payer.FLYTE, "SYSTEM:NodeDisk"),
    Failure.GPU_HARDWARE: Row(Payer.FLYTE, "SYSTEM:GpuHardware"),
    Failure.STORAGE: Row(Payer.FLYTE),
    Failure.WORKER_KILLED: Row(),
    # It will most likely come again. Whether it is tried is for the user's retries to say.
    Failure.OUT_OF_MEMORY: Row(Payer.RETRIES, "USER:OutOfMemory"),
    Failure.PEER_LOST: Row(Payer.RETRIES, "USER:PeersLost", 4),
    Failure.NOT_MET: Row(Payer.RETRIES, "USER:RanksNotMet", 4, _NOT_MET_HINT),
    # An abort that others had to wait for would have ended the round long before their time was up.
    Failure.TIMED_OUT: Row(Payer.RETRIES, "USER:CollectiveTimeout", 2, _TIMED_OUT_HINT),
    Failure.GPU_FAULT: Row(Payer.FLYTE, hint=_GPU_FAULT_HINT),
    Failure.GPU_PROGRAM: Row(hint=_GPU_PROGRAM_HINT),
    # The peers of a rank that aborts raise before its end is seen: time alone cannot tell.
    Failure.ABORTED: Row(echo=3),
    Failure.KILLED: Row(Payer.FLYTE),
    Failure.CRASHED: Row(),
    Failure.LEFT: Row(),
}


# --- what an exception says ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ChainLink:
    """One exception of a chain.

    Attributes:
        type: its class, without the module.
        message: what it says.
        depth: how many were raised from it, one after the other.
        in_setup: whether ``init_process_group`` is in its traceback.
    """

    type: str
    message: str
    depth: int = 0
    in_setup: bool = False


def linked(error: BaseException) -> Iterator[tuple[BaseException, int]]:
    """``error``, all that it was raised from or while handling, and the members of groups; each once, with its depth.

    Whether a context is to be shown (``raise ... from None``) is no matter: it is evidence all the same.
    """
    todo, met = [(error, 0)], {id(error)}
    while todo and len(met) <= _MOST_LINKS:
        current, depth = todo.pop(0)
        yield current, depth
        members = getattr(current, "exceptions", ())
        below = [current.__cause__, current.__context__, *(members if isinstance(members, (tuple, list)) else ())]
        for each in below:
            if isinstance(each, BaseException) and id(each) not in met:
                met.add(id(each))
                todo.append((each, depth + 1))


def in_setup(error: BaseException) -> bool:
    """Whether an exception was raised in torch's ``init_process_group``."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "init_process_group" and code.co_filename.endswith("distributed_c10d.py"):
            return True
        trace = trace.tb_next
    return False


# The classes say nothing: DistBackendError is every error of NCCL, HorovodInternalError every one of a collective.
_OF_COLLECTIVES_BY_CLASS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "HorovodInternalError"})
_CLASSES = _OF_COLLECTIVES_BY_CLASS | {"RuntimeError", "TimeoutError", "DistError", "UnknownError", "AbortedError"}
# Only what gloo, NCCL, torch's store and Horovod write: a service that the task calls loses connections too.
_OF_COLLECTIVES = re.compile(
    r"\bNCCL\b|\bnccl[A-Z]|gloo/|\bGloo |monitoredBarrier|remote process exited|Horovod has been shut down|TCPStore|"
    r"\bc10d\b|(client|server) socket has|^wait timeout after \d+ ?ms, keys: |waiting for (clients|workers)\. |"
    r"Timed out initializing process group"
)

_IFNAME = (
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name an interface of every node (ip -brief address), or are not set"
)
_MISTAKES: tuple[tuple[re.Pattern[str], str, bool], ...] = (
    (
        re.compile(r"Duplicate GPU detected"),
        "give each rank a GPU of its own before the first collective: torch.cuda.set_device(current_rank().local_rank)",
        True,
    ),
    (re.compile(r"Unable to find address for|no socket interface found|enforce fail at \S*device\.cc"), _IFNAME, True),
    (
        re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE),
        "take a free port (bind to port 0), or let init_process_group() use MASTER_ADDR and MASTER_PORT as they are",
        False,
    ),
    (re.compile(r"ncclInvalid(Usage|Argument)|\binvalid (usage|argument)\b|Invalid rank requested"), "", True),
    (re.compile(r"ncclUnhandledCudaError|unhandled cuda error|unsupported gloo device"), "", False),
    # Horovod compares what ranks submit under one name, and tells all of them (horovod/common/controller.cc).
    (re.compile(r"^Mismatched "), "", False),
)
"""Text, hint, and whether the same comes at every start of the ranks."""

# gloo; torch's store, where ranks meet for a new group; NCCL's watchdog, which ends its process.
_TIMED_OUT = re.compile(
    r"gloo/.*Timed out waiting \d+ ?ms for |wait timeout after \d+ ?ms, keys: |"
    r"Watchdog caught collective operation timeout|Socket Timeout|\bWait timeout\b|Timeout waiting for key|"
    r"Timed out after \d+ seconds waiting for |Timed out initializing process group"
)
_LOST = re.compile(
    r"ncclRemoteError|remote process exited|was aborted|closed by (remote )?peer|connection was (likely )?closed|"
    r"connection reset|connection refused|connection timed out|broken pipe|no route to host|network is unreachable|"
    r"socket closed|application timeout caused pair closure|"
    r"failed to recv|client socket has (timed out|failed)|failed to pass monitoredbarrier|"
    r"connectFullMesh failed|horovod has been shut down",
    re.IGNORECASE,
)
_WORKER_KILLED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: Killed|exited unexpectedly)"
)
# torch's own texts, which have no errno: of the rank, and of a DataLoader's worker (as a cause, in the traceback).
_SHARED_MEMORY_FULL = re.compile(
    r"</torch_[^>]*>[^\n]*No space left on device|No space left on device[^\n]*/dev/shm/|"
    r"DataLoader worker \([^)]*\) is killed by signal: Bus error"
)
# CUDA's own texts of cudaErrorECCUncorrectable (214) and cudaErrorNvlinkUncorrectable (220), as torch passes them on:
# both are the hardware's alone (CUDA Runtime API, "Data types used by CUDA Runtime"). A message only begins with them
# where torch wrote it.
_GPU_HARDWARE = re.compile(r"CUDA error: uncorrectable (ECC|NVLink) error ")
_OF_CUDA = ("RuntimeError", "AcceleratorError")


def of_link(link: ChainLink) -> Failure | None:
    """What one exception says of collectives: MISTAKE, PEER_LOST, NOT_MET or TIMED_OUT; None for anything else."""
    if link.type not in _CLASSES:
        return None
    text = link.message
    if link.type not in _OF_COLLECTIVES_BY_CLASS and _OF_COLLECTIVES.search(text) is None:
        return None
    if mistake(text) is not None:
        return Failure.MISTAKE
    is_late = speaks_of_timeout(text)
    # Horovod's class is its word that a collective failed, for elastic training to begin again.
    if not is_late and _LOST.search(text) is None and link.type != "HorovodInternalError":
        return None
    if link.in_setup:
        return Failure.NOT_MET
    return Failure.TIMED_OUT if is_late else Failure.PEER_LOST


def of_chain(links: Iterable[ChainLink]) -> Failure | None:
    """What a whole chain says of collectives: the deepest word counts, which was the first to be said.

    An emergency save that fails after a peer was lost is an echo; a barrier that fails after "Duplicate GPU" is not.
    """
    words = [(link.depth, failure is not Failure.MISTAKE, failure) for link in links if (failure := of_link(link))]
    return max(words, key=lambda word: word[:2])[2] if words else None


def speaks_of_timeout(text: str) -> bool:
    """Whether a failed collective, or the log of a rank that aborted, says that its time was up, and no more."""
    return _TIMED_OUT.search(text) is not None


def mistake(text: str) -> tuple[str, bool] | None:
    """The hint for a mistake that a library of collectives refuses, and whether it comes again; None for no such."""
    return next(((hint, repeats) for pattern, hint, repeats in _MISTAKES if pattern.search(text)), None)


def of_exception(
    links: Sequence[ChainLink],
    errnos: Iterable[int],
    *,
    by_class: Failure,
    world_size: int,
    is_word_of_loss: bool = False,
) -> Failure:
    """The row of an exception.

    Args:
        links: its chain, the exception itself first.
        errnos: of every OSError in it.
        by_class: OWN, RECOVERABLE or STORAGE, which its class says.
        world_size: how many ranks there are: one alone has no peer to lose.
        is_word_of_loss: whether it is an error of this package's that only says that a rank is gone.
    """
    word = of_chain(links)
    if world_size > 1 and (is_word_of_loss or word not in (None, Failure.MISTAKE)):
        return word if word not in (None, Failure.MISTAKE) else Failure.PEER_LOST
    numbers, texts = frozenset(errnos), [link.message for link in links]
    of_cuda = links[0].message if links and links[0].type in _OF_CUDA else ""
    rows = (
        # The user's word wins over all that is known; and a disk that is full stays full, whoever says it.
        (Failure.RECOVERABLE, by_class is Failure.RECOVERABLE),
        (Failure.MISTAKE, word is Failure.MISTAKE),
        (Failure.FULL_SHARED_MEMORY, any(map(_SHARED_MEMORY_FULL.search, texts))),
        (Failure.FULL_DISK, bool(numbers & FULL_ERRNOS)),
        (Failure.NODE_DISK, bool(numbers & BROKEN_ERRNOS)),
        (Failure.GPU_HARDWARE, _GPU_HARDWARE.match(of_cuda) is not None),
        (Failure.WORKER_KILLED, by_class is Failure.OWN and any(map(_WORKER_KILLED.search, texts))),
    )
    return next((failure for failure, is_so in rows if is_so), by_class)


def repeats(failure: Failure, links: Iterable[ChainLink], errnos: Iterable[int]) -> bool:
    """Whether what an exception says comes again at every start of the ranks; an echo says nothing of that."""
    if ROWS[failure].echo:
        return False
    if failure is Failure.MISTAKE:
        found = [mistake(link.message) for link in links if of_link(link) is Failure.MISTAKE]
        return any(again for _, again in filter(None, found))
    return not FULL_ERRNOS.isdisjoint(errnos)


def worker_killed(text: str) -> str:
    """The process ids of the DataLoader's workers that a text calls killed, as it has them; "" for none."""
    match = _WORKER_KILLED.search(text)
    return match[1] if match else ""


# --- what an end is --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EndOfRank:
    """All that is known of how one rank ended.

    Attributes:
        raised: the row of its exception, where it raised one.
        name: the exception's class, without the module.
        code: the exception's own code, if it has one.
        of_another: whether the exception tells of another rank's failure.
        signal: that ended it; 0 for none.
        exit_code: of its process.
        is_killed: whether a signal that was not sent here ended it.
        out_of_memory: whether the kernel's out-of-memory killer was at work while the ranks ran.
        timed_out: whether a collective of it waited in vain, by its exception or its log.
        others: whether it is known where others of its node were then.
        gpu_code: of what its GPU has reported; "" for nothing.
        gpu_is_hardware: whether that is the hardware's.
    """

    raised: Failure | None = None
    name: str = ""
    code: str = ""
    of_another: bool = False
    signal: int = 0
    exit_code: int | None = None
    is_killed: bool = False
    out_of_memory: bool = False
    timed_out: bool = False
    others: bool = False
    gpu_code: str = ""
    gpu_is_hardware: bool = False

    @property
    def failure(self) -> Failure:
        """Its row."""
        of_worker = self.raised is Failure.WORKER_KILLED
        rows = (
            (Failure.GPU_FAULT, self.gpu_is_hardware),
            (Failure.GPU_PROGRAM, bool(self.gpu_code)),
            (Failure.TIMED_OUT, self.timed_out),
            (Failure.OUT_OF_MEMORY, self.out_of_memory and of_worker),
            (self.raised or Failure.OWN, self.raised is not None),
            (Failure.OUT_OF_MEMORY, self.out_of_memory and self.signal == signal.SIGKILL),
            (Failure.ABORTED, self.signal == signal.SIGABRT),
            (Failure.KILLED, self.signal in _FROM_OUTSIDE),
            (Failure.CRASHED, self.is_killed),
        )
        return next((failure for failure, is_so in rows if is_so), Failure.LEFT)

    @property
    def row(self) -> Row:
        """What becomes of it."""
        return ROWS[self.failure]

    @property
    def echo(self) -> int:
        """How far it is from a cause: as :attr:`Row.echo`; nearer by one where it is known what others did, and 3 for
        an exception that tells of another rank's failure."""
        if self.failure is Failure.TIMED_OUT and self.others:
            return 1
        return self.row.echo or (3 if self.of_another else 0)

    @property
    def is_echo(self) -> bool:
        """Whether it may be only the echo of another rank's."""
        return self.row.echo > 0

    @property
    def label(self) -> str:
        """Its code: the row's, or its own."""
        if self.row.code:
            return self.row.code
        if self.gpu_code:
            return self.gpu_code
        if self.raised is not None:
            return self.code or ("SYSTEM:Storage" if self.raised is Failure.STORAGE else f"USER:{self.name}")
        if self.failure is Failure.LEFT:
            return f"USER:Exit{self.exit_code}"
        return f"{'SYSTEM' if self.failure is Failure.KILLED else 'USER'}:{name_of(self.signal).replace(' ', '')}"


def name_of(number: int) -> str:
    """A signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
