"""Tasks of two or three nodes with two ranks each; ``$TEST_HOW`` says what happens to the last rank."""

from __future__ import annotations

import os
from dataclasses import replace

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=6, rendezvous=90, upload=60)


def happen(how: str) -> None:
    """What becomes of this rank; the others are on their way into a collective."""
    me = current_rank()
    if how == "gate":
        say(f"round {me.round} rank {me.rank} of {me.world_size} pod {os.environ['TEST_POD']} pid {os.getpid()}")
        wait_for_word()
    if me.rank != me.world_size - 1:
        return
    if how == "block the next round" and me.round == 0:  # a file is where this node is to make the ranks' directories
        (me.scratch.parents[1] / "round-1").touch()
        raise ValueError("no learning rate")


def told(total: float, size: int) -> str:
    """What the task returns."""
    me = current_rank()
    return f"{total:g} from {size} of {me.world_size} ranks on {me.nnodes} nodes in round {me.round}"


@task(task_config=SafeTorch(nnodes="1:2", timeouts=Timeouts(stop=0.5, heartbeat=6, rendezvous=8, upload=60)))
def torch_alone() -> str:
    """One pod is enough."""
    happen("gate")
    return told(0.0, 1)


@task(task_config=SafeHorovod(nnodes="2:3", nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def horovod() -> str:
    import horovod.torch as hvd
    import torch

    hvd.init()
    happen(os.environ["TEST_HOW"])
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
    return told(total.item(), hvd.size())


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def torch() -> str:
    import torch as pytorch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    happen(os.environ["TEST_HOW"])
    total = pytorch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    size = dist.get_world_size()
    dist.destroy_process_group()
    return told(total.item(), size)


# Two that are there wait half a heartbeat for the third.
THREE_COME = replace(TIMEOUTS, heartbeat=60)


@task(task_config=SafeHorovod(nnodes="2:3", nproc_per_node=2, max_restarts=1, timeouts=THREE_COME))
def horovod_three() -> str:
    return horovod.task_function()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=1, max_restarts=1, timeouts=THREE_COME))
def torch_three() -> str:
    return torch.task_function()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=1, timeouts=TIMEOUTS))
def torch_done_early() -> str:
    """Rank 0 is done, and has its outputs on its node's disk, while the other still works."""
    me = current_rank()
    if me.rank != 0:
        say(f"rank {me.rank} round {me.round}")
        wait_for_word()
    return f"round {me.round}"


@task(
    task_config=SafeTorch(
        nnodes="2:3", nproc_per_node=1, timeouts=Timeouts(stop=600, exit=5, heartbeat=600, rendezvous=600)
    )
)
def torch_patient() -> str:
    return torch.task_function()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=1, timeouts=Timeouts(rendezvous=1, heartbeat=6)))
def torch_impatient() -> str:
    return "never"
