"""What texts of NCCL, gloo, torch and Horovod say, alone and in chains; what becomes of one rank's end."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch.multiprocessing
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins_safedist import errors, meeting
from flytekitplugins_safedist.checkpoint.group import failed_elsewhere
from flytekitplugins_safedist.errors import CheckpointError, FsError, StorageError
from flytekitplugins_safedist.failures import (
    ERRNOS,
    SIGNALS,
    ChainLink,
    Failure,
    Outlook,
    Payer,
    evidence,
    how_ended,
    mistake,
    of_chain,
    of_link,
    outlook,
    repeats,
    speaks_of_timeout,
)
from flytekitplugins_safedist.hangs.gpus import GpuFault
from flytekitplugins_safedist.rank import recording
from flytekitplugins_safedist.rank.outcome import Raised, Status
from flytekitplugins_safedist.rank.outcome_text import describe
from tests.harness.objectstore import ClientError
from tests.harness.outcomes import failed, outcome, raised
from tests.harness.procs import DEADLINE

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup  # which pytest brings there

LOST, LATE, MISTAKE, OWN = Failure.PEER_LOST, Failure.TIMED_OUT, Failure.MISTAKE, None
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
UNIQUE = "setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0'"
SHUT = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)

# The texts as people reported them: by class and what it says, repository and number of the issue, text.
REPORTED = {
    ("DistBackendError", LOST): {
        "NVIDIA/nccl#1514": (
            "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version "
            "2.14.3\nncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer "
            "user<50260>"
        ),
        "NVIDIA/nccl#934": (
            "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1347, remote process exited or there "
            f"was a network error, NCCL version 2.18.5\n{REMOTE}"
        ),
        "PeterGriffinJin/Search-R1#170": "NCCL communicator was aborted on rank 0.",
    },
    ("RuntimeError", LOST): {
        "tatsu-lab/stanford_alpaca#207": (
            f"NCCL error: remote process exited or there was a network error, NCCL version 2.14.3\n{REMOTE}Last "
            "error:\nNET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0, vendor "
            "err 129"
        ),
        "RVC-Project/Retrieval-based-Voice-Conversion-WebUI#1882": (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895"
        ),
        "aws-samples/aws-do-eks#50": (
            "Gloo connectFullMesh failed ... timed out connecting: SO_ERROR: Connection refused, "
            "remote=[127.0.0.1]:14215"
        ),
        "sgl-project/sglang#3226": (
            "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
        ),
    },
    ("DistBackendError", MISTAKE): {
        "verl-project/verl#161": (
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN "
            f"for details), NCCL version 2.20.5\n{USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device "
            "10"
        ),
        "NVIDIA/nccl#1241": f"NCCL error in: X.cpp:1287, invalid usage, NCCL version 2.17.1\n{USAGE}",
        "Lightning-AI/pytorch-lightning#20219": "NCCL error: Invalid rank requested",
        "Alibaba-NLP/DeepResearch#107": (
            "NCCL error in: NCCLUtils.hpp:94, internal error\nBootstrap : no socket interface found"
        ),
    },
    ("HorovodInternalError", MISTAKE): {
        "horovod/horovod#3929": "ncclCommInitRank failed: invalid usage",
    },
    ("RuntimeError", MISTAKE): {
        "pytorch/pytorch#17349": "NCCL error in: ProcessGroupNCCL.cpp:260, unhandled cuda error",
        "aws-samples/aws-do-eks#51": (
            "[enforce fail at .../gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ^lo"
        ),
        "pytorch/pytorch#135355": (
            "[enforce fail at .../gloo/transport/tcp/device.cc:276] ss1.ss_family == ss2.ss_family. 2 vs 10"
        ),
    },
    ("RuntimeError", OWN): {
        "NVIDIA/nccl#207": "NCCL error in: /torch/lib/c10d/ProcessGroupNCCL.cpp:260, unhandled system error",
    },
    ("RuntimeError", LATE): {
        "pytorch/pytorch#82091": (
            f"[1] is {UNIQUE}, but store->get('0') got error: Timeout waiting for key: default_pg/0/0 after 1800000 ms"
        ),
        "tczhangzhi/pytorch-distributed#18": (
            "Timed out initializing process group in store based barrier on rank: 2, for key: "
            "store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)"
        ),
    },
    ("DistNetworkError", MISTAKE): {
        "meta-pytorch/torchtune#1025": (
            "The server socket has failed to listen on any local network address. The server socket has failed to "
            "bind to [::]:29500 (errno: 98 - Address already in use)."
        ),
    },
    ("DistNetworkError", LOST): {
        "pytorch/pytorch#118666": "Connection reset by peer",
    },
    ("TimeoutError", LOST): {
        "lllyasviel/ControlNet#382": (
            "The client socket has timed out after 1800s while trying to connect to (127.0.0.1, 48391)."
        ),
    },
    ("DistStoreError", LATE): {
        "OpenRLHF/OpenRLHF#1040": "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "alibaba/Pai-Megatron-Patch#468": "Socket Timeout",
    },
    ("UnknownError", LOST): {
        "horovod/horovod#3412": SHUT,
    },
}


def test_what_is_reported_in_public_is_read_right() -> None:
    told = [
        (where, of_link(ChainLink(type_, text)), says)
        for (type_, says), of in REPORTED.items()
        for where, text in of.items()
    ]
    assert [each for each in told if each[1] is not each[2]] == []


TENSORPIPE = "(this error originated at tensorpipe/transport/"


def test_only_what_a_library_of_collectives_writes_is_its_word() -> None:
    says = [
        ("HorovodInternalError", "", LOST),  # its class is its word that a collective failed
        ("HorovodInternalError", "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor", MISTAKE),
        ("DistNetworkError", "failed to recv, got 0 bytes", LOST),
        # what gloo tells the peers of a rank whose time was up
        ("RuntimeError", "[/x/gloo/transport/tcp/pair.cc:1] Application timeout caused pair closure", LOST),
        ("RuntimeError", "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms", LOST),
        (
            "RuntimeError",
            "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
            LATE,
        ),
        # torch's RPC, as it tells the caller of a process that was killed
        ("RuntimeError", f"eof {TENSORPIPE}shm/connection_impl.cc:259)", LOST),
        ("RuntimeError", f"Followers ['w1'] timed out in _all_gather after 0.00 seconds. eof {TENSORPIPE}", LOST),
        ("RuntimeError", f"ECONNREFUSED: connection refused {TENSORPIPE}uv/connection_impl.cc:90)", LOST),
        ("RuntimeError", "On WorkerInfo(id=1, name=w1): eof of the table", OWN),
        ("DistStoreError", "wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/1", LATE),
        ("DistBackendError", "NCCL error in: something that nobody has seen yet", OWN),
        ("ValueError", "connection closed by peer", OWN),
        ("RuntimeError", "database: socket timeout, connection reset by peer", OWN),
        ("RuntimeError", "address already in use", OWN),
        ("TimeoutError", "[Errno 110] Connection timed out", OWN),
        ("RuntimeErrorOfMine", "gloo/transport: broken pipe", OWN),
        ("MyHorovodInternalErrorHandler", "", OWN),
        ("RuntimeError", "CUDA error: out of memory", OWN),
    ]
    assert [(type_, text, of_link(ChainLink(type_, text))) for type_, text, _ in says] == says


def test_a_log_says_that_a_collective_timed_out() -> None:
    watchdog = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)"
    assert speaks_of_timeout(f"...\n{watchdog}\n...")
    assert not speaks_of_timeout("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31121")
    assert not speaks_of_timeout("Timed out waiting 30 ms for a shard")


# --- chains ----------------------------------------------------------------------------------------------------------
PEER = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31121"
DUPLICATE = "NCCL error in: x.hpp:275, invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"


class StepFailed(Exception):
    pass


def raised_from(cause: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def while_handling(context: BaseException, error: BaseException) -> BaseException:
    error.__context__ = context
    return error


def hidden(context: BaseException, error: BaseException) -> BaseException:
    error.__context__, error.__suppress_context__ = context, True
    return error


def of(error: BaseException, world_size: int = 2) -> Raised:
    return recording.record(error, "", world_size=world_size)


@pytest.mark.parametrize("wrap", [raised_from, while_handling, hidden])
def test_a_lost_peer_that_the_users_code_wraps_is_an_echo(wrap) -> None:
    wrapped = wrap(RuntimeError(PEER), StepFailed("step 5 failed"))
    assert of(wrapped).failure is Failure.PEER_LOST
    assert of(wrapped, world_size=1).failure is Failure.OWN
    assert of(wrap(ValueError("mine"), StepFailed("step 5 failed"))).failure is Failure.OWN


def test_an_emergency_save_that_fails_after_a_peer_was_lost_is_an_echo() -> None:
    full = while_handling(RuntimeError(PEER), OSError(errno.ENOSPC, "full"))
    assert (of(full).failure, of(full).repeats) == (Failure.PEER_LOST, False)
    assert of(full, world_size=1).repeats
    assert not of(while_handling(RuntimeError(PEER), ImportError("of the handler"))).repeats


def test_a_lost_peer_in_a_group_is_an_echo() -> None:
    group = BaseExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("more", [RuntimeError(PEER)])])
    assert of(group).failure is Failure.PEER_LOST
    assert of(ExceptionGroup("tasks", [ValueError("x")])).failure is Failure.OWN


@pytest.mark.parametrize("wrap", [raised_from, while_handling, hidden])
def test_what_another_rank_has_told_of_its_failure_is_an_echo_whatever_is_made_of_that(wrap) -> None:
    assert of(wrap(failed_elsewhere(1, "OSError: full"), StepFailed("x"))).of_another
    assert not of(wrap(CheckpointError("mine"), StepFailed("x"))).of_another


def test_a_users_class_of_one_of_ours_that_does_not_call_the_constructor_is_recorded() -> None:
    class Bare(CheckpointError):
        def __init__(self) -> None:
            Exception.__init__(self, "bare")

        def __str__(self) -> str:
            return "bare"

    assert not of(Bare()).of_another


def test_whether_another_ranks_failure_comes_again_is_for_that_one_to_say() -> None:
    assert not of(failed_elsewhere(1, "OSError: full")).repeats
    assert of(CheckpointError("mine")).repeats


@pytest.mark.parametrize("there", ["nobody", "an agent that stands still"])
def test_a_rank_that_cannot_ask_the_others_any_more_is_an_echo_whatever_is_made_of_that(there, monkeypatch) -> None:
    """Its agent has ended, or its round is over: of why that is a rank knows nothing."""
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.01)
    path = f"{tempfile.mkdtemp()}/socket"  # a short one
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(path)
        if there != "nobody":
            agent.listen()
        with pytest.raises(FsError) as met:
            meeting.Meeting(path, "job", 0).add("key", 1)
    assert of(met.value).failure is Failure.PEER_LOST
    assert of(raised_from(met.value, CheckpointError("a save has failed"))).failure is Failure.PEER_LOST
    assert of(while_handling(met.value, StepFailed("x"))).failure is Failure.PEER_LOST


def test_what_was_said_first_counts() -> None:
    mistake = raised_from(RuntimeError(DUPLICATE), while_handling(RuntimeError(PEER), StepFailed("x")))
    assert of(mistake).failure is Failure.PEER_LOST, "side by side: whoever lost a peer is no cause"
    assert of(while_handling(RuntimeError(DUPLICATE), RuntimeError(PEER))).failure is Failure.MISTAKE
    assert of(while_handling(RuntimeError(PEER), RuntimeError(DUPLICATE))).failure is Failure.PEER_LOST


def test_a_chain_that_is_a_ring_or_has_no_end_is_read_as_far_as_it_says_something() -> None:
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert [each for each, _ in evidence(one, str)] == [one, two]
    many: BaseException = ValueError("0")
    for number in range(1000):
        many = raised_from(many, ValueError(str(number)))
    assert len(evidence(many, str)) < 100


def test_in_init_process_group_no_collective_has_failed() -> None:
    late, lost = "Timed out after 31 seconds waiting for clients. 1/3 clients joined.", "Connection reset by peer"
    assert of_link(ChainLink("DistStoreError", late, in_setup=True)) is Failure.NOT_MET
    assert of_link(ChainLink("DistNetworkError", lost, in_setup=True)) is Failure.NOT_MET
    in_use = "The server socket has failed to listen: EADDRINUSE"
    assert of_link(ChainLink("DistNetworkError", in_use, in_setup=True)) is Failure.MISTAKE
    assert (
        of_chain([ChainLink("StepFailed", "x"), ChainLink("DistStoreError", late, 1, in_setup=True)]) is Failure.NOT_MET
    )


def test_torchs_own_end_of_a_setup_without_the_others_is_that() -> None:
    import datetime

    from torch import distributed

    store = distributed.HashStore()
    with pytest.raises(Exception) as met:
        distributed.init_process_group(
            "gloo", store=store, rank=0, world_size=2, timeout=datetime.timedelta(milliseconds=300)
        )
    assert of(met.value).failure is Failure.NOT_MET, met.value


def test_a_mistake_comes_again_where_it_surely_does() -> None:
    assert of(RuntimeError(DUPLICATE)).repeats
    assert not of(RuntimeError("[c10d] The server socket has failed to bind: EADDRINUSE")).repeats
    assert not repeats(Failure.OWN, [ChainLink("RuntimeError", DUPLICATE)])


# --- one rank's end --------------------------------------------------------------------------------------------------
KILLED_WORKER = "DataLoader worker (pid 25974) is killed by signal: Killed. "
NCCL_SHARES = (
    "NCCL error in: x.cpp:81, unhandled system error, NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\nError while creating shared memory segment /dev/shm/nccl-vzIpS6 (size 9637888)"
)
GONE_PROCESSES = (
    "process 1 terminated with signal SIGKILL",  # torch.multiprocessing.spawn
    "A process in the process pool was terminated abruptly while the future was running or pending.",
    "A worker process managed by the executor was unexpectedly terminated. [...]\n\nThe exit codes of the workers are "
    "{SIGKILL(-9)}\nDetailed tracebacks of the workers should have been printed",  # joblib
    "One of the subprocesses has abruptly died during map operation.To debug the error, disable multiprocessing.",
    "Command '['make-tiles', '7']' died with <Signals.SIGKILL: 9>.",
    "Attempted to run task 'tile-7b' on 4 different workers, but all those workers died while running it. The last",
    '\n"""\nTraceback (most recent call last):\n  File "pool.py", line 1367, in mark_as_worker_lost\n    raise '
    'WorkerLostError(\nbilliard.exceptions.WorkerLostError: Worker exited prematurely: signal 9 (SIGKILL) Job: 0.\n"""',
    "The worker died unexpectedly while executing this task. Check python-core-worker-*.log files for more",  # Ray's
    "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 7496\nThe actor is dead because",
    "\n=====\ntrain FAILED\n-----\nRoot Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  "
    "exitcode  : -9 (pid: 31749)  (SIGKILL)\n  error_file: <N/A>\n",  # torch.distributed.run
)
GONE_WORKER = "DataLoader worker (pid(s) 25974, 25975) exited unexpectedly"


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        (KILLED_WORKER, Failure.WORKER_KILLED),
        (GONE_WORKER, Failure.WORKER_KILLED),
        *((text, Failure.WORKER_KILLED) for text in GONE_PROCESSES),
        ("process 1 terminated with signal SIGSEGV", Failure.OWN),
        ("The exit codes of the workers are {SIGSEGV(-11)}", Failure.OWN),
        ("WorkerLostError: Worker exited prematurely: signal 11 (SIGSEGV) Job: 0.", Failure.OWN),
        ("Command '['make-tiles', '7']' died with <Signals.SIGTERM: 15>.", Failure.OWN),
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", Failure.OWN),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n"
            "The actor is dead because it was killed by `ray.kill`.",
            Failure.OWN,
        ),
        ("unable to mmap 4096 bytes from file </torch_71_302_0>: Cannot allocate memory (12)", Failure.OWN),
        ("unable to open file </models/torch_7.pt>: No such file or directory (2)", Failure.OWN),
        ("unable to write to file </torch_71_302_0>: No space left on device (28)", Failure.FULL_SHARED_MEMORY),
        ("DataLoader worker (pid 71) is killed by signal: Bus error. It is possible", Failure.FULL_SHARED_MEMORY),
        (f"{NCCL_SHARES}, error: No space left on device (28)", Failure.FULL_SHARED_MEMORY),
        (NCCL_SHARES, Failure.OWN),  # an older one, which does not say why
    ],
)
def test_what_a_worker_died_of_may_be_below_the_exception(message: str, failure: Failure) -> None:
    assert of(RuntimeError(message)).failure is failure
    assert of(raised_from(RuntimeError(message), StepFailed("x"))).failure is failure


