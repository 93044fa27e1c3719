"""A module that says where it is imported, and registers an exit handler, which says whose it was."""

from __future__ import annotations

import atexit
import os
import sys

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank


def say() -> None:
    rank = os.environ.get("RANK")
    if rank is not None or "flytekitplugins_safedist.job.run" not in sys.modules:  # the agent imports the module, too
        print(f"handler of rank {rank}", flush=True)


atexit.register(say)
if "TEST_IMPORTS" in os.environ:
    with open(os.environ["TEST_IMPORTS"], "a") as imports:
        imports.write("imported\n")  # a rank that it looked at would keep it from being preloaded


@task(task_config=SafeTorch(nproc_per_node=2))
def preloaded() -> str:
    return f"rank {current_rank().rank}"


@task(task_config=SafeTorch(nproc_per_node=2, start_method="spawn"))
def spawned() -> str:
    return f"rank {current_rank().rank}"
