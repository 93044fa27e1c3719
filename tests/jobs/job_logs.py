"""A task of two nodes that uses what opens clients of an object store: in the agents, and in a rank for a file."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=20, rendezvous=60)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def train() -> FlyteFile:
    weights = Path(current_rank().scratch) / "weights.bin"
    weights.write_bytes(b"w" * 1000)
    return FlyteFile(str(weights))
