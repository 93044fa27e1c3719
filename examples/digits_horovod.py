"""Handwritten digits with Horovod on four ranks: ``pyflyte run examples/digits_horovod.py digits``."""

from __future__ import annotations

from typing import NamedTuple

import digits_common as common
from devices import device_of
from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeHorovod, current_rank


class Trained(NamedTuple):
    """The outputs of the task."""

    model: FlyteFile
    score: common.Score


@task(
    task_config=SafeHorovod(nproc_per_node=4),
    requests=Resources(cpu="1", mem="3Gi"),
    limits=Resources(cpu="2", mem="3Gi"),
)
def train(epochs: int) -> Trained:
    """Runs on every rank; what rank 0 returns is the task's output."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    me = current_rank()
    # Without NCCL, Horovod averages what is in the CPU's memory only.
    device = device_of(me) if hvd.nccl_built() else torch.device("cpu")
    model = common.new_model().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    common.train(model, optimizer, epochs=epochs, rank=me.rank, world_size=me.world_size, device=device)
    score = common.evaluate(
        model,
        rank=me.rank,
        world_size=me.world_size,
        device=device,
        total=lambda sums: hvd.allreduce(sums, op=hvd.Sum),
    )
    if me.rank == 0:
        print(f"test accuracy {score.accuracy:.4f} on {me.world_size} ranks")
    return Trained(model=FlyteFile(str(common.save(model, me.scratch))), score=score)


@workflow
def digits(epochs: int = 20) -> Trained:
    """One training run."""
    return train(epochs=epochs)
