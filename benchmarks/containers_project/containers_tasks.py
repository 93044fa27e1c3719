"""What the two pods of ``benchmarks/containers.py`` run: each rank says when it was where, and succeeds.

Importing it costs what importing a training module costs.
"""

from __future__ import annotations

import time

BEGAN = time.time()
"""Of this module: the user's first line, before what it imports."""

from dataclasses import fields  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from flytekit import task  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from flytekitplugins_safedist import SafeTorch, current_rank  # noqa: E402

NODES = "nnodes" if "nnodes" in {field.name for field in fields(SafeTorch)} else "nodes"
"""The field's name, which was another in earlier commits."""


@task(task_config=SafeTorch(nproc_per_node=2, **{NODES: 2}))  # type: ignore[arg-type]
def train() -> int:
    entered = time.time()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    stepped = time.time()
    dist.destroy_process_group()
    print(f"measured {BEGAN!r} {entered!r} {stepped!r} {time.time()!r}", flush=True)
    return current_rank().world_size
