"""What a failure is: the one table of its code, who pays, and whose echo it is; and what an exception, the numbers of
the kernel and the words of a store mean. Pure. docs/failures.md has its codes from it
(scripts/failures.py).

A rank names the row of its own exception (:func:`of_exception`): it alone has the whole of it. Its agent knows more
(the signal, the container's memory, the GPU): the row of the end is :attr:`.rank.outcome.RankOutcome.failure`.
"""

from __future__ import annotations

import errno
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

_MOST_LINKS = 64
"""Of an exception's chain that are read: a group may have thousands of members."""

_OURS = "flytekitplugins_safedist."


class Payer(str, Enum):
    """Who pays for another attempt."""

    NOBODY = "nobody"
    """The task fails."""
    RETRIES = "retries"
    """The task's own ``retries``."""
    FLYTE = "flyte"
    """The platform's budget."""


@dataclass(frozen=True)
class Row:
    """What becomes of one kind of failure. What the user reads of it is in docs/failures.md.

    Attributes:
        word: for it, in a record.
        what: happens: how its row in docs/failures.md begins.
        payer: of another attempt.
        code: as Flyte shows it; "" where the end has one of its own (an exception's class, a signal's name).
        echo: how far it is from a cause: 0 for a cause, 4 for a mere word of another's loss.
        repeats: whether the same comes again at every start of the ranks.
        opening: of the text, before the rank that failed; with ``{rank}`` and ``{scratch}``.
        hint: what the user can do.
    """

    word: str
    what: str
    payer: Payer = Payer.NOBODY
    code: str = ""
    echo: int = 0
    repeats: bool = False
    opening: str = ""
    hint: str = ""


