"""A script that ends with a save in flight, as test_race_leaving runs it under torchrun and by itself.

usage: PLACE HOW: "ends", after destroy_process_group(); or "raises", in rank 1.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint import points


def slow(point: str) -> None:
    """The script is over long before its save, which then does as a store's client that resolves a name."""
    if point == points.PART_OPENED:
        time.sleep(1)
        ThreadPoolExecutor().submit(int).result()


def main(place: str, how: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    points.on_point = slow
    Checkpoints(place, every=None).save(9, {"x": torch.ones(1000)}, force=True)
    if how == "raises" and os.environ["RANK"] == "1":
        raise ValueError("a bad batch")
    if how == "raises":
        dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
