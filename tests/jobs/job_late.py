"""A module whose import never ends in a rank."""

from __future__ import annotations

import os
import threading

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts

if "LOCAL_RANK" in os.environ:
    threading.Event().wait()  # for ever


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(start=6, stop=0.5)))
def never_begins() -> None:
    """No rank comes here."""