class Failure(str, Enum):
    """The kinds of failures. What is which, :func:`of_exception` and :attr:`.RankOutcome.failure` say.

    Attributes:
        row: what becomes of it.
    """

    row: Row

    def __new__(cls, row: Row) -> Failure:
        self = str.__new__(cls, row.word)
        self._value_, self.row = row.word, row
        return self

    OWN = Row("own", "a rank raises")
    COMES_AGAIN = Row(
        "comes again",
        "a rank raises what would come again at every start (`ImportError`, `SyntaxError`, a wrong configuration)",
        repeats=True,
    )
    RECOVERABLE = Row("recoverable", "a rank raises `FlyteRecoverableException`", Payer.RETRIES)
    MISTAKE = Row(
        "mistake",
        "a library of collectives refuses what a rank asks of it (two ranks on one GPU, an interface that is not "
        "there, a port in use)",
    )
    # It will most likely come again. Whether it is tried is for the user's retries to say.
    OUT_OF_MEMORY = Row(
        "out of memory", "a rank, or a process that it has started, is OOM-killed", Payer.RETRIES, "USER:OutOfMemory"
    )
    WORKER_KILLED = Row(
        "worker killed", "a process that a rank has started is killed, and the kernel was not out of memory"
    )
    KILLED = Row("killed", "a rank is killed from outside", Payer.FLYTE)
    CRASHED = Row("crashed", "a rank crashes in native code")
    # The peers of a rank that aborts raise before its end is seen: time alone cannot tell.
    ABORTED = Row("aborted", "a rank aborts in native code", echo=3)
    LEFT = Row("left", "a rank leaves by `os._exit`")
    FULL_DISK = Row(
        "full disk",
        "the disk is full, or `Scratch(size_limit=…)` is exceeded (by default: most of the pod's limit of ephemeral "
        "storage)",
        repeats=True,
        opening="rank {rank} ran out of disk space. Scratch is {scratch}\n\n",
        hint="write less, give the task more ephemeral storage, or move scratch to a larger volume (Scratch(path=...) "
        "or SAFEDIST_SCRATCH_ROOT)",
    )
    FULL_SHARED_MEMORY = Row(
        "full shared memory",
        "the node's shared memory (`/dev/shm`) is full",
        opening="rank {rank} found the node's shared memory (/dev/shm) full.\n\n",
        hint="give the task more: @task(shared_memory=...); or have DataLoader workers hand over less at a time",
    )
    PEER_LOST = Row(
        "peer lost",
        "all failed ranks failed only because they lost the connection to another rank",
        Payer.RETRIES,
        "USER:PeersLost",
        echo=4,
        opening="every rank that failed had only lost its connection to another one: none failed by itself, and no "
        "node was lost. The first to lose one: ",
    )
    NOT_MET = Row(
        "not met",
        "the ranks do not come together in `init_process_group` (in a store of their own, or one of an earlier round)",
        Payer.RETRIES,
        "USER:RanksNotMet",
        echo=4,
        opening="the ranks did not come together in init_process_group, and none failed otherwise. The first to give "
        "up: ",
        hint="call init_process_group() without world_size, rank and init_method (the ranks have them in their "
        "variables), in every rank; a file:// or a store of an earlier round does not bring them together again",
    )
    # An abort that others had to wait for would have ended the round long before their time was up.
    TIMED_OUT = Row(
        "timed out",
        "a collective times out though every rank is there: most likely ranks called different ones",
        Payer.RETRIES,
        "USER:CollectiveTimeout",
        echo=2,
        opening="a collective timed out: most likely ranks called different collectives. ",
        hint="compare where the ranks were (stacks are in the nodes' logs): all have to call the same collectives in "
        "the same order, also where data are uneven or one rank alone evaluates or saves. If all were in the same "
        "one, raise init_process_group(timeout=...)",
    )
    HANG = Row("hang", "ranks wait in a collective that one does not come to", Payer.RETRIES, "USER:HangError")
    NOT_READY = Row(
        "not ready", "a rank does not begin the function in `Timeouts.start`", Payer.RETRIES, "USER:RanksNotReady"
    )
    NODE_DISK = Row("node's disk", "a node's disk or file server fails (EIO, ESTALE)", Payer.FLYTE, "SYSTEM:NodeDisk")
    GPU_HARDWARE = Row(
        "GPU hardware",
        "a GPU's memory or its NVLink fails (CUDA's errors 214 and 220)",
        Payer.FLYTE,
        "SYSTEM:GpuHardware",
    )
    GPU_FAULT = Row(
        "GPU fault",
        "a rank fails as its GPU reports a fault of the hardware (Xid 48, 74, 79, …, or the GPU is lost)",
        Payer.FLYTE,
        hint="drain that node (kubectl cordon, kubectl drain) until the GPU is reset or replaced; nvidia-smi -q there "
        "says more",
    )
    GPU_PROGRAM = Row(
        "GPU program",
        "a rank fails as its GPU reports an error of the program (Xid 13, 31, 43, 45)",
        hint="run it with CUDA_LAUNCH_BLOCKING=1, or a small case of it under compute-sanitizer, to see which kernel "
        "does it; where one GPU alone reports this with every program, it is the hardware's after all",
    )
    STORAGE = Row(
        "storage", "storage stays down for a rank, or a node lacks code or inputs", Payer.FLYTE, "SYSTEM:Storage"
    )
    NOT_STARTED = Row(
        "not started",
        "with `nnodes=1`, ranks cannot be started, or what starts them dies (of several nodes, that pod is replaced)",
        Payer.FLYTE,
        "SYSTEM:RanksNotStarted",
    )
    STOPPED = Row("stopped", "a pod with `nnodes=1` is told to stop (SIGTERM)", Payer.FLYTE, "SYSTEM:Stopped")
    UNFIT = Row(
        "unfit", "a [check of the nodes](preflight.md) before the first rank fails", Payer.FLYTE, "SYSTEM:Preflight"
    )
    NOT_TOGETHER = Row(
        "not together", "not every node comes within `Timeouts.rendezvous`", Payer.FLYTE, "SYSTEM:RendezvousTimeout"
    )
    NODE_LOST = Row(
        "node lost",
        "nodes are lost more often than `max_replacements`, or one for good",
        Payer.FLYTE,
        "SYSTEM:NodeLost",
    )


