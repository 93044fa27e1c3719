"""A task on whose machine no interpreter can be started for its ranks."""

from __future__ import annotations

import sys

from flytekit import task

from flytekitplugins_safedist import SafeTorch

sys.executable = "/nowhere/python"


@task(task_config=SafeTorch(nproc_per_node=2))
def never() -> str:
    return "never"
