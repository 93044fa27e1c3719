"""What Horovod and PyTorch need of a round of ranks: how they meet, and the variables that tell each rank its place."""

from __future__ import annotations

from ...config.options import Backend
from .base import RankBackend, RoundGroup

__all__ = ["RankBackend", "RoundGroup", "create"]


def create(backend: Backend) -> RankBackend:
    """The backend of that name."""
    if backend == "horovod":
        from .horovod import HorovodBackend

        return HorovodBackend()
    from .torch import TorchBackend

    return TorchBackend()