# --- what a class says -----------------------------------------------------------------------------------------------
_OF_CLASS: dict[str, Failure] = {
    # The order matters: flytekit's system errors (upload, download) are recoverable by inheritance.
    "flytekit.exceptions.system.FlyteSystemException": Failure.STORAGE,
    "flytekit.exceptions.base.FlyteRecoverableException": Failure.RECOVERABLE,
    **{
        f"{_OURS}errors.{name}": failure
        for failure, names in {
            Failure.OWN: ("CodeNotFoundError",),
            Failure.PEER_LOST: ("MeetingLostError",),
            Failure.STORAGE: ("StagingError", "StorageError"),
            Failure.NODE_DISK: ("StaleHandleError", "FsIoError"),
            Failure.NOT_STARTED: ("LaunchError",),
            Failure.KILLED: ("RankKilledError",),
            Failure.STOPPED: ("JobInterruptedError",),
            Failure.UNFIT: ("PreflightError",),
            Failure.NODE_LOST: ("NotReplacedError", "GroupClosedError", "NodeLostError"),
            Failure.NOT_TOGETHER: ("RendezvousError",),
            Failure.HANG: ("HangError",),
            Failure.COMES_AGAIN: (
                *("ConfigError", "IncompatibleVersionError", "MissingDependencyError", "NotInTaskError"),
                *("NoTerminalError", "PayloadError", "CheckpointError", "PathBlockedError", "FsAccessError"),
                *("ReadOnlyFsError", "FsUnsupportedError", "TopologyError"),
            ),
        }.items()
        for name in names
    },
    "ImportError": Failure.COMES_AGAIN,
    "SyntaxError": Failure.COMES_AGAIN,
}
"""By the qualified name of a class: nothing is imported to compare with. The first of them in an error's bases counts,
in this table's order; an error of ours comes before those that it inherits from."""


