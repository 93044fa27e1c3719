"""What Horovod and PyTorch need of a round of ranks: how they meet, and the variables that tell each rank its place."""

from __future__ import annotations

from collections.abc import Mapping

from ... import envvars
from ...config.options import Backend
from ...config.registered import Registered
from .horovod import HorovodBackend
from .torch import TorchBackend

__all__ = ["HorovodBackend", "TorchBackend", "create", "inherited"]


def create(backend: Backend) -> TorchBackend:
    """The backend of that name."""
    return HorovodBackend() if backend == "horovod" else TorchBackend()


def inherited(settings: Registered, environment: Mapping[str, str]) -> dict[str, str]:
    """What the ranks of a node inherit, but for what the task itself sets. Where a rank has started this job, not where
    that rank meets its own others."""
    defaults = {envvars.TORCH_NCCL_ASYNC_ERROR_HANDLING: "1"}  # all as torchrun does
    if settings.nproc_per_node > 1:
        defaults[envvars.OMP_NUM_THREADS] = "1"
    kept = {name: value for name, value in environment.items() if name not in (envvars.MEETING, envvars.STORE_PORT)}
    return {**defaults, **kept, envvars.TORCHELASTIC_MAX_RESTARTS: str(settings.max_restarts)}
