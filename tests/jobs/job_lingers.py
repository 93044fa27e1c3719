"""A module that leaves what never ends in the agent that imports it; ``$TEST_HOW`` says what."""

from __future__ import annotations

import atexit
import os
import threading

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts

if "RANK" not in os.environ:
    how = os.environ.get("TEST_HOW")
    if how == "a thread":
        threading.Thread(target=threading.Event().wait).start()
    if how == "a handler":
        atexit.register(threading.Event().wait)


@task(task_config=SafeTorch(nproc_per_node=1, start_method="spawn", timeouts=Timeouts(exit=0.5)))
def trains() -> str:
    return "trained"
