"""Datasets, in a module that imports torch alone: each worker of a loader that is no fork imports it."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Squares(Dataset[torch.Tensor]):
    """Eight tensors."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index**2))


class Large(Squares):
    """Eight tensors of 4 MB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1 << 20)
