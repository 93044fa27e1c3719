"""A rank that is killed once: ``pyflyte run examples/failures/lost_rank.py train --where /tmp/run-1``.

All ranks start again in place, go on from the newest save, and the task succeeds. The record of the run shows two
rounds, why the first one ended, and the saves.
"""

from __future__ import annotations

import os
import signal

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank, stage
from flytekitplugins_safedist.checkpoint import Checkpoints


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1))
def train(where: str, steps: int = 12) -> int:
    """The step at which the last round began."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks begin with the same model
    me, model = current_rank(), torch.nn.Linear(4, 4)
    ckpt, state = Checkpoints(where, every=2), {"model": model}
    begin = ckpt.restore(state)
    for step in range(begin, steps):
        with stage("reduce"):
            dist.all_reduce(torch.ones(1))
        with stage("save"):
            ckpt.save(step, state)
            ckpt.wait()
        me.progress(step)
        if (me.round, me.rank, step) == (0, 1, 7):
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does that is out of memory
    dist.destroy_process_group()
    return begin
