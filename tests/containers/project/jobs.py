"""What the pods of container tests train: a line through 24 points, whose weights no number of ranks changes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from flytekit import task

from flytekitplugins_safedist import Hangs, Preflight, SafeHorovod, SafeTorch, Timeouts, current_rank

TIMEOUTS = Timeouts(stop=1, exit=10, upload=900)
STEPS = 20
LEARNING_RATE = 0.5
BY_HAND = os.environ.get("TEST_TRAINED", "by hand") == "by hand"
"""Else by DistributedOptimizer and DistributedDataParallel."""


def say(text: str) -> None:
    """One line to the test."""
    with open(os.environ["TEST_SAID"], "w") as file:
        file.write(text + "\n")


def wait_for_word() -> None:
    """Wait until the test gives the word."""
    with open(os.environ["TEST_WORD"], "rb", buffering=0) as file:
        file.read(1)


def stand(place: str) -> None:
    """Wait at the gate, if that is the place where the test wants ranks to stand (``$TEST_GATE``)."""
    me = current_rank()
    if os.environ.get("TEST_GATE") == place:
        say(f"rank {me.rank} of {me.world_size} round {me.round} pid {os.getpid()}")
        wait_for_word()


def happen(step: int) -> None:
    """What becomes of the last rank in the midst of training (``$TEST_HOW``); the others are in a collective soon."""
    how, me = os.environ.get("TEST_HOW", "nothing"), current_rank()
    if step != STEPS // 2:
        return
    stand("in the function")
    if me.rank != me.world_size - 1:
        return
    if how == "raise":
        raise ValueError("no learning rate")
    if how == "kill once" and me.round == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def line(rank: int, size: int) -> tuple:
    """This rank's part of the points: the same number for each."""
    import torch

    x = torch.arange(24, dtype=torch.float64).reshape(-1, 1) / 24
    return x[rank::size], 3 * x[rank::size] + 0.5


def model() -> Any:
    import torch

    torch.manual_seed(7)
    return torch.nn.Linear(1, 1).double()


def loss(trained: Any, points: tuple) -> Any:
    import torch

    x, y = points
    return torch.nn.functional.mse_loss(trained(x), y)


def told(trained: Any, names: list) -> str:
    """What the task returns."""
    me = current_rank()
    weights = [value.item() for value in trained.parameters()]
    return json.dumps({"weights": weights, "ranks": sorted(names), "round": me.round, "size": me.world_size})


def trained_by(optimizer: Any, forward: Any, points: tuple, steps: int) -> None:
    for step in range(steps):
        happen(step)
        optimizer.zero_grad()
        loss(forward, points).backward()
        optimizer.step()


def trained_by_hand(trained: Any, points: tuple, steps: int, mean: Callable) -> None:
    """The same with one collective for each gradient, and no optimizer of torch's: the first one that is made costs a
    rank a second of CPU for imports (torch._dynamo), which is most of what a pod of these tests would compute."""
    import torch

    for step in range(steps):
        happen(step)
        trained.zero_grad()
        loss(trained, points).backward()
        with torch.no_grad():
            for value in trained.parameters():
                value.sub_(LEARNING_RATE * mean(value.grad))


def with_horovod(steps: int) -> str:
    import horovod.torch as hvd
    import torch

    stand("ranks start")
    hvd.init()
    trained, points = model(), line(hvd.rank(), hvd.size())
    hvd.broadcast_parameters(trained.state_dict(), root_rank=0)
    if BY_HAND:
        trained_by_hand(trained, points, steps, hvd.allreduce)
    else:
        optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
        together = hvd.DistributedOptimizer(optimizer, named_parameters=trained.named_parameters())
        trained_by(together, trained, points, steps)
    me = current_rank()
    names = hvd.allgather_object(f"{hvd.rank()} is {me.local_rank} on node {me.node_rank}")
    stand("function returns")
    return told(trained, names)


def with_torch(steps: int) -> str:
    import torch
    import torch.distributed as dist

    def mean(gradient: Any) -> Any:
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    stand("ranks start")
    dist.init_process_group("gloo")
    trained, points = model(), line(dist.get_rank(), dist.get_world_size())
    if BY_HAND:
        trained_by_hand(trained, points, steps, mean)
    else:
        optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
        trained_by(optimizer, torch.nn.parallel.DistributedDataParallel(trained), points, steps)
    me = current_rank()
    names: list = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"{dist.get_rank()} is {me.local_rank} on node {me.node_rank}")
    dist.destroy_process_group()
    stand("function returns")
    return told(trained, names)


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def horovod_2x2(steps: int) -> str:
    return with_horovod(steps)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def torch_2x2(steps: int) -> str:
    return with_torch(steps)


HANGS = Hangs(action="fail", floor=4, ceiling=60)


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS, hangs=HANGS))
def horovod_watched(steps: int) -> str:
    return with_horovod(steps)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS, hangs=HANGS))
def torch_watched(steps: int) -> str:
    return with_torch(steps)


@task(
    task_config=SafeTorch(nnodes=3, nproc_per_node=1, timeouts=TIMEOUTS, preflight=Preflight(slow=0.001, timeout=900))
)
def torch_checked_3x1(steps: int) -> str:
    """Containers of one machine differ by chance."""
    stand("in the function")
    return "trained"


@task(task_config=SafeTorch(nnodes=3, nproc_per_node=1, timeouts=TIMEOUTS))
def torch_3x1(steps: int) -> str:
    return with_torch(steps)


@task(task_config=SafeHorovod(nnodes=1, nproc_per_node=4, timeouts=TIMEOUTS))
def horovod_1x4(steps: int) -> str:
    return with_horovod(steps)


@task(task_config=SafeHorovod(nnodes="2:3", nproc_per_node=1, max_restarts=1, timeouts=TIMEOUTS))
def horovod_range(steps: int) -> str:
    return with_horovod(steps)


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=1, max_restarts=1, timeouts=TIMEOUTS))
def torch_range(steps: int) -> str:
    return with_torch(steps)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def torch_loader(steps: int) -> str:
    """Batches that a DataLoader's workers hand over, in each rank."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    data = TensorDataset(torch.arange(float(steps)))
    loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True, timeout=100)
    total = torch.stack([batch.sum() for (batch,) in loader]).sum()
    dist.all_reduce(total)
    dist.destroy_process_group()
    return json.dumps({"total": total.item()})