def kinds(cls: type[BaseException]) -> tuple[str, ...]:
    """The qualified names of a class and of its bases; Python's own without their module."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return tuple(name.removeprefix("builtins.") for name in names)


def of_kinds(names: Sequence[str]) -> Failure:
    """The row that a class alone says, by its :func:`kinds`."""
    return next((failure for name, failure in _OF_CLASS.items() if name in names), Failure.OWN)


# --- what a number of the kernel's says ------------------------------------------------------------------------------
class Tries(Enum):
    """How often a call to a file system that failed is made again."""

    NONE = "none"
    AT_ONCE = "at once"
    """Nothing was done and nothing is wrong. Python retries some calls by itself (PEP 475), but not mkdir, rename,
    link."""
    LONG = "long"
    """The next look-up by name gets a fresh handle from the server, or the server is back."""
    FEW = "few"
    """A soft-mounted or failing-over server says this once and then works; a broken disk says it always."""


@dataclass(frozen=True)
class Errno:
    """What an errno means, of a file system.

    Attributes:
        meaning: for people.
        hint: what to do.
        error: the class in :mod:`.errors` of what is raised for it.
        tries: that are worth making.
        failure: the row of an exception that comes of it, whoever raised that.
        stays: whether a store's client that says it speaks of this machine's disk, and trying again changes nothing.
    """

    meaning: str
    hint: str
    error: str = "FsError"
    tries: Tries = Tries.NONE
    failure: Failure = Failure.OWN
    stays: bool = False


_OF_SERVER = ("the file system or its server failed", "look at the kernel log and the file server", "FsIoError")
_FULL = ("NoSpaceError", Tries.NONE, Failure.FULL_DISK, True)
_CANNOT = ("the file system cannot do this", "choose another file system", "FsUnsupportedError")
ERRNOS: dict[int, Errno] = {
    errno.EACCES: Errno(
        "permission denied", "check owner and mode of the directory and this task's user", "FsAccessError"
    ),
    errno.EPERM: Errno("operation not permitted", "check the mount's options and this task's user", "FsAccessError"),
    errno.ENOENT: Errno("the directory that it belongs in is not there", "make it first, with ensure_dir"),
    errno.EROFS: Errno(
        "the file system is read-only", "mount it writable, or choose another directory", "ReadOnlyFsError", stays=True
    ),
    errno.ENOSPC: Errno(
        "no space (or no inodes) left", "free space there, or choose a directory on a larger volume", *_FULL
    ),
    errno.EDQUOT: Errno("the disk quota is used up", "free space, or ask for a larger quota", *_FULL),
    errno.EFBIG: Errno("the file is larger than the file system or a limit allows", "write less into one", stays=True),
    errno.ESTALE: Errno(
        "stale file handle",
        "see whether the directory was removed or re-exported",
        "StaleHandleError",
        Tries.LONG,
        Failure.NODE_DISK,
    ),
    errno.ETIMEDOUT: Errno(*_OF_SERVER, Tries.LONG),
    errno.EIO: Errno(*_OF_SERVER, Tries.FEW, Failure.NODE_DISK),
    errno.EREMOTEIO: Errno(*_OF_SERVER, Tries.FEW, Failure.NODE_DISK),
    errno.EUCLEAN: Errno(*_OF_SERVER, failure=Failure.NODE_DISK),
    errno.ECONNRESET: Errno(*_OF_SERVER, Tries.FEW),
    errno.ENOLINK: Errno(*_OF_SERVER, Tries.FEW),
    errno.ENOTCONN: Errno("the file system's server process is gone", "mount it again", "FsIoError", Tries.FEW),
    errno.ENOTDIR: Errno("a file is in the way where a directory is needed", "move the file away", "PathBlockedError"),
    errno.EISDIR: Errno("a directory is in the way", "choose another name, or move it away", "PathBlockedError"),
    errno.ENOTEMPTY: Errno("a directory with contents is in the way", "move it away", "PathBlockedError"),
    errno.EEXIST: Errno("it exists already", "choose another name, or move it away", "PathBlockedError", stays=True),
    errno.ELOOP: Errno("the path goes round in symbolic links", "repair the links", "PathBlockedError", stays=True),
    errno.EBUSY: Errno(
        "something is mounted there, or in use", "unmount it, or choose another name", "PathBlockedError"
    ),
    errno.EOPNOTSUPP: Errno(*_CANNOT),
    errno.ENOSYS: Errno(*_CANNOT),
    errno.ENODEV: Errno(
        "its files cannot be mapped into memory",
        "choose a directory on a local disk: the files there can be mapped into memory",
    ),
    errno.EMFILE: Errno("this process has too many files open", "close some, or raise its limit (ulimit -n)"),
    errno.ENFILE: Errno("this machine has too many files open", "close some, or raise the limit (fs.file-max)"),
    errno.EBADF: Errno("the file was closed in the middle", "see who closes it: the block's code, or a thread"),
    errno.ENAMETOOLONG: Errno("the name is too long for the file system", "choose a shorter one", stays=True),
    errno.EINVAL: Errno("the name or the request is nothing that the file system takes", "choose another name"),
    errno.EXDEV: Errno("it lies on another file system", "make it beside its final place"),
    errno.EINTR: Errno("a signal came", "try again", tries=Tries.AT_ONCE),
    errno.EAGAIN: Errno("it is busy", "try again", tries=Tries.LONG),
}
"""Of file systems, for ranks' files, scratch, staging and uploads alike."""


def of_errno(number: int | None) -> Errno | None:
    """What an errno means; None where nobody knows."""
    return ERRNOS.get(number or 0)


def of_errnos(numbers: Iterable[int]) -> set[Failure]:
    """The rows that these say: a disk that is full; a disk, or a file server, that fails by itself."""
    return {ERRNOS[each].failure for each in numbers if each in ERRNOS}


SIGNALS: dict[int, str] = {
    signal.SIGKILL: "most often the kernel's out-of-memory killer or a memory limit of the pod; else someone's kill -9",
    signal.SIGTERM: "asked to stop from outside: eviction, preemption, or a timeout of the platform",
    signal.SIGINT: "interrupted from outside (Ctrl-C)",
    signal.SIGSEGV: "invalid memory access in native code (a C extension, a CUDA library, an ABI mismatch)",
    signal.SIGBUS: "bus error; in a container most often a full /dev/shm (raise @task(shared_memory=...))",
    signal.SIGABRT: "native code aborted (an assertion in C++, a failed allocation, Gloo or NCCL losing a peer)",
    signal.SIGFPE: "arithmetic error in native code (an integer division by zero)",
    signal.SIGILL: "an instruction that this processor lacks: the wheel was built for another one",
    signal.SIGXCPU: "the CPU time limit was reached",
    signal.SIGXFSZ: "the file size limit was reached",
}
"""The likely reason of a signal that ended a process."""


