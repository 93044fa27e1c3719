"""What ranks do in the checkpoint tests: train a little model, save, and tell what they resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Imported before processes are forked from the test's: each would take seconds for it. None of them starts a thread.
import flytekit  # noqa: F401
import torch
import torch._dynamo  # which torch itself imports when ranks with several tensors first save, or have an optimizer
import torch.distributed.checkpoint.staging
import torch.distributed.fsdp
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint import points

STEPS = 6


def plain_state(value: float) -> dict[str, Any]:
    """A state that says by itself whether it is whole: every number in it is ``value``."""
    model = torch.nn.Linear(64, 64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return {"model": model, "again": torch.full((1000,), value), "step": int(value)}


def one_value(state: dict[str, Any]) -> float:
    """The number that all of the state is; fails where the state is of two."""
    found = {float(one) for parameter in state["model"].parameters() for one in parameter.detach().unique()}
    found |= {float(one) for one in state["again"].unique()} | {float(state["step"])}
    assert len(found) == 1, found
    return found.pop()


def reach_stores() -> None:
    """Let flytekit read the environment of this process for its way to stores, as it does in a rank."""
    ctx = FlyteContextManager.current_context()
    access = FileAccessProvider(ctx.file_access.local_sandbox_dir, "/tmp/raw", data_config=DataConfig.auto())
    FlyteContextManager.push_context(ctx.with_file_access(access).build())


def save_two(place: str, stop: str, arrival: int, pause: Any) -> None:
    """Save steps 1 and 2, keeping one; stand still when ``stop`` is reached for the ``arrival``-th time."""
    seen = 0

    def reached(point: str) -> None:
        nonlocal seen
        seen += point == stop
        if point == stop and seen == arrival:
            pause("there")

    points.on_point = reached
    reach_stores()
    ckpt = Checkpoints(place, every=None, keep=1)
    for step in (1, 2):
        ckpt.save(step, plain_state(step), force=True)
        ckpt.wait()


def resumed(place: str | Path) -> tuple[int, float]:
    """The step to begin with, and the number that the state is."""
    reach_stores()
    state = plain_state(-1)
    step = Checkpoints(place).restore(state)
    return step, one_value(state)
