"""What Horovod and PyTorch need of a round of ranks: how they meet, and the variables that tell each rank its place."""

from __future__ import annotations

from ...config.options import Backend
from .horovod import HorovodBackend
from .torch import TorchBackend

__all__ = ["HorovodBackend", "TorchBackend", "create"]


def create(backend: Backend) -> TorchBackend:
    """The backend of that name."""
    return HorovodBackend() if backend == "horovod" else TorchBackend()