@pytest.mark.processes
def test_what_a_process_that_is_gone_was_to_hand_over_is_lost_with_it() -> None:
    """A DataLoader says so of its worker, but not of one that the kernel has not quite ended yet."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=hands_over, args=(queue,))
    process.start()
    process.join(DEADLINE)
    with pytest.raises(ConnectionRefusedError) as met:
        queue.get(timeout=DEADLINE)
    lost = of(met.value)
    assert lost.failure is of(raised_from(met.value, StepFailed("x"))).failure is Failure.WORKER_KILLED
    assert "lost a process that it had started, and raised ConnectionRefusedError: " in describe(failed(of=lost))
    assert of(ConnectionRefusedError("of the user's own")).failure is Failure.OWN


def hands_over(queue: Any) -> None:
    queue.put(torch.ones(4))
    queue.close()
    queue.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("message", "trace", "lost"),
    [
        (KILLED_WORKER, "", ""),
        ("step 5 failed", KILLED_WORKER, "lost DataLoader worker(s) 25974 (process ids), and "),
        ("step 5 failed", GONE_PROCESSES[0], "lost a process that it had started, and "),
    ],
)
def test_that_a_process_was_lost_stands_in_the_first_line_once(message: str, trace: str, lost: str) -> None:
    raised = Raised("StepFailed", message, trace, failure=Failure.WORKER_KILLED)
    assert f"(n0) {lost}raised StepFailed: {message}" in describe(failed(of=raised))


class OutOfMemoryError(Exception):
    """As Ray's: known by its name."""

    __module__, __qualname__ = "ray.exceptions", "OutOfMemoryError"


