"""Ranks that take more memory than there is: in a control group whose limit, and what is in use, they are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from flytekit import task
from torch.utils.data import DataLoader, Dataset

from flytekitplugins_safedist import SafeTorch, current_rank


class Greedy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        if number >= 20 and current_rank().rank == 1:
            self.held = [*getattr(self, "held", []), bytearray(60 << 20)]
        return torch.ones(4)


def train(workers: int) -> None:
    dist.init_process_group("gloo")
    # No tensors: of a worker that has announced one, and is gone as the rank comes for it, the loader does not know.
    for _ in DataLoader(Greedy(), batch_size=4, num_workers=workers, collate_fn=len):
        dist.all_reduce(torch.ones(4))


@task(task_config=SafeTorch(nproc_per_node=2))
def a_worker_is_greedy() -> None:
    train(2)


@task(task_config=SafeTorch(nproc_per_node=2))
def a_rank_is_greedy() -> None:
    train(0)


def holds_all(*_: int) -> None:
    held = []
    while True:
        held.append(bytearray(60 << 20))


def with_a_pool() -> None:
    with ProcessPoolExecutor(1) as pool:
        pool.submit(holds_all).result()


def hands_over_and_holds_all(queue: Any) -> None:
    queue.put(torch.ones(4))
    queue.close()
    queue.join_thread()  # it is told of
    holds_all()


def fetches_from_one_that_is_gone() -> None:
    context = mp.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=hands_over_and_holds_all, args=(queue,))
    process.start()
    process.join()
    queue.get()


def train_beside(starts: Callable[[], object]) -> None:
    dist.init_process_group("gloo")
    if current_rank().rank == 1:
        starts()
    dist.all_reduce(torch.ones(4))


@task(task_config=SafeTorch(nproc_per_node=2))
def a_pools_process_is_greedy() -> None:
    train_beside(with_a_pool)


@task(task_config=SafeTorch(nproc_per_node=2))
def a_spawned_process_is_greedy() -> None:
    train_beside(lambda: mp.start_processes(holds_all, start_method="fork"))  # type: ignore[no-untyped-call]


@task(task_config=SafeTorch(nproc_per_node=2))
def a_tensors_sender_is_greedy() -> None:
    train_beside(fetches_from_one_that_is_gone)


def in_use(group: Path) -> int:
    usage = next(file for name in ("memory.current", "memory.usage_in_bytes") if (file := group / name).exists())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_active_file" in stat else ""
    return int(usage.read_text()) - sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))


def is_full() -> bool:
    """Nearly: the kernel ends nobody yet."""
    return in_use(Path(os.environ["TEST_ENTERS"])) >= 0.97 * int(os.environ["TEST_LIMIT"])


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1))
def one_node_is_greedy() -> None:
    dist.init_process_group("gloo")
    held = []
    while True:
        if "TEST_ENTERS" in os.environ and not is_full():
            held.append(bytearray(4 << 20))
        dist.all_reduce(torch.ones(1))


@task(task_config=SafeTorch(nproc_per_node=1))
def fills_its_memory_at_first() -> str:
    mark, held = Path(os.environ["TEST_MARK"]), []
    if mark.exists():
        return "done"
    while not is_full():
        held.append(bytearray(4 << 20))
    mark.touch()
    signal.pause()
    return "never"
