"""Jobs for a person at a terminal; also a script."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.fs import barrier
from tests.harness.procs import say, wait_for_word

with suppress(ImportError):
    import slow_library  # noqa: F401

if os.environ.get("TEST_HOW") == "import in the ranks" and "RANK" in os.environ:
    print("importing", flush=True)
    time.sleep(600)


@task(task_config=SafeTorch(nproc_per_node=2, start_method="spawn"))
def waits_spawned() -> None:
    print("here", flush=True)
    time.sleep(600)


@task(task_config=SafeTorch(nproc_per_node=2))
def waits() -> None:
    print("here", flush=True)
    time.sleep(600)


@task(task_config=SafeTorch(nproc_per_node=2))
def steps() -> None:
    me = current_rank()
    for step in range(6):
        me.progress(step, of=10)
        if step == 2:
            say("is at three")
            wait_for_word()
            print(f"rank {me.rank} goes on")
            barrier("three")  # no rank takes the other's word
    say("is at six")
    wait_for_word()


def own_debugger() -> None:
    print("own debugger")


def _break() -> None:
    number = 42
    breakpoint()
    print(f"rank {current_rank().rank} has {number}")


@task(task_config=SafeTorch(nproc_per_node=2))
def breaks() -> None:
    _break()


@task(task_config=SafeTorch())
def breaks_alone() -> None:
    _break()


@task(task_config=SafeTorch())
def breaks_and_goes_on() -> None:
    _break()
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
