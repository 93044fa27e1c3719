"""What each rank does in test_race_sharded: train a sharded model, or one that is replicated.

Leaves ``report-<world size>.json`` in a directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint.saving import reach_stores


class Block(torch.nn.Linear):
    """What FSDP wraps."""


class Net(torch.nn.Module):
    """Parameters in layers that are wrapped, and in the root; one of no dimension, one that is two; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.blocks = torch.nn.ModuleList(Block(13, 13) for _ in range(2))
        self.norm = torch.nn.LayerNorm(13)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.last = torch.nn.Linear(13, 7, bias=False)
        self.also = torch.nn.Linear(13, 7, bias=False)
        self.also.weight = self.last.weight

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        x = self.norm(x) * self.scale
        return self.last(x) + self.also(x)


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Net()
    if kind == "plain":
        return model
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _whole(tensor: Any) -> list[float]:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return [round(float(one), 6) for one in full.detach().flatten()]


def _seen(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of each parameter, by its name: what it is, and what the optimizer has of it."""
    from torch.distributed.checkpoint import state_dict as dcp

    if not optimizer.state:  # torch would make one by a step
        return {}
    full = dcp.StateDictOptions(full_state_dict=True)
    of_model = dcp.get_model_state_dict(model, options=full)
    held = dcp.get_optimizer_state_dict(model, optimizer, options=full)["state"]
    return {
        "parameters": {name: _whole(one) for name, one in sorted(of_model.items())},
        "momentum": {name: _whole(held[name]["exp_avg"]) for name in sorted(held)},
        "steps": {name: float(held[name]["step"]) for name in sorted(held)},
    }


def train(directory: str, place: str, kind: str, steps: str) -> None:
    """One rank's work; torchrun's variables are there."""
    reach_stores()
    dist.init_process_group("gloo")
    model = _model(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "told": "nothing", "kept": torch.zeros(3)}
    ckpt = Checkpoints(place, every=5)
    first = ckpt.restore(state)
    resumed = {"first": first, "told": state["told"], "kept": state["kept"].tolist(), **_seen(model, optimizer)}
    for step in range(first, first + int(steps)):
        optimizer.zero_grad()
        model(torch.ones(4, 7)).square().sum().backward()
        optimizer.step()
        state["told"], state["kept"] = f"step {step}", torch.full((3,), float(step))
        ckpt.save(step, state)
    ended = _seen(model, optimizer)
    ckpt.wait()
    if dist.get_rank() == 0:
        report = Path(directory) / f"report-{dist.get_world_size()}.json"
        report.write_text(json.dumps({"resumed": resumed, "ended": ended}))
    dist.destroy_process_group()
