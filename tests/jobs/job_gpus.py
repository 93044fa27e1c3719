"""Ranks whose GPU reports something, as a stand-in for the driver has it; rank 1 is the culprit."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from flytekit import task

from flytekitplugins_safedist import Hangs, SafeTorch, Timeouts, current_rank
from tests.harness import nvml

QUICK = Timeouts(stop=0.5, exit=0.5)

CUDAS = "CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
"""As torch passes it on; the first line is CUDA's, whatever has happened (cudaErrorLaunchFailure)."""


def reports(index: int, **values: int) -> None:
    """A GPU does, from now on."""
    nvml.say(os.environ["TEST_NVML"], index, **values)


def fail(how: str) -> None:
    """Fail, as ranks do whose GPU has: ``xid 79``, ``xid 31, aborts``."""
    what, _, then = how.partition(", ")
    if what == "lost":
        reports(1, lost=1)
    elif what:
        reports(1, xid=int(what.removeprefix("xid ")))
    if then == "aborts":
        os.abort()
    if then == "for another reason":
        raise ValueError("no learning rate")
    raise RuntimeError(CUDAS)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_fails() -> None:
    """Rank 1 fails as TEST_HOW says."""
    if current_rank().rank == 1:
        fail(os.environ["TEST_HOW"])
    signal.pause()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, max_restarts=2))
def one_fails_at_first() -> int:
    """In round 0 alone."""
    if current_rank().rank == 1 and current_rank().round == 0:
        fail(os.environ["TEST_HOW"])
    return current_rank().round


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def both_lose_each_other() -> None:
    """Rank 1's collective fails with its GPU, and says what rank 0's says that has only lost rank 1, and before it."""
    dist.init_process_group("gloo")
    if current_rank().rank == 1:
        reports(1, xid=79)
        dist.barrier()
        signal.pause()
    dist.barrier()
    raise RuntimeError("NCCL error: remote process exited or there was a network error")


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(floor=2, ceiling=4), max_restarts=2))
def one_waits_for_its_gpu() -> None:
    """Both are in the same collective; the GPU of rank 1 is lost, and that of rank 0 spins."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    reports(0, busy=100)
    reports(1, busy=0)
    if current_rank().rank == 1:
        reports(1, xid=119)
        time.sleep(3600)
    dist.all_reduce(torch.ones(3))


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=1, timeouts=QUICK, max_restarts=1))
def a_range() -> str:
    """In round 0 the only GPU of pod 2 needs a reset; then the others have all of their ranks."""
    me = current_rank()
    if me.round == 0:
        if os.environ["TEST_POD"] == "2":
            reports(0, xid=79)
            raise RuntimeError(CUDAS)
        signal.pause()
    return f"{me.world_size} ranks in round {me.round}, pod {os.environ['TEST_POD']} is rank {me.rank}"
