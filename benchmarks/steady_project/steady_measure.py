"""The measured script: allreduce of a 25 MB tensor. The same function under horovodrun and in a SafeHorovod task."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from flytekit import task

from flytekitplugins_safedist import SafeHorovod

ELEMENTS = 25 * 1000 * 1000 // 4
WARMUP, STEPS = 5, 40


def seconds_per_step() -> float:
    """Mean seconds of one allreduce, as rank 0 sees it."""
    hvd.init()
    tensor = torch.ones(ELEMENTS)
    for _ in range(WARMUP):
        hvd.allreduce(tensor, name="warm-up")
    hvd.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        hvd.allreduce(tensor, name="step")
    return (time.perf_counter() - started) / STEPS


@task(task_config=SafeHorovod(nproc_per_node=4))
def measured() -> float:
    return seconds_per_step()


if __name__ == "__main__":
    seconds = seconds_per_step()
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(repr(seconds))
