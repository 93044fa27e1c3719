"""What libraries do when they are imported that must not be done once for all ranks; and where each of them does it.

One that starts threads is told by a variable not to. One that keeps what only a rank has (its number, its directories)
is allowed to, and each rank puts right what it kept, at once after the fork. What is not in the table makes ranks fresh
interpreters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType


def _local_rank(module: ModuleType) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def _rank(module: ModuleType) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _dynamos_cache(module: ModuleType) -> None:
    if hasattr(module, "DynamoCache"):  # since 2.9
        module.DynamoCache.path_prefix = os.path.join(module.cache_dir(), "dynamo")  # noqa: PTH118  (as torch has it)


def _numbas_cache(module: ModuleType) -> None:
    module.reload_config()


VARIABLES: dict[str, str] = {
    # OpenBLAS starts its threads when it is loaded, unless it has just one. Ranks get their own number back
    # (preload.refresh).
    "OPENBLAS_NUM_THREADS": "1",
    # torch.cuda.is_available() then asks NVML instead of initialising the driver, which no fork survives
    # (torch/cuda/__init__.py: is_available).
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # pyarrow's jemalloc has a thread give memory back, and does without where it may not. pandas, datasets,
    # transformers' Trainer and torch._dynamo import it, where it is installed.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Under which the preloading process imports; ranks have their own word again."""

FACTS: dict[str, Callable[[ModuleType], object]] = {
    # Code that torch has compiled and keeps, since 2.9: in the rank's own TORCHINDUCTOR_CACHE_DIR.
    "torch._dynamo.package": _dynamos_cache,
    "torchmetrics.utilities.prints": _local_rank,
    # Lightning's, after torchmetrics': as in a fresh interpreter, each has its own, and its strategies set both.
    "lightning.fabric.utilities.rank_zero": _rank,
    "lightning_fabric.utilities.rank_zero": _rank,
    # Reads NUMBA_CACHE_DIR when it is imported.
    "numba.core.config": _numbas_cache,
}
"""Modules that keep what only a rank has, each with what evaluates that again, in the process in which it is called."""


def keeps(reader: FrameType) -> str | None:
    """The module that reads in this frame, or in one that called it, what each rank will read again; None for others,
    and for what such a module reads later, when it is called by somebody else."""
    module = reader.f_globals.get("__name__")
    frame: FrameType | None = reader
    while module in FACTS and frame is not None and frame.f_globals.get("__name__") == module:
        if frame.f_code.co_name == "<module>":
            return str(module)
        frame = frame.f_back
    return None


def put_right() -> None:
    """In a rank, whose variables are set: evaluate what modules have kept of another process's. In the preloading
    process: find out whether that can be done with the versions which are here.

    Raises:
        Exception: whatever a version of a library that is not known says.
    """
    for name, evaluate in FACTS.items():
        if name in sys.modules:
            evaluate(sys.modules[name])
