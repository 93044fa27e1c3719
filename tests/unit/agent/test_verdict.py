"""The exit contract: what Flyte is told about each way a job can fail."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace

import pytest

from flytekitplugins_safedist.agent.verdict import (
    Verdict,
    cause_of,
    judge,
    of_error,
    of_full_memory,
    told_by,
)
from flytekitplugins_safedist.coordinator.books import NO_ROUND
from flytekitplugins_safedist.coordinator.messages import Status as NodeStatus
from flytekitplugins_safedist.errors import (
    ConfigError,
    FencedError,
    MissingDependencyError,
    PayloadError,
    RankFailedError,
    RankKilledError,
    SafedistError,
    ScratchError,
    TopologyError,
)
from flytekitplugins_safedist.failures import Failure, Payer
from flytekitplugins_safedist.rank.outcome import Raised, RankOutcome, Status
from flytekitplugins_safedist.rank.outcome_text import describe
from tests.harness.outcomes import failed, outcome, raised

OVER = "max_restarts=0"
DISK = "limited to 2.0 GiB by Scratch(size_limit=...): 3.0 GiB in /scratch/job (rank 1: 3.0 GiB, rank 0: 1.0 KiB)"


def verdict(cause: RankOutcome) -> Verdict:
    return judge(cause, OVER, disk=DISK)


USERS = Payer.NOBODY
USERS_RETRIES = Payer.RETRIES
PLATFORMS = Payer.FLYTE


def killed(number: int, *, out_of_memory: bool = False) -> RankOutcome:
    return outcome(0, Status.KILLED, exit_code=-number, out_of_memory=out_of_memory)


ECC = "CUDA error: uncorrectable ECC error encountered"
NVLINK = "CUDA error: uncorrectable NVLink error detected during the execution"
ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("cause", "ends", "code", "error"),
    [
        (failed(), USERS, "USER:ValueError", RankFailedError),
        (failed(of=raised(repeats=True)), USERS, "USER:ValueError", RankFailedError),
        (failed(of=raised(failure=Failure.RECOVERABLE)), USERS_RETRIES, "USER:ValueError", RankFailedError),
        (failed(of=raised(failure=Failure.STORAGE)), PLATFORMS, "SYSTEM:Storage", RankKilledError),
        (failed(of=raised("OSError", errnos=(errno.EIO,))), PLATFORMS, "SYSTEM:NodeDisk", RankKilledError),
        (failed(of=raised("OSError", errnos=(errno.ESTALE,))), PLATFORMS, "SYSTEM:NodeDisk", RankKilledError),
        (failed(of=raised("RuntimeError", ECC)), PLATFORMS, "SYSTEM:GpuHardware", RankKilledError),
        (failed(of=raised("torch.AcceleratorError", NVLINK)), PLATFORMS, "SYSTEM:GpuHardware", RankKilledError),
        (failed(of=raised("RuntimeError", ASSERT)), USERS, "USER:RuntimeError", RankFailedError),
        (failed(of=raised("RuntimeError", f"seen: {ECC}")), USERS, "USER:RuntimeError", RankFailedError),
        (failed(of=raised("ValueError", ECC)), USERS, "USER:ValueError", RankFailedError),
        (failed(of=raised("OSError", errnos=(errno.ENOSPC, errno.EIO))), USERS, "USER:OSError", RankFailedError),
        (outcome(0, Status.EXITED, exit_code=0), USERS, "USER:Exit0", RankFailedError),
        (outcome(0, Status.EXITED, exit_code=7), USERS, "USER:Exit7", RankFailedError),
        (killed(signal.SIGKILL, out_of_memory=True), USERS_RETRIES, "USER:OutOfMemory", RankFailedError),
        (killed(signal.SIGTERM, out_of_memory=True), PLATFORMS, "SYSTEM:SIGTERM", RankKilledError),
        *(
            (killed(number), PLATFORMS, f"SYSTEM:{number.name}", RankKilledError)
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
        ),
        *(
            (killed(number), USERS, f"USER:{number.name}", RankFailedError)
            for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
        ),
    ],
)
def test_each_way_to_fail_is_what_the_contract_says(
    cause: RankOutcome, ends: Payer, code: str, error: type[SafedistError]
) -> None:
    judged = verdict(cause)
    assert (judged.payer, judged.error.error_code, type(judged.error)) == (ends, code, error)
    assert judged.time_ns == cause.time_ns
    assert f"{describe(cause)}\n\nNot restarted in place: max_restarts=0." in str(judged.error)
    if isinstance(judged.error, RankFailedError):
        assert judged.error.error_code == code


IN_A_WORKER = """Caught RuntimeError in DataLoader worker process 0.
Original Traceback (most recent call last):
    return cls._new_using_fd_cpu(size)
