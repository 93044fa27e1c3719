"""What the examples of checkpoints share: a small regression, with the same loss whether or not it was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

POINTS, FEATURES = 256, 8


def points() -> TensorDataset:
    """The same points on every rank, and in every attempt."""
    import torch
    from torch.utils.data import TensorDataset

    made = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS, FEATURES, generator=made)
    noise = torch.randn(POINTS, 1, generator=made)
    return TensorDataset(x, x.sin().sum(1, keepdim=True) + 0.1 * noise)


def new_model() -> torch.nn.Module:
    """The same initial weights on every rank."""
    import torch

    torch.manual_seed(1)
    hidden = torch.nn.Linear(FEATURES, 32)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))


def loader(data: Any, sampler: Any) -> DataLoader[Any]:
    """Batches, with random numbers of its own: else each new iterator would take one of those that dropout draws."""
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator())


def loss_on(model: torch.nn.Module) -> float:
    """Mean squared error over all points."""
    import torch

    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in points().tensors)
    model.eval()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(x), y))
