"""Ranks that make process groups when others have returned, again and again, and in processes of their own."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from flytekit import task
from meeting_child import sums

from flytekitplugins_safedist import SafeTorch, current_rank
from tests.harness.procs import say, wait_for_word


def summed(group: dist.ProcessGroup | None = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return float(value)


@task(task_config=SafeTorch(nproc_per_node=3))
def one_returns_early() -> float:
    """Rank 0, whose value this is."""
    dist.init_process_group("gloo")
    if current_rank().rank == 0:
        say(str(os.getpid()))
        return summed()
    summed()
    wait_for_word()
    say(str(summed(dist.new_group([1, 2], use_local_synchronization=True))))
    return 0.0


@task(task_config=SafeTorch(nproc_per_node=3))
def make_groups_again() -> list[float]:
    """With nothing between the end of one and the beginning of the next; and each is still held then."""
    sums, held = [], []
    for _ in range(4):
        dist.init_process_group("gloo")
        held.append(dist.new_group([0, 1]))
        sums.append(summed())
        dist.destroy_process_group()
    return sums


@task(task_config=SafeTorch(nproc_per_node=2))
def ask_for_no_place() -> None:
    dist.init_process_group("gloo", rank=current_rank().rank, world_size=8)


@task(task_config=SafeTorch(nproc_per_node=2))
def meet_beside_a_group() -> tuple[float, int]:
    """As torch.distributed.checkpoint does with DCP_USE_PREFIX_STORE=1; and the port is free when the group is gone."""
    dist.init_process_group("gloo")
    beside = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    beside.add("there", 1)
    total = summed()
    met = beside.add("there", 0)
    dist.barrier()
    del beside
    dist.destroy_process_group()
    say("left")
    wait_for_word()
    mp.spawn(sums, args=(os.environ["TEST_SAID"],), nprocs=1)
    return total, met


@task(task_config=SafeTorch(nproc_per_node=2))
def lose_the_store() -> float:
    """Once both have said what listens at the port of their store, and they have met there."""
    dist.init_process_group("gloo")
    say(os.environ["SAFEDIST_STORE_PORT"])
    wait_for_word()
    return summed(dist.new_group([0, 1]))
