"""Ranks that wait for each other over NCCL on one GPU: it takes each for a host of its own."""

from __future__ import annotations

import os
import select
from datetime import timedelta

import torch
import torch.distributed as dist
from flytekit import task
from job_hangs import QUICK, open_word, sleeps, stops

from flytekitplugins_safedist import Hangs, Preflight, SafeTorch, current_rank
from tests.harness.procs import say

WATCHED = Hangs(action="fail", floor=3, ceiling=6)


def begins(seconds: float = 600, *, warm: bool = True) -> torch.Tensor:
    """Make a group; *warm*: and its communicator."""
    os.environ.update(
        NCCL_HOSTID=f"host-{current_rank().rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_NET="Socket",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_CUMEM_ENABLE="0",
    )
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=seconds))
    tensor = torch.ones(3, device="cuda")
    if warm:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    return tensor


def reduces(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    torch.cuda.synchronize()


def in_a_batch(tensor: torch.Tensor) -> None:
    peer = 1 - current_rank().rank
    operations = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, torch.ones_like(tensor), peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    torch.cuda.synchronize()


def trains(tensor: torch.Tensor) -> None:
    """A step of DistributedDataParallel."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3).cuda(), device_ids=[0])
    for step in range(3):
        if step == 2 and current_rank().rank == 1:
            sleeps()
        loss = model(tensor).sum()
        loss.backward()
        loss.item()


def calls_another(tensor: torch.Tensor) -> None:
    if current_rank().rank == 1:
        dist.broadcast(torch.ones(9, device="cuda"), 0)
        torch.cuda.synchronize()
    reduces(tensor)


def loops(_: torch.Tensor) -> None:
    """On the GPU, as an evaluation does."""
    matrix = torch.ones(512, 512, device="cuda")
    while True:
        (matrix @ matrix).sum().item()


WAITS = {
    "synchronizes": reduces,
    "reads a value": lambda tensor: (dist.all_reduce(tensor), tensor.sum().item()),
    "barrier": lambda _: dist.barrier(),
    "objects": lambda tensor: dist.all_gather_object([None, None], 1),
    "receives": lambda tensor: (dist.recv(tensor, 1), torch.cuda.synchronize()),
    "batch": lambda tensor: (in_a_batch(tensor), torch.cuda.synchronize()),
}
"""What rank 0 does; rank 1 sleeps."""
OTHERS = {"sleeps": lambda _: sleeps(), "stops": lambda _: stops(), "loops": loops}


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=WATCHED))
def hangs(how: str) -> None:
    """Rank 0 waits in one way or another, or for one that does something."""
    tensor = begins(warm=how != "the first one")
    if how == "batch":  # its communicator is there
        in_a_batch(tensor)
    if how in ("trains", "calls another"):
        {"trains": trains, "calls another": calls_another}[how](tensor)
    if current_rank().rank == 1:
        OTHERS.get(how, OTHERS["sleeps"])(tensor)
    WAITS.get(how, reduces)(tensor)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail")))
def times_out() -> None:
    """By the defaults: torch would give it up after 24 seconds, and end the process a minute later."""
    tensor = begins(24)
    if current_rank().rank == 1:
        sleeps()
    reduces(tensor)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=3, ceiling=600)))
def evaluates() -> str:
    """Rank 1, on the GPU, until the test has seen that it is told."""
    tensor = begins()
    if current_rank().rank == 1:
        say("evaluates")
        matrix, word = torch.ones(512, 512, device="cuda"), open_word()
        while not select.select([word], [], [], 0)[0]:
            (matrix @ matrix).sum().item()
    reduces(tensor)
    return "evaluated"


FAULTS = {
    "index": lambda: torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")],
    "memory": lambda: torch.empty(1 << 42, device="cuda"),
    "device": lambda: torch.cuda.set_device(99),
}
BAD = 'extern "C" __global__ void bad(float* p) { p[(1ull << 40) + threadIdx.x] = 1.0f; }'


def writes_anywhere() -> None:
    torch.cuda._compile_kernel(BAD, "bad")((1, 1, 1), (32, 1, 1), (torch.ones(4, device="cuda"),))


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def fails(how: str) -> None:
    """Rank 1, on its GPU."""
    if current_rank().rank == 0:
        sleeps()
    {**FAULTS, "address": writes_anywhere}[how]()
    torch.cuda.synchronize()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def shares_a_gpu() -> None:
    """As it is without any of the above: both ranks take the one there is."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    reduces(torch.ones(3, device="cuda"))


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=QUICK, preflight=Preflight()))
def is_checked() -> str:
    """Before it runs, with its GPU."""
    return f"{torch.ones(3, device='cuda').sum().item():g}"