RuntimeError: """
BUS_ERROR = (
    "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)


@pytest.mark.parametrize(
    "of",
    [
        raised("OSError", "[Errno 28] No space left on device: '/dev/shm/torch_123'", errnos=(errno.ENOSPC,)),
        raised("RuntimeError", "unable to write to file </torch_71_302_0>: No space left on device (28)"),
        raised("RuntimeError", "unable to allocate shared memory(shm) for file </torch_7_3>: No space left on device"),
        raised("RuntimeError", f"{IN_A_WORKER}unable to write to file </torch_7_3_0>: No space left on device (28)"),
        raised("RuntimeError", BUS_ERROR),
    ],
)
def test_full_shared_memory_is_named_in_all_of_torchs_words_and_not_called_scratch(of: Raised) -> None:
    judged = verdict(failed(0, of=of))
    text = str(judged.error)
    assert text.startswith("rank 0 found the node's shared memory (/dev/shm) full.\n\n")
    assert "@task(shared_memory=...)" in text
    assert "Scratch" not in text
    assert (judged.payer, judged.error.error_code) == (USERS, f"USER:{of.type}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_directory_limit_and_who_filled_it(number: int) -> None:
    cause = failed(0, of=raised("OSError", os.strerror(number), errnos=(number,)))
    text = str(verdict(cause).error)
    assert text.startswith(f"rank 0 ran out of disk space. Scratch is {DISK}\n\n")
    lost = str(judge(cause, OVER).error)
    assert lost.startswith("rank 0 ran out of disk space. Scratch is not measured: its node was lost before\n\n")
    assert describe(cause) in text
    assert text.endswith(
        "Not restarted in place: max_restarts=0. Fix: write less, give the task more ephemeral storage, "
        "or move scratch to a larger volume (Scratch(path=...) or SAFEDIST_SCRATCH_ROOT)"
    )


ECHO = raised("RuntimeError", "Connection closed by peer", failure=Failure.PEER_LOST)


def test_a_failure_that_only_echoes_ranks_that_returned_is_recoverable_and_names_them():
    found = judge(failed(0, of=ECHO), OVER, disk=DISK, returned=(1, 3))
    assert (found.payer, found.error.error_code) == (USERS_RETRIES, "USER:PeersLost")
    text = str(found.error)
    first = "ranks 1, 3 finished early, and the others then lost the connection to it. The first of them is: rank 0 "
    assert text.startswith(first)
    assert "raised RuntimeError: Connection closed by peer" in text.splitlines()[0]
    assert "same number of collective operations" in text


def test_who_has_waited_in_vain_for_ranks_that_returned_has_lost_no_connection():
    waited = failed(0, of=raised("FsTimeoutError", "ranks did not come", of_another=True))
    found = judge(waited, OVER, disk=DISK, returned=(1,))
    assert (found.payer, found.error.error_code) == (USERS, "USER:FsTimeoutError")


def test_an_echo_of_nobody_is_recoverable_and_points_at_the_network():
    found = judge(failed(0, of=ECHO), OVER, disk=DISK)
    assert (found.payer, found.error.error_code) == (USERS_RETRIES, "USER:PeersLost")
    assert "network" not in str(found.error), "one node has none"
    assert "finished early" not in str(found.error)
    many = judge(failed(0, of=ECHO), OVER, disk=DISK, nodes=2)
    assert "look at the network between the nodes" in str(many.error)


@pytest.mark.parametrize(("returned", "code"), [((), "USER:CollectiveTimeout"), ((1,), "USER:PeersLost")])
def test_who_did_not_come_to_a_monitored_barrier_was_late_where_nobody_was_gone(returned, code):
    """torch says the same of a rank that is late and of one that is gone."""
    late = raised("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 8000 ms", failure=ECHO.failure)
    assert judge(failed(0, of=late), OVER, disk=DISK, returned=returned).error.error_code == code


def test_what_a_library_of_collectives_refuses_is_the_ranks_own_and_says_what_to_do():
    text = "NCCL error in: x.hpp:275, invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"
    own = verdict(failed(of=raised("torch.distributed.DistBackendError", text)))
    assert (own.payer, own.error.error_code) == (USERS, "USER:DistBackendError")
    assert "torch.cuda.set_device" in str(own.error)
    assert "network" not in str(own.error)


@pytest.mark.parametrize("failure", [Failure.NOT_MET, Failure.TIMED_OUT])
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_waited_in_vain_hear_of_a_network_only_where_there_is_one(failure, nodes):
    cause = failed(of=raised("DistStoreError", failure=failure))
    judged = judge(cause, OVER, disk=DISK, nodes=nodes)
    assert judged.payer == USERS_RETRIES
    assert ("network" in str(judged.error)) == (nodes > 1)
    assert ("collective" in str(judged.error)) == (failure is Failure.TIMED_OUT)


@pytest.mark.parametrize(
    ("returned", "has_met", "code"),
    [((), True, "USER:SIGABRT"), ((1,), True, "USER:PeersLost"), ((1,), False, "USER:SIGABRT")],
)
def test_an_abort_is_an_echo_only_where_somebody_was_gone_whom_it_had_met(returned, has_met, code):
    aborted = outcome(0, Status.KILLED, exit_code=-6, has_met=has_met)
    assert bool(aborted.echo) == has_met
    assert judge(aborted, OVER, disk=DISK, returned=returned).error.error_code == code


def test_an_error_that_the_user_calls_recoverable_stays_so_when_the_disk_was_full() -> None:
    cause = failed(of=raised("FlyteRecoverableException", failure=Failure.RECOVERABLE, errnos=(errno.ENOSPC,)))
    judged = verdict(cause)
    assert judged.payer is Payer.RETRIES
    assert "ran out of disk space" in str(judged.error)


def test_a_mistake_that_would_repeat_is_not_the_platforms_and_a_ghost_has_no_say() -> None:
    mistakes = [PayloadError("x"), MissingDependencyError("x"), TopologyError("x"), ScratchError("x"), ConfigError([])]
    assert [each for each in (*mistakes, FencedError("x")) if of_error(each) is not None] == []
    assert FencedError("x").is_platforms


def test_a_job_that_ends_for_lost_nodes_whose_memory_was_full_is_out_of_memory() -> None:
    end = of_full_memory("node 1: no sign of life; its memory was full (99.0 GiB of 100.0 GiB in use)")
    assert (end.payer, end.error.error_code) == (USERS_RETRIES, "USER:OutOfMemory")
    assert "99.0 GiB of 100.0 GiB" in str(end.error)


def test_the_rounds_before_are_told_in_a_line_each() -> None:
    earlier = ["round 0 ended: rank 1 failed (SIGKILL)", "round 1 ended: node 1: its connection was lost"]
    text = str(judge(failed(round=3), OVER, disk=DISK, earlier=earlier).error)
    assert f"\n\nBefore that, {earlier[0]}.\n\nBefore that, {earlier[1]}.\n\nNot restarted" in text


@pytest.mark.parametrize(("message", "step"), [(ASSERT, 5), (ECC, -1)])
def test_a_broken_gpus_step_is_no_place_in_the_code(message, step):
    """The same again at the same step would count as the code's or the data's, for which no restart is spent."""
    assert (
        cause_of(replace(failed(of=raised("RuntimeError", message)), step=5), NO_ROUND, NODE, limit=8000).step == step
    )


NODE = NodeStatus("job", "a", 0, 1.0, "here", "machine")


def test_a_failure_is_told_in_one_text_that_fits_and_is_read_again():
    long = failed(of=raised("RuntimeError", "ü" * 100_000))
    cause = cause_of(long, NO_ROUND, NODE, limit=8000, disk="2 GiB")
    assert 4000 < len(cause.text.encode()) <= 8000
    read, disk = told_by(cause)
    assert (read.rank, read.raised.type, disk) == (long.rank, "RuntimeError", "2 GiB")
    assert (cause.machine, cause.where) == ("machine", "node 0 (host here, Kubernetes node machine)")
    assert told_by(replace(cause, text="")) is None


@pytest.mark.parametrize("failure", [Failure.NOT_MET, Failure.PEER_LOST])
def test_who_was_told_a_loopback_address_by_another_node_hears_of_names_not_of_the_network(failure):
    text = (
        "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:16794$0"
    )
    cause = failed(of=raised("RuntimeError", text, failure=failure))
    many, one = (str(judge(cause, OVER, disk=DISK, nodes=nodes).error) for nodes in (2, 1))
    assert "its own name leads to a loopback address" in many
    assert 'GLOO_SOCKET_IFNAME": "eth0"' in many
    assert "without world_size" not in many
    assert "loopback" not in one