def name_of(number: int) -> str:
    """A signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(status: int | None) -> str:
    """An exit status for people, as Python has it: negative for a signal, with its likely reason; None for unknown."""
    if status is None:
        return "nobody saw how"
    if status >= 0:
        return f"exit code {status}"
    reason = SIGNALS.get(-status)
    return f"{name_of(-status)}: {reason}" if reason else name_of(-status)


# --- what an exception says ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ChainLink:
    """One exception of a chain.

    Attributes:
        type: its class, without the module.
        message: what it says.
        depth: how many were raised from it, one after the other.
        in_setup: whether ``init_process_group`` is in its traceback.
        has_no_sender: whether the process that was to hand over a tensor was gone when the rank came to fetch that.
        kinds: see :func:`kinds`.
        names: what clients of stores call it: its class, the service's code, HTTP's status.
        errno: of an OSError.
        is_cause: whether the others were raised *from* it (``raise ... from``), and not while it was handled.
        is_hidden: whether one of them hides it (``raise ... from None``).
    """

    type: str
    message: str
    depth: int = 0
    in_setup: bool = False
    has_no_sender: bool = False
    kinds: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    errno: int | None = None
    is_cause: bool = True
    is_hidden: bool = False


_FORGET_THEIR_CAUSE = {"FlyteDownloadDataException", "TypeTransformerFailedError"}
"""flytekit raises these without ``from`` (1.16, ``FileAccessProvider.async_get_data``, ``_literal_map_to_kwargs``)."""


def evidence(error: BaseException, say: Callable[[BaseException], str]) -> list[tuple[BaseException, ChainLink]]:
    """``error``, all that it was raised from or while handling, and the members of groups; each once, itself first.

    Whether a context is to be shown (``raise ... from None``) is no matter to what collectives say: it is evidence all
    the same.

    Args:
        error: an exception.
        say: its text; that may be the user's code.
    """
    todo, met = [(error, 0, True, False, False)], {id(error)}
    found: list[tuple[BaseException, ChainLink]] = []
    while todo and len(found) < _MOST_LINKS:
        each, depth, is_cause, is_hidden, forgets = todo.pop(0)
        found.append((each, _link(each, say(each), depth, is_cause=is_cause, is_hidden=is_hidden)))
        forgets = forgets or type(each).__name__ in _FORGET_THEIR_CAUSE
        below = [
            (each.__cause__, is_cause, is_hidden),
            (each.__context__, is_cause and forgets, is_hidden or each.__suppress_context__),
            *((member, False, is_hidden) for member in members(each)),
            *((member, False, is_hidden) for member in failures_of_ranks(each).values()),
        ]
        for one, as_cause, as_hidden in below:
            if isinstance(one, BaseException) and id(one) not in met:
                met.add(id(one))
                todo.append((one, depth + 1, as_cause, as_hidden, forgets))
    return found


def members(error: BaseException) -> list[BaseException]:
    """Of a group, those that are together in it."""
    found: object = ()
    with suppress(Exception):  # anyone's property
        found = getattr(error, "exceptions", ())
    return [each for each in found if isinstance(each, BaseException)] if isinstance(found, (tuple, list)) else []


def failures_of_ranks(error: BaseException) -> dict[int, BaseException]:
    """Of what torch.distributed.checkpoint raises in every rank: what those that have failed have raised, by rank."""
    found: dict[int, BaseException] = {}
    if type(error).__name__ == "CheckpointException":
        with suppress(Exception):  # another library's may have this name
            found = {rank: pair[0] for rank, pair in error.failures.items()}  # type: ignore[attr-defined]
    return found


def _link(error: BaseException, message: str, depth: int, *, is_cause: bool, is_hidden: bool) -> ChainLink:
    names, number = frozenset({type(error).__name__}), None
    with suppress(Exception):  # properties of anyone's
        names |= _names(error)
        number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else None
    kind, in_setup = type(error), _has_frame(error, "init_process_group", "distributed_c10d.py")
    # A DataLoader sees by itself that its worker has ended, but not while that is still ending.
    no_sender = isinstance(error, _NO_SENDER) and _has_frame(
        error, "rebuild_storage_fd", "multiprocessing/reductions.py"
    )
    facts = (in_setup, no_sender, kinds(kind), names, number)
    return ChainLink(kind.__qualname__, message, depth, *facts, is_cause, is_hidden)


_NO_SENDER = (EOFError, ConnectionError)
"""Not FileNotFoundError: where a process has ended in order, and too early, its socket may be gone with it."""


def _has_frame(error: BaseException, function: str, file: str) -> bool:
    """Whether an exception has come through a function of torch's."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_name == function and code.co_filename.endswith(file) for code in codes)


