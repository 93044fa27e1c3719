"""A module that takes as long to import as the test wants."""

from __future__ import annotations

import os

from flytekit import task

from flytekitplugins_safedist import SafeTorch
from tests.harness.procs import say, wait_for_word

say(f"importing in {os.getpid()}")
wait_for_word()


@task(task_config=SafeTorch(nproc_per_node=2))
def never_started() -> None:
    """The test ends the agent before there is a rank."""
