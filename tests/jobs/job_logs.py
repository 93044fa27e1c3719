"""A task of two nodes with two ranks each that uses what opens clients of an object store, in the agents, and in a rank
for a file; and says in which order each rank finds the keys of its inputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit import task
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank

TIMEOUTS = Timeouts(stop=1, exit=5, heartbeat=20, rendezvous=60)


@dataclass
class Shapes:
    layers: dict[str, int]


def order_of(value: Any) -> Any:
    """The keys of all dicts in a value, as they come."""
    if isinstance(value, dict):
        return [[key, order_of(of)] for key, of in value.items()]
    return [order_of(each) for each in value] if isinstance(value, list) else None


def in_every_rank(*values: Any) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, [order_of(value) for value in values])
    dist.destroy_process_group()
    return json.dumps(orders)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def train(
    typed: dict[str, int], nested: dict[str, list[dict[str, int]]], untyped: dict, shapes: Shapes, large: dict[str, int]
) -> tuple[FlyteFile, str]:
    weights = Path(current_rank().scratch) / "weights.bin"
    weights.write_bytes(b"w" * 1000)
    return FlyteFile(str(weights)), in_every_rank(typed, nested, untyped, shapes.layers, large)
