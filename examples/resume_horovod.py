"""The same as ``resume_ddp.py``, with Horovod: ``pyflyte run examples/resume_horovod.py train --where /tmp/run-2``."""

from __future__ import annotations

import resume_common as common
from devices import device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeHorovod, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints, RandomNumbers, ResumableSampler, per_rank


@task(task_config=SafeHorovod(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    # Without NCCL, Horovod averages what is in the CPU's memory only.
    device = device_of(current_rank()) if hvd.nccl_built() else torch.device("cpu")
    model = common.new_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    together = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = common.points()
    sampler = ResumableSampler(data, rank=hvd.rank(), world_size=hvd.size())
    loader = common.loader(data, sampler)
    torch.manual_seed(hvd.rank())  # dropout of each rank's own
    random = per_rank(RandomNumbers())

    ckpt = Checkpoints(where or None, every=5)
    state = {"model": model, "optimizer": together, "sampler": sampler, "random": random}
    step = ckpt.restore(state)
    while sampler.epoch < epochs:
        for x, y in sampler.batches(loader):
            together.zero_grad()
            torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            together.step()
            ckpt.save(step, state)
            step += 1
    return common.loss_on(model)
