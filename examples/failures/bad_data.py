"""A sample that cannot be read, on one rank: ``pyflyte run examples/failures/bad_data.py train``.

The error is that of rank 1, with its traceback and last lines, though rank 0 loses its connection to it. The log says
where the record of the run is, which has all that in one page.
"""

from __future__ import annotations

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank, stage

BROKEN = 13
"""The sample that is broken, in the shard of rank 1."""


def read(sample: int) -> float:
    """As a user's reader does: it knows the record, and not what to do about it."""
    if sample == BROKEN:
        raise ValueError(f"sample {sample} is cut short: expected 4096 bytes, found 17")
    return sample / 100


@task(task_config=SafeTorch(nproc_per_node=2))
def train(samples: int = 40) -> float:
    """The mean of all samples; rank 1 meets the broken one."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me, total = current_rank(), torch.zeros(1)
    for step, sample in enumerate(range(me.rank, samples, me.world_size)):
        with stage("load"):
            part = torch.tensor([read(sample)])
        with stage("reduce"):
            dist.all_reduce(part)
        total += part
        me.progress(step, mean=float(total) / (step + 1))
    dist.destroy_process_group()
    return float(total) / samples
