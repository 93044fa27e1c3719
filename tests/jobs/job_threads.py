"""A module that starts a thread when it is imported: forking from a process that did so is not safe."""

from __future__ import annotations

import threading

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank

threading.Thread(target=threading.Event().wait, daemon=True).start()


@task(task_config=SafeTorch(nproc_per_node=1))
def still_works() -> str:
    return f"rank {current_rank().rank} runs somehow"
