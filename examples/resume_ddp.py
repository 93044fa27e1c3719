"""A DDP training that may be interrupted: ``pyflyte run examples/resume_ddp.py train --where /tmp/run-1``.

Kill a rank, or stop the command and give it again: it goes on from the newest save, in the middle of an epoch, with the
samples that are left of it.
"""

from __future__ import annotations

import resume_common as common
from devices import backend_for, device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints, RandomNumbers, ResumableSampler, per_rank


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    me = current_rank()
    device = device_of(me)
    dist.init_process_group(backend_for(device))
    model = common.new_model().to(device)
    replica = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-2)
    data = common.points()
    sampler = ResumableSampler(data, rank=me.rank, world_size=me.world_size)
    loader = common.loader(data, sampler)
    torch.manual_seed(me.rank)  # dropout of each rank's own
    random = per_rank(RandomNumbers())

    ckpt = Checkpoints(where or None, every=5)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "random": random}
    step = ckpt.restore(state)
    while sampler.epoch < epochs:
        for x, y in sampler.batches(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(replica(x.to(device)), y.to(device)).backward()
            optimizer.step()
            ckpt.save(step, state)
            step += 1
    return common.loss_on(model)
