"""One rank fails once; every rank says when it entered the function. The same under torchrun and safedist."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist
from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch

FAILING_RANK = 3


def enter(directory: Path, rank: int) -> bool:
    """Write the time of entry; returns whether this is a later round."""
    stamp = repr(time.time())
    again = (directory / "failed").exists()
    (directory / f"{'again' if again else 'first'}-{rank}").write_text(stamp)
    return again


def fail_once(directory: Path, rank: int, *, again: bool) -> None:
    """Rank 3 fails in the first round, when all are there; or all wait there for node 0 to be killed."""
    if "BENCH_LOSE_NODE_0" in os.environ and not again:
        (directory / f"there-{rank}").touch()
        time.sleep(3600)
    if rank == FAILING_RANK and not again:
        (directory / "failed").write_text(repr(time.time()))
        raise RuntimeError("fails once")


def step(directory: Path, rank: int) -> None:
    """Make an optimizer's first step; write when it was done, and this process's CPU seconds until then."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    (directory / f"step-{rank}").write_text(json.dumps([time.time(), time.process_time()]))


def with_torch(directory: Path, rank: int) -> None:
    """Meet, fail once, and meet again."""
    again = enter(directory, rank)
    dist.init_process_group("gloo")
    dist.barrier()
    fail_once(directory, rank, again=again)
    dist.all_reduce(torch.ones(1))
    step(directory, rank)
    dist.destroy_process_group()


def with_horovod(directory: Path, rank: int) -> None:
    """Meet, fail once, and meet again."""
    again = enter(directory, rank)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="barrier")
    fail_once(directory, rank, again=again)
    hvd.allreduce(torch.ones(1), name="step")
    step(directory, rank)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_restarts=1))
def safe_torch(directory: str) -> None:
    with_torch(Path(directory), int(os.environ["RANK"]))


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, max_restarts=1))
def safe_horovod(directory: str) -> None:
    with_horovod(Path(directory), int(os.environ["RANK"]))


if __name__ == "__main__":
    with_torch(Path(os.environ["BENCH_DIRECTORY"]), int(os.environ["RANK"]))
