"""The same as ``resume_fsdp.py``, with FSDP1 (``FullyShardedDataParallel``).

``pyflyte run examples/resume_fsdp1.py train --where /tmp/run-6``. Every rank saves its part; any number resumes.
"""

from __future__ import annotations

import resume_common as common
from devices import backend_for, device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints, RandomNumbers, ResumableSampler, per_rank


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss of rank 0's last batch. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    me = current_rank()
    device = device_of(me)
    dist.init_process_group(backend_for(device))
    model = FullyShardedDataParallel(
        common.new_model().to(device), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_id=device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = common.points()
    sampler = ResumableSampler(data, rank=me.rank, world_size=me.world_size)
    loader = common.loader(data, sampler)
    torch.manual_seed(me.rank)  # dropout of each rank's own
    random = per_rank(RandomNumbers())

    ckpt = Checkpoints(where or None, every=5)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "random": random}
    step = ckpt.restore(state)
    last = float("nan")
    while sampler.epoch < epochs:
        for x, y in sampler.batches(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            last = loss.item()
            ckpt.save(step, state)
            step += 1
    return last
