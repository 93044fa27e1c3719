"""A module that touches CUDA when it is imported. No GPU where tests run: torch's own flag is set by hand."""

from __future__ import annotations

import torch
from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank

torch.cuda._initialized = True  # what torch.cuda.is_initialized() looks at, after torch.cuda._lazy_init()


@task(task_config=SafeTorch(nproc_per_node=1))
def still_works() -> str:
    return f"rank {current_rank().rank} runs somehow"