def test_rays_word_that_memory_ran_out_is_believed() -> None:
    assert of(OutOfMemoryError("x")).failure is Failure.OUT_OF_MEMORY
    assert of(raised_from(OutOfMemoryError("x"), StepFailed("x"))).failure is Failure.OUT_OF_MEMORY
    assert of(raised_from(OutOfMemoryError("x"), FlyteRecoverableException("x"))).failure is Failure.RECOVERABLE


def test_a_worker_that_was_killed_was_out_of_memory_where_the_kernel_counts_one() -> None:
    lost = raised("RuntimeError", failure=Failure.WORKER_KILLED)
    end, short = failed(of=lost), failed(of=lost, out_of_memory=True)
    assert (end.label, end.failure.row.payer) == ("USER:RuntimeError", Payer.NOBODY)
    assert (short.label, short.failure.row.payer) == ("USER:OutOfMemory", Payer.RETRIES)
    assert failed(out_of_memory=True).label == "USER:ValueError"


def test_every_row_says_who_pays_and_no_echo_is_free() -> None:
    rows = [each.row for each in Failure]
    assert all(row.payer is not Payer.FLYTE for row in rows if row.echo)
    assert all(row.code.startswith("SYSTEM:") == (row.payer is Payer.FLYTE) for row in rows if row.code)