def _names(error: BaseException) -> set[str]:
    """The service's code of an error of a store, and HTTP's status."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    values = (getattr(error, name, None) for name in ("status", "status_code", "error_code", "code"))
    return {str(code), str(next((value for value in values if isinstance(value, (int, str))), ""))}


# The classes say nothing: DistBackendError is every error of NCCL, HorovodInternalError every one of a collective.
_OF_COLLECTIVES_BY_CLASS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "HorovodInternalError"})
_CLASSES = _OF_COLLECTIVES_BY_CLASS | {"RuntimeError", "TimeoutError", "DistError", "UnknownError", "AbortedError"}
# Only what gloo, NCCL, torch's store, its RPC and Horovod write: a service that the task calls loses connections too.
_OF_COLLECTIVES = re.compile(
    r"\bNCCL\b|\bnccl[A-Z]|gloo/|\bGloo |tensorpipe/|monitoredBarrier|remote process exited|"
    r"Horovod has been shut down|TCPStore|\bc10d\b|(client|server) socket has|"
    r"^wait timeout after \d+ ?ms, keys: |waiting for (clients|workers)\. |Timed out initializing process group"
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
    (
        re.compile(r"ss1\.ss_family == ss2\.ss_family"),
        "some nodes have their own names under IPv4, others under IPv6: let GLOO_SOCKET_IFNAME name an interface of "
        "every node (ip -brief address), or have the names of all pods lead to addresses of one kind",
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
    r"connectFullMesh failed|horovod has been shut down|\beof\b[^\n]* originated at tensorpipe/",
    re.IGNORECASE,
)
# What says that a process of the rank's own is gone, as SIGKILL would have it: of a DataLoader, of torch's mp.spawn and
# its launcher, of pools (Python's, billiard's and loky's, which know the signal), of datasets' map, of subprocess, of
# dask, of Ray.
_WORKER_KILLED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: Killed|exited unexpectedly)|"
    r"^process \d+ terminated with signal SIGKILL|^\s*exitcode\s+: -9 \(|"
    r"^A process in the process pool was terminated abruptly|SIGKILL\(-9\)|^One of the subprocesses has abruptly died|"
    r"died with <Signals\.SIGKILL: 9>|but all those workers died while running it|"
    r"Worker exited prematurely: signal 9 \(|^(?![\s\S]*\bray\.kill\b)The (?:worker died unexpectedly while "
    r"executing|actor died unexpectedly before finishing) this task\.",
    re.MULTILINE,
)
# torch's own texts, which have no errno: of the rank, and of a DataLoader's worker (as a cause, in the traceback); and
# NCCL's, which shares it among the ranks of a node.
_SHARED_MEMORY_FULL = re.compile(
    r"(?:</torch_[^>]*>|/dev/shm/nccl-)[^\n]*No space left on device|No space left on device[^\n]*/dev/shm/|"
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
        return Failure.PEER_LOST if f"{_OURS}errors.MeetingLostError" in link.kinds else None
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


def of_exception(links: Sequence[ChainLink], *, world_size: int) -> Failure:
    """The row of an exception.

    Args:
        links: its chain, the exception itself first.
        world_size: how many ranks there are: one alone has no peer to lose.
    """
    word = of_chain(links)
    if world_size > 1 and word is not None and word is not Failure.MISTAKE:
        return word
    by_class, of_disk, texts = _by_class(links), of_errnos(errnos(links)), [link.message for link in links]
    rows = (
        # The user's word wins over all that is known; and a disk that is full stays full, whoever says it.
        (Failure.RECOVERABLE, by_class is Failure.RECOVERABLE),
        (Failure.MISTAKE, word is Failure.MISTAKE),
        (Failure.FULL_SHARED_MEMORY, any(map(_SHARED_MEMORY_FULL.search, texts))),
        (Failure.FULL_DISK, Failure.FULL_DISK in of_disk),
        (Failure.NODE_DISK, Failure.NODE_DISK in of_disk),
        (Failure.GPU_HARDWARE, links[0].type in _OF_CUDA and _GPU_HARDWARE.match(texts[0]) is not None),
        (Failure.OUT_OF_MEMORY, by_class is Failure.OWN and any(map(_ray_has_killed, links))),
        (Failure.WORKER_KILLED, by_class is Failure.OWN and any(map(_lost_a_process, links))),
    )
    return next((failure for failure, is_so in rows if is_so), by_class)


def _by_class(links: Sequence[ChainLink]) -> Failure:
    """What the class of an exception says. One of ours was perhaps raised from what no user can cause: one of ours that
    is the platform's, or a store's that may pass. What the user's own work has raised is the user's, whatever it is."""
    first, failure = links[0], of_kinds(links[0].kinds)
    if not _is_ours(first) or failure.row.payer is not Payer.NOBODY:
        return failure
    for link in sorted((each for each in links[1:] if each.is_cause), key=lambda each: -each.depth):
        if _is_ours(link):
            if of_kinds(link.kinds).row.payer is Payer.FLYTE:
                return Failure.STORAGE
        elif f"{_OURS}errors.WorkFailedError" not in first.kinds and (known := _outlook(link)) is not None:
            return Failure.STORAGE if known is Outlook.TRANSIENT else failure
    return failure


def _is_ours(link: ChainLink) -> bool:
    return f"{_OURS}errors.SafedistError" in link.kinds


def errnos(links: Iterable[ChainLink]) -> tuple[int, ...]:
    """Those of every OSError that is not hidden."""
    return tuple(link.errno for link in links if link.errno is not None and not link.is_hidden)


def repeats(failure: Failure, links: Iterable[ChainLink]) -> bool:
    """Whether what an exception says comes again at every start of the ranks; an echo says nothing of that."""
    links = list(links)
    if failure.row.echo:
        return False
    if failure is Failure.MISTAKE:
        words = [mistake(link.message) for link in links if of_link(link) is Failure.MISTAKE]
        return any(again for _, again in filter(None, words))
    return failure.row.repeats or Failure.FULL_DISK in of_errnos(errnos(links))


def worker_killed(text: str) -> str | None:
    """The process ids of the DataLoader's workers that a text calls killed, as it has them; "" where it says so of
    another process of the rank's, None where of none."""
    match = _WORKER_KILLED.search(text)
    return match and (match[1] or "")


