"""Tasks whose nodes are checked before their ranks start."""

from __future__ import annotations

import os

from flytekit import task

from flytekitplugins_safedist import Preflight, SafeHorovod, SafeTorch, Timeouts, current_rank

QUICK = Timeouts(stop=0.5, exit=0.5, heartbeat=20)
# On one machine that others test on, figures of two "nodes" differ by chance.
REPORT, FAIL = Preflight(action="report", slow=0.001), Preflight(slow=0.001)


def told() -> str:
    me = current_rank()
    return f"rank {me.rank} of {me.world_size} in round {me.round}, TEST_POD {os.environ.get('TEST_POD')}"


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, preflight=FAIL))
def alone() -> str:
    return told()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=QUICK, preflight=FAIL))
def torch() -> str:
    return told()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=QUICK, preflight=Preflight(slow=0.9)))
def torch_compared() -> str:
    """Of two nodes the slower one is below that, however slow what else the machine does makes both."""
    return told()


@task(task_config=SafeHorovod(nnodes=3, nproc_per_node=1, timeouts=QUICK, preflight=REPORT))
def horovod_of_three() -> str:
    import horovod.torch as hvd

    hvd.init()
    return told()
