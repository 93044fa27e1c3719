"""A module that takes signals for itself when it is imported, as servers and notebooks do."""

from __future__ import annotations

import asyncio
import os
import signal

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank

if os.environ["TEST_HOW"] == "ignores":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
if os.environ["TEST_HOW"] == "asyncio":
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGCHLD, print)


@task(task_config=SafeTorch(nproc_per_node=2))
def still_ends() -> str:
    return f"rank {current_rank().rank}"
