"""What both digits examples share: the data, the model, and one training loop that does not know its backend.

The data are scikit-learn's bundled handwritten digits: 1,797 images of 8 x 8 pixels, written by people. Every rank
trains on its share of each global batch; averaged gradients make the result that of one process with the whole batch.

torch and scikit-learn are imported where they are used: a machine that only registers the tasks needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

GLOBAL_BATCH = 64


@dataclass
class Score:
    """What a training run reached on the images it never saw.

    Attributes:
        accuracy: share of test images recognised, 0 to 1.
        loss: mean cross entropy on them.
        world_size: ranks that trained.
    """

    accuracy: float
    loss: float
    world_size: int


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, the same split in every rank."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.utils.data import TensorDataset

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def new_model() -> nn.Module:
    """A small perceptron, with the same initial weights in every rank."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(size: int, *, epoch: int, rank: int, world_size: int) -> list[torch.Tensor]:
    """Indices of one epoch's batches, each cut down to this rank's share; the order does not depend on world_size."""
    import torch

    order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
    whole = order[: size // GLOBAL_BATCH * GLOBAL_BATCH].view(-1, GLOBAL_BATCH)
    return [batch[rank::world_size] for batch in whole]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> None:
    """Train on this rank's share, where the model is. The optimizer or the model averages gradients among the ranks."""
    from torch import nn

    if GLOBAL_BATCH % world_size:
        raise ValueError(f"the global batch of {GLOBAL_BATCH} does not divide among {world_size} ranks; use 1, 2, 4, 8")
    data, _ = datasets()
    images, labels = data.tensors
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        last = 0.0
        for batch in batches(len(data), epoch=epoch, rank=rank, world_size=world_size):
            optimizer.zero_grad()
            loss = loss_of(model(images[batch].to(device)), labels[batch].to(device))
            loss.backward()
            optimizer.step()
            last = loss.item()
        if epoch % 10 == 9 or epoch == epochs - 1:
            print(f"epoch {epoch + 1}/{epochs}: loss of my last batch {last:.4f}")


def evaluate(
    model: nn.Module,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> Score:
    """Score the model: each rank on its share of the test images, summed over ranks by ``total``."""
    import torch
    from torch import nn

    _, data = datasets()
    images, labels = (tensor[rank::world_size].to(device) for tensor in data.tensors)
    with torch.no_grad():
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(dim=1) == labels).sum()
    share = torch.tensor([float(right), float(loss), float(len(labels))], dtype=torch.float64)
    sums = total(share.to(device)).cpu()
    return Score(accuracy=float(sums[0] / sums[2]), loss=float(sums[1] / sums[2]), world_size=world_size)


def save(model: nn.Module, directory: Path) -> Path:
    """Save the weights, as a machine without GPUs can load them; only rank 0's file becomes the task's output."""
    import torch

    path = directory / "digits.pt"
    torch.save({name: weights.cpu() for name, weights in model.state_dict().items()}, path)
    return path
