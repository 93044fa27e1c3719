"""A task whose module one rank imports for as long as the test wants, while the others wait for it in torch."""

from __future__ import annotations

import os

from flytekit import task

from flytekitplugins_safedist import Hangs, SafeTorch, Timeouts
from tests.harness.procs import wait_for_word

if os.environ.get("RANK") == "1":
    wait_for_word()


@task(
    task_config=SafeTorch(
        nproc_per_node=3,
        timeouts=Timeouts(stop=0.5, exit=0.5),
        hangs=Hangs(action="fail", floor=2, ceiling=600),
    )
)
def meets() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # who has the store leaves when all have met
    return "met"
