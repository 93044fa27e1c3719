"""A module that keeps its rank when it is imported, as scripts for torchrun do."""

from __future__ import annotations

import os

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch
from tests.jobs.exchanging import exchange

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", "0")))


@task(task_config=SafeTorch(nproc_per_node=2))
def torch() -> list[str]:
    return exchange("device", f"cuda:{LOCAL_RANK}")


@task(task_config=SafeHorovod(nproc_per_node=2))
def horovod() -> list[str]:
    return exchange("device", f"cuda:{LOCAL_RANK}")