def _ray_has_killed(link: ChainLink) -> bool:
    """Whether Ray has killed a worker before the kernel would have: it watches the same limit."""
    return "ray.exceptions.OutOfMemoryError" in link.kinds


def _lost_a_process(link: ChainLink) -> bool:
    return link.has_no_sender or worker_killed(link.message) is not None


# --- what a store says -----------------------------------------------------------------------------------------------
class Outlook(Enum):
    """What an error from a store means."""

    MISSING = "missing"
    DENIED = "denied"
    UNSUPPORTED = "unsupported"
    LOCAL = "local"
    """A disk of this machine, or its limit of processes, which say what trying again does not change."""
    TRANSIENT = "transient"


_STORES_WORDS: dict[Outlook, re.Pattern[str]] = {
    # Error codes of S3 (API reference, "Error responses"), GCS and Azure blob storage, and HTTP statuses; exceptions of
    # botocore, aiohttp, azure-core and google-auth, by name: importing them all to compare would cost seconds.
    Outlook.DENIED: re.compile(
        r"AccessDenied|Forbidden|401|403|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken(Exception)?"
        r"|RequestExpired|InvalidToken|TokenRefreshRequired|RequestTimeTooSkewed|AuthenticationFailed"
        r"|AuthorizationFailure|InvalidClientTokenId|UnrecognizedClientException|(Partial|No)CredentialsError"
        r"|TokenRetrievalError|UnauthorizedSSOTokenError|SSOTokenLoadError|ClientAuthenticationError|RefreshError"
        r"|DefaultCredentialsError|ProfileNotFound"
    ),
    Outlook.MISSING: re.compile(
        r"NoSuch(Key|Bucket|Version)|404|410|(Blob|Container)NotFound"
        r"|FlyteDataNotFoundException"  # flytekit's
    ),
    # What asks for patience, or means the network, or that the service of this machine that hands out credentials is
    # away.
    Outlook.TRANSIENT: re.compile(
        r"429|5\d\d|SlowDown|ServiceUnavailable|InternalError|RequestTimeout|OperationAborted"
        r"|ConditionalRequestConflict|Client(Connect|OS|Payload)\w*Error|Server\w*Error"
        r"|\w*(Connection|Timeout)\w*Error|URLError|(Credential|Metadata)RetrievalError"
    ),
}
"""The first of them counts that is what a client or a service calls an error."""


