"""The latency of a small allreduce, in microseconds: the median of many, as rank 0 of two sees it."""

from __future__ import annotations

import statistics
import time

import horovod.torch as hvd
import torch
from flytekit import task

from flytekitplugins_safedist import SafeHorovod

WARMUP, STEPS = 50, 1000


@task(task_config=SafeHorovod(nproc_per_node=2))
def measured() -> float:
    """Microseconds."""
    hvd.init()
    tensor = torch.ones(16)
    seconds = []
    for _ in range(WARMUP + STEPS):
        began = time.perf_counter()
        hvd.allreduce(tensor, name="small")
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARMUP:]) * 1e6


if __name__ == "__main__":
    print(measured())
