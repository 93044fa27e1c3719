"""A copy of values in memory that training does not touch, in buffers that are used again for the next save."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .dcp import Path, flat
from .state import is_tensor


class Buffers:
    """The copies of one rank. What ``copy`` returned is overwritten by its next call."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._stager: Any = None

    def copy(self, values: Mapping[Path, Any]) -> dict[Path, Any]:
        """Copies on the CPU (pinned, where they come from a GPU), complete on return."""
        tensors = {flat(path): value for path, value in values.items() if is_tensor(value)}
        copies = self._staged(tensors) if tensors else {}
        return {
            path: copies[flat(path)] if flat(path) in copies else copy.deepcopy(value) for path, value in values.items()
        }

    def _staged(self, tensors: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        shapes = {name: (type(one), tuple(one.size()), one.dtype) for name, one in tensors.items()}
        if self._stager is not None and shapes == self._shapes:
            copies: dict[str, Any] = self._stager.stage(tensors)
            return copies
        self._shapes = shapes
        on_gpu = any(one.device.type != "cpu" for one in tensors.values() if hasattr(one, "device"))
        self._stager = BlockingAsyncStager(cache_staged_state_dict=on_gpu)
        copies = self._stager.stage(tensors)
        if not on_gpu:  # its own cache is of pinned memory, which needs a GPU
            self._stager.state_dict_cache = copies
            self._stager.cache_staged_state_dict = True
        return copies
