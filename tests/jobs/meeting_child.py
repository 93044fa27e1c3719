"""What a rank starts in an interpreter of its own, which imports torch alone."""

from __future__ import annotations

import torch
import torch.distributed as dist


def sums(_: int, said: str) -> None:
    """Meets the others' in a group, and says what their ones come to."""
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    with open(said, "w") as file:
        file.write(f"{float(value)}\n")
    dist.destroy_process_group()
