"""The examples as they are, and the same training on one rank."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def train(example: str, ranks: int, epochs: int) -> dict[str, Any]:
    from dataclasses import replace

    import torch
    from flytekit import task

    module = importlib.import_module(example)
    work = module.train
    if ranks != 4:
        config = replace(work.task_config, nproc_per_node=ranks)
        work = task(task_config=config)(work.task_function)
    made = work(epochs=epochs)
    weights = torch.load(str(made.model))
    return {
        "accuracy": made.score.accuracy,
        "loss": made.score.loss,
        "world_size": made.score.world_size,
        "weights": torch.cat([each.flatten() for each in weights.values()]).tolist(),
    }
