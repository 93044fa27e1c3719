"""A copy of tensors in memory that training does not touch, in buffers that are used again for the next save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Buffers:
    """The copies of one rank. What ``copy`` returned is overwritten by its next call."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._stager: Any = None

    def copy(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copies on the CPU (pinned, where they come from a GPU), complete on return."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        shapes = {name: (type(tensor), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if self._stager is not None and shapes == self._shapes:
            copies: dict[str, Any] = self._stager.stage(dict(tensors))
            return copies
        self._shapes = shapes
        on_gpu = any(tensor.device.type != "cpu" for tensor in tensors.values())
        self._stager = BlockingAsyncStager(cache_staged_state_dict=on_gpu)
        copies = self._stager.stage(dict(tensors))
        if not on_gpu:  # its own cache is of pinned memory, which needs a GPU
            self._stager.state_dict_cache = copies
            self._stager.cache_staged_state_dict = True
        return copies
