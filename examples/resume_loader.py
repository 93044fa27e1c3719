"""The same as ``resume_ddp.py``, with torchdata's loader, which keeps its own position: ``pip install torchdata``, then
``pyflyte run examples/resume_loader.py train --where /tmp/run-7``.

Each rank's position is its own, and fits the same number of ranks only; ``ResumableSampler`` fits any.
"""

from __future__ import annotations

import resume_common as common
from devices import backend_for, device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints, RandomNumbers, per_rank


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    me = current_rank()
    device = device_of(me)
    dist.init_process_group(backend_for(device))
    model = common.new_model().to(device)
    replica = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-2)
    data = common.points()
    sampler = DistributedSampler(data, num_replicas=me.world_size, rank=me.rank, shuffle=True)
    loader = StatefulDataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator())
    torch.manual_seed(me.rank)  # dropout of each rank's own
    random = per_rank(RandomNumbers())

    ckpt = Checkpoints(where or None, every=5)
    state = {"model": model, "optimizer": optimizer, "loader": per_rank(loader), "random": random}
    step = ckpt.restore(state)
    while step < epochs * len(loader):
        sampler.set_epoch(step // len(loader))
        for x, y in loader:  # none, where an epoch's last batch was the last one before the save
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(replica(x.to(device)), y.to(device)).backward()
            optimizer.step()
            ckpt.save(step, state)
            step += 1
    return common.loss_on(model)
