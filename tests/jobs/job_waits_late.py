"""A task that imports torch when it runs, in ranks that are fresh interpreters."""

from __future__ import annotations

import time

from flytekit import task

from flytekitplugins_safedist import Hangs, SafeTorch, Timeouts, current_rank


@task(
    task_config=SafeTorch(
        nproc_per_node=2,
        start_method="spawn",
        timeouts=Timeouts(stop=0.5, exit=0.5),
        hangs=Hangs(action="fail", floor=2, ceiling=600),
    )
)
def imports_torch_itself() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    if current_rank().rank == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(3))
