"""The recipe of docs/failures.md for more memory after an OOM kill, as far as a local run goes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from flytekit import Resources, eager, task, workflow

from flytekitplugins_safedist import SafeTorch, current_rank

more = Resources(cpu="8", mem="24Gi")


@task(task_config=SafeTorch(nproc_per_node=2))
def train(epochs: int) -> str:
    """The first time as a rank ends that was OOM-killed, but for the kill."""
    if current_rank().rank == 0:
        times = Path(os.environ["TEST_TIMES"])
        times.write_text(times.read_text() + "x" if times.exists() else "x")
        if times.read_text() == "x":
            raise RuntimeError(os.environ["TEST_HOW"])
    return f"trained {epochs}"


@workflow
def larger(epochs: int) -> str:
    return train(epochs=epochs).with_overrides(requests=more, limits=more)


@eager
async def train_or_larger(epochs: int) -> str:
    try:
        return train(epochs=epochs)
    except Exception as error:
        if "out-of-memory killer" not in str(error):
            raise
        return larger(epochs=epochs)


def called() -> str:
    result: str = asyncio.run(train_or_larger(epochs=3))
    return result
