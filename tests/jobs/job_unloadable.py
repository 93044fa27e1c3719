"""Tasks in a module that ranks cannot import whose ``$TEST_BROKEN`` is set."""

from __future__ import annotations

import os
import signal
import sys

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts
from tests.harness.procs import say, wait_for_word


def broken(how: str) -> None:
    if how == "yes":
        import no_such_module_here  # noqa: F401
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)
    if how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if how == "leaves a child" and os.fork() == 0:
        signal.pause()
    if how == "in a child":
        child = os.fork()
        if child == 0:
            sys.exit("in the child")
        assert os.waitpid(child, 0) == (child, 256)


broken(os.environ.get("TEST_BROKEN", ""))

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=6, rendezvous=90, upload=60)


def ran() -> str:
    if os.environ.get("TEST_SAID"):
        say("running")
        wait_for_word()
    return "ran"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def fixed() -> str:
    return ran()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=1, timeouts=TIMEOUTS))
def ranged() -> str:
    return ran()


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=TIMEOUTS))
def alone() -> str:
    return ran()