def test_the_order_of_what_is_known_of_one_end() -> None:
    facts = {"raised": raised(failure=Failure.PEER_LOST), "out_of_memory": True, "timed_out": True}
    everything = outcome(0, Status.KILLED, exit_code=-signal.SIGKILL, **facts)
    fault = GpuFault(0, "GPU-7", "Xid 79", "SYSTEM:GpuXidError", 1)
    in_time = replace(everything, timed_out=False)
    assert replace(everything, gpu=fault).failure is Failure.GPU_FAULT
    assert everything.failure is Failure.TIMED_OUT
    assert in_time.failure is Failure.PEER_LOST
    assert replace(in_time, raised=None).failure is Failure.OUT_OF_MEMORY
    assert replace(in_time, raised=None, out_of_memory=False).failure is Failure.KILLED


def test_the_users_word_wins_over_disks_and_stores() -> None:
    for number in (errno.ENOSPC, errno.EIO):
        mine = raised_from(OSError(number, "x"), FlyteRecoverableException("again"))
        assert of(mine).failure is Failure.RECOVERABLE
    both = raised_from(OSError(errno.ENOSPC, "x"), raised_from(OSError(errno.EIO, "x"), StorageError("x")))
    assert of(both).failure is Failure.FULL_DISK


class TryAgain(CheckpointError, FlyteRecoverableException):  # type: ignore[misc]
    """A user's class, of one of ours."""