def outlook(error: BaseException) -> Outlook:
    """What an error means where a store was asked. The first cause that is known decides: fsspec's HTTP file system
    says "not found" for everything, a refused connection included. What is unknown counts as passing: tries are
    bounded."""
    return next(filter(None, (_outlook(link) for _, link in _causes_of(error))), Outlook.TRANSIENT)


def decisive(error: BaseException) -> BaseException:
    """The cause of ``error`` that says what it means; ``error`` itself where none does."""
    return next((cause for cause, link in _causes_of(error) if _outlook(link) is not None), error)


def word_of_a_store(error: BaseException) -> Outlook | None:
    """What a store, or the network on the way to it, has said by a code or a name of its own, if it was one."""
    return next(filter(None, (_word(link) for _, link in _causes_of(error))), None)


def names_of(error: BaseException) -> frozenset[str]:
    """All that clients of stores call an error and its causes."""
    return frozenset().union(*(link.names for _, link in _causes_of(error)))


def _causes_of(error: BaseException) -> list[tuple[BaseException, ChainLink]]:
    pairs = [pair for pair in evidence(error, _text) if pair[1].is_cause]
    return sorted(pairs, key=lambda pair: -pair[1].depth)


def _text(error: BaseException) -> str:
    with suppress(Exception):  # anyone's code
        return str(error)
    return ""


def _word(link: ChainLink) -> Outlook | None:
    word = next((outlook for outlook, words in _STORES_WORDS.items() if any(map(words.fullmatch, link.names))), None)
    return word or (Outlook.TRANSIENT if {"ConnectionError", "TimeoutError"} & {*link.kinds} else None)


def _outlook(link: ChainLink) -> Outlook | None:
    """What one error is known to mean by itself; None where nobody has heard of it."""
    known, classes, word = of_errno(link.errno), {*link.kinds}, _word(link)
    rows = (
        (Outlook.DENIED, "PermissionError" in classes),
        (word, word is not None),
        (Outlook.MISSING, classes & {"FileNotFoundError", "NotADirectoryError", "IsADirectoryError"}),
        (Outlook.LOCAL, known is not None and known.stays),
        (Outlook.LOCAL, "RuntimeError" in classes and link.message == "can't start new thread"),
        # fsspec's words
        (Outlook.UNSUPPORTED, "ValueError" in classes and link.message.startswith("Protocol not known")),
        (Outlook.UNSUPPORTED, "ImportError" in classes),
    )
    return next((outlook for outlook, is_so in rows if is_so), None)
