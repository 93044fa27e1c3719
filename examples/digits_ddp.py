"""Handwritten digits with PyTorch DDP on four ranks: ``pyflyte run examples/digits_ddp.py digits``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import digits_common as common
from devices import backend_for, device_of
from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeTorch, current_rank

if TYPE_CHECKING:
    import torch


class Trained(NamedTuple):
    """The outputs of the task."""

    model: FlyteFile
    score: common.Score


@task(
    task_config=SafeTorch(nproc_per_node=4),
    requests=Resources(cpu="1", mem="3Gi"),
    limits=Resources(cpu="2", mem="3Gi"),
)
def train(epochs: int) -> Trained:
    """Runs on every rank; what rank 0 returns is the task's output."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    me = current_rank()
    device = device_of(me)
    dist.init_process_group(backend_for(device))
    model = common.new_model().to(device)
    replica = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(replica.parameters(), lr=2e-3)
    common.train(replica, optimizer, epochs=epochs, rank=me.rank, world_size=me.world_size, device=device)
    score = common.evaluate(model, rank=me.rank, world_size=me.world_size, device=device, total=_sum)
    dist.destroy_process_group()
    if me.rank == 0:
        print(f"test accuracy {score.accuracy:.4f} on {me.world_size} ranks")
    return Trained(model=FlyteFile(str(common.save(model, me.scratch))), score=score)


def _sum(sums: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist

    dist.all_reduce(sums)
    return sums


@workflow
def digits(epochs: int = 20) -> Trained:
    """One training run."""
    return train(epochs=epochs)