@pytest.mark.parametrize("cause", [ConnectionError("x"), StorageError("x")])
def test_what_a_store_that_was_away_has_the_users_code_raise_is_what_the_user_calls_it(cause: Exception) -> None:
    assert of(raised_from(cause, CheckpointError("x"))).failure is Failure.STORAGE
    assert of(raised_from(cause, TryAgain("x"))).failure is Failure.RECOVERABLE
    assert of(raised_from(cause, StepFailed("x"))).failure is Failure.OWN


def test_nodes_with_names_of_two_kinds_of_address_are_told_of_gloos_interface() -> None:
    hint, comes_again = mistake("[enforce fail at .../device.cc:276] ss1.ss_family == ss2.ss_family. 2 vs 10") or (
        "",
        0,
    )

    assert "some nodes have their own names under IPv4, others under IPv6: let GLOO_SOCKET_IFNAME" in hint
    assert comes_again


# --- the tables of numbers --------------------------------------------------------------------------------------------
def test_each_signal_has_a_likely_reason_and_an_unknown_one_its_name_or_number() -> None:
    assert (
        how_ended(-11)
        == "SIGSEGV: invalid memory access in native code (a C extension, a CUDA library, an ABI mismatch)"
    )
    assert (how_ended(-signal.SIGUSR1), how_ended(-37), how_ended(3)) == ("SIGUSR1", "signal 37", "exit code 3")
    assert all(signal.Signals(number).name in how_ended(-number) for number in SIGNALS)


