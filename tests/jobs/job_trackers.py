"""A task with a tracker: one Weights & Biases run per job, whatever becomes of its ranks."""

from __future__ import annotations

import os
import sys

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.fs import barrier

sys.path.append(os.path.join(sys.prefix, "libraries"))
import wandb


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1), retries=1)
def tracked() -> str:
    me = current_rank()
    if me.rank == 0:
        where = os.environ["TEST_TRACKED"]
        with wandb.init(project="digits", id=me.job, resume="allow", mode="offline", dir=where) as run:
            run.log({"loss": 1.0}, step=me.round)
    barrier("tracked")  # no rank fails before the run is written
    if me.round < int(os.environ.get("TEST_FAILURES", "0")):
        raise ValueError(f"bad data in round {me.round}")
    return me.job
