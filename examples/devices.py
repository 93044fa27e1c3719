"""Where a rank of the examples trains: on a GPU of its own; on the CPU where its node has fewer GPUs than ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flytekitplugins_safedist import RankContext


def device_of(me: RankContext) -> torch.device:
    """This rank's device. A GPU becomes the current one: what says only "cuda", as NCCL and libraries do, means it."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < me.local_world_size:
        if gpus and me.local_rank == 0:
            print(f"GPUs of this node: {gpus}, for {me.local_world_size} ranks: they train on the CPU")
        return torch.device("cpu")
    torch.cuda.set_device(me.local_rank)
    return torch.device("cuda", me.local_rank)


def backend_for(device: torch.device) -> str:
    """What joins the ranks' process group: NCCL among GPUs, gloo among CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"