def test_each_errno_names_an_error_of_ours_whose_row_is_the_errnos() -> None:
    for number, meaning in ERRNOS.items():
        kind = getattr(errors, meaning.error)
        assert issubclass(kind, errors.FsError)
        assert meaning.meaning
        assert meaning.hint
        if meaning.failure is Failure.NODE_DISK:
            assert kind("x").failure is Failure.NODE_DISK, number


class NoCredentialsError(Exception):
    """As botocore's: known by its name."""


class CredentialRetrievalError(Exception):
    """As botocore's, which had credentials before and asks for new ones: the service on this node is away."""


def test_what_an_error_means_where_a_store_was_asked() -> None:
    expected = [
        *((ClientError(code), Outlook.DENIED) for code in ("AccessDenied", "ExpiredToken", "InvalidToken")),
        *((ClientError(code), Outlook.MISSING) for code in ("NoSuchKey", "NoSuchBucket")),
        *((ClientError(code), Outlook.TRANSIENT) for code in ("SlowDown", "503")),
        (NoCredentialsError(), Outlook.DENIED),
        (CredentialRetrievalError(), Outlook.TRANSIENT),
        (PermissionError("no"), Outlook.DENIED),
        (FileNotFoundError("no"), Outlook.MISSING),
        (OSError(errno.ENOSPC, "full"), Outlook.LOCAL),
        (OSError(errno.EROFS, "read-only"), Outlook.LOCAL),
        (RuntimeError("can't start new thread"), Outlook.LOCAL),
        (raised_from(RuntimeError("can't start new thread"), OSError("of botocore")), Outlook.LOCAL),
        (OSError(errno.EIO, "broken"), Outlook.TRANSIENT),
        (ConnectionResetError("x"), Outlook.TRANSIENT),
        (TimeoutError(), Outlook.TRANSIENT),
        (ImportError("s3fs"), Outlook.UNSUPPORTED),
        (ValueError("Protocol not known: s4"), Outlook.UNSUPPORTED),
        (ValueError("Invalid endpoint: minio.flyte:9000"), Outlook.TRANSIENT),
        (json.JSONDecodeError("of a token service", "<html>", 0), Outlook.TRANSIENT),
        (raised_from(ClientError("ExpiredToken"), OSError("s3fs wraps it")), Outlook.DENIED),
        (raised_from(ConnectionRefusedError("x"), FileNotFoundError("of fsspec's HTTP")), Outlook.TRANSIENT),
        (while_handling(ClientError("AccessDenied"), ValueError("mine")), Outlook.TRANSIENT),
    ]
    assert [(error, outlook(error)) for error, _ in expected] == expected


def test_what_flytekit_raises_without_a_cause_has_the_one_that_it_was_handling() -> None:
    forgets = type("FlyteDownloadDataException", (Exception,), {})("x")
    assert outlook(while_handling(ClientError("AccessDenied"), forgets)) is Outlook.DENIED
    assert outlook(raised_from(while_handling(ClientError("NoSuchKey"), forgets), RuntimeError("x"))) is Outlook.MISSING
