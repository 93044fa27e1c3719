"""Tasks of several nodes, in a module that some of them cannot import: those whose ``$TEST_BROKEN`` is set."""

from __future__ import annotations

import os

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts
from tests.procs import say, wait_for_word

if os.environ.get("TEST_BROKEN"):
    import no_such_module_here  # noqa: F401

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=6, rendezvous=90, upload=60)


def ran() -> str:
    if os.environ.get("TEST_SAID"):
        say("running")
        wait_for_word()
    return "ran"


@task(task_config=SafeTorch(nodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def fixed() -> str:
    return ran()


@task(task_config=SafeTorch(nodes="2:3", nproc_per_node=1, timeouts=TIMEOUTS))
def ranged() -> str:
    return ran()
