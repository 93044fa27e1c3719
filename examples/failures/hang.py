"""A rank that stops in the middle of the loop, while the others wait: ``pyflyte run examples/failures/hang.py train``.

Without ``Hangs(floor=...)`` this ends a little before torch's own timeout of half an hour. The error names the rank
that is missing in the collective, and what it does instead.
"""

from __future__ import annotations

import time

from flytekit import task

from flytekitplugins_safedist import Hangs, SafeTorch, current_rank, stage


@task(task_config=SafeTorch(nproc_per_node=2, hangs=Hangs(floor=3.0)))
def train(steps: int = 5) -> None:
    """Rank 1 stops, by a condition that only it sees, and waits for what never comes."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me = current_rank()
    for step in range(steps):
        if me.rank == 1 and step == 3:
            with stage("wait for a better loss"):
                time.sleep(3600)
        with stage("reduce"):
            dist.all_reduce(torch.ones(1))
        me.progress(step)
