"""Functions that destroy their process group and leave their replica to their frame.

``returns`` does so while a thread of Gloo's waits for Python's lock, and must return all the same. The order is forced.
Rank 0 lets go of an allreduce whose tensor Gloo's thread alone then holds, destroys its group, and only then, holding
Python's lock without a break, has rank 1 take part. Gloo's thread now wants the lock to free the tensor; the function's
end, and with it the replica's, must not wait for that thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.distributed.nn  # has the group of the moment among its defaults: imported later, it would keep that alive
from flytekit import task
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins_safedist import SafeTorch, current_rank


@task(task_config=SafeTorch(nproc_per_node=2))
def returns(fifos: str) -> str:
    init_process_group("gloo")
    replica = DistributedDataParallel(torch.nn.Linear(2, 1))
    go, gone = (os.open(Path(fifos) / name, os.O_RDWR) for name in ("go", "gone"))
    if current_rank().rank == 1:
        os.read(go, 1)
        all_reduce(torch.ones(1000))
        os.write(gone, b"x")
        destroy_process_group()
        return f"{type(replica).__name__} of rank 1"
    read = ctypes.PyDLL(None).read  # keeps the lock, as os.read does not
    sys.setswitchinterval(1000)  # and nobody may ask for it
    work = all_reduce(torch.ones(1000), async_op=True)
    del work
    destroy_process_group()
    os.write(go, b"x")
    received = ctypes.create_string_buffer(1)
    read(gone, received, 1)
    for _ in range(3_000_000):  # our own thread is about to be done as well
        pass
    return f"{type(replica).__name__} of rank 0"


@task(task_config=SafeTorch(nproc_per_node=2))
def again(fifos: str) -> list[float]:
    """One group after the other at the same address: what the one has left there is not for the next."""
    rank = current_rank().rank
    mine, other = (os.open(Path(fifos) / name, os.O_RDWR) for name in (("go", "gone") if rank else ("gone", "go")))
    sums = []
    for step in range(3):
        sums.append(_trained(rank + step))
        os.write(other, b"x")  # nobody begins again before all have ended
        os.read(mine, 1)
    return sums


def _trained(number: int) -> float:
    init_process_group("gloo")
    replica = DistributedDataParallel(torch.nn.Linear(2, 1))
    replica(torch.ones(3, 2)).sum().backward()
    tensor = torch.ones(1) * number
    all_reduce(tensor)
    destroy_process_group()
    return float(tensor.item())
