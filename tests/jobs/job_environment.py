"""Tasks that tell what variables they find, and what the round before them has left."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word

QUICK = Timeouts(stop=0.5, exit=0.5)
AT_IMPORT = os.environ.get("OMP_NUM_THREADS")
"""What a library that this module imports would have read: in the rank server, where ranks are forked."""


def _tell() -> None:
    if current_rank().local_rank == 0:
        say(json.dumps({"at import": AT_IMPORT, **os.environ}))


@task(task_config=SafeTorch(nproc_per_node=2))
def two_ranks() -> None:
    _tell()


@task(task_config=SafeTorch())
def one_rank() -> None:
    _tell()


@task(
    task_config=SafeTorch(nproc_per_node=2),
    environment={"OMP_NUM_THREADS": "3", "TRITON_CACHE_DIR": "/mine", "TEST_POD": "the task's", "TEST_NO_KEY": None},
)
def with_variables_of_its_own() -> None:
    _tell()


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1, timeouts=QUICK))
def leaves_a_process_behind() -> None:
    """In round 0: a process in a session of its own, which nobody but the kernel knows to be the rank's."""
    me = current_rank()
    if me.round == 0:
        if me.rank == 0:
            signal.pause()
        say(str(subprocess.Popen(["sleep", "100000"], start_new_session=True).pid))
        raise ValueError("once")
    if me.rank == 0:
        say(json.dumps(sorted(path.name for path in me.scratch.parent.parent.iterdir())))
        wait_for_word()
