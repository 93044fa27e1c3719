"""What processes of the checkpoint tests save, and how they reach stores."""

from __future__ import annotations

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
