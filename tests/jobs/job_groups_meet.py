"""Ranks that look whether rank 0 listens: before it has a process group, in it, and after it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank


def listens() -> bool:
    """Whether anybody listens where torch's store is to be."""
    with socket.socket() as sock:
        return sock.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) == 0


def tell(fifos: str, word: str) -> None:
    Path(fifos, word).write_text(word)


def wait(fifos: str, word: str) -> None:
    assert Path(fifos, word).read_text() == word


def summed() -> float:
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()
    return float(value)


@task(task_config=SafeTorch(nproc_per_node=2))
def looks(fifos: str) -> list[float]:
    if current_rank().rank == 0:
        tell(fifos, "here")  # in the function, without a group
        wait(fifos, "heard")
        sums = [summed()]
        tell(fifos, "destroyed")
        wait(fifos, "looked")
    else:
        wait(fifos, "here")
        assert listens()
        tell(fifos, "heard")
        sums = [summed()]
        wait(fifos, "destroyed")
        assert not listens()
        tell(fifos, "looked")
    return [*sums, summed()]
