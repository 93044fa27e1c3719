"""What each rank does in test_race_sharded: train a sharded model, or one that is replicated.

usage under torchrun: DIRECTORY PLACE MODEL STEPS [DIE_AT_POINT]; leaves ``report-<world size>.json`` in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint import points
from tests.checkpoint.saving import reach_stores


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    # Sizes that no number of ranks divides.
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    if kind == "plain":
        return model
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _whole(tensor: Any) -> list[float]:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return [round(float(one), 6) for one in full.detach().flatten()]


def _seen(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint import state_dict as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):  # whose parameters are this rank's flat parts
        of_model, of_optimizer = dcp.get_state_dict(
            model, optimizer, options=dcp.StateDictOptions(full_state_dict=True)
        )
        held = of_optimizer["state"].values()
        return {
            "parameters": [_whole(one) for one in of_model.values()],
            "momentum": [_whole(one["exp_avg"]) for one in held],
            "steps": [float(one["step"]) for one in held],
        }
    return {
        "parameters": [_whole(one) for one in model.parameters()],
        "momentum": [_whole(one["exp_avg"]) for one in optimizer.state.values()],
        "steps": [float(one["step"]) for one in optimizer.state.values()],
    }


def train(directory: str, place: str, kind: str, steps: str, *die: str) -> None:
    """One rank's work; torchrun's variables are there."""
    reach_stores()
    dist.init_process_group("gloo")
    if die and dist.get_rank() == dist.get_world_size() - 1:
        points.on_point = lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == die[0] else None
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


if __name__ == "__main__":
    train(*sys.argv[1:])
