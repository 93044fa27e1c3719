"""What ``ckpt.save`` costs in a task when no save is due: for benchmarks/checkpoint.py."""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import timedelta

from flytekit import task

from flytekitplugins_safedist import SafeTorch

BATCH, BATCHES = 1000, 100


@task(task_config=SafeTorch(nproc_per_node=2))
def measured(every: str) -> float:
    """Seconds per step: the median of batches, in rank 0."""
    import torch
    import torch.distributed as dist

    from flytekitplugins_safedist.checkpoint import Checkpoints

    dist.init_process_group("gloo")
    state = {"model": torch.nn.Linear(256, 256)}
    with tempfile.TemporaryDirectory() as place:
        ckpt = Checkpoints(place, every=timedelta(days=1) if every == "time" else 10**9)
        step = ckpt.restore(state)
        of_batches = []
        for _ in range(BATCHES):
            began = time.perf_counter()
            for _ in range(BATCH):
                ckpt.save(step, state)
                step += 1
            of_batches.append((time.perf_counter() - began) / BATCH)
        dist.barrier()
    return statistics.median(of_batches)
