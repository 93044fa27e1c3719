"""Eight ranks of one node that download a directory; with safedist, and with flytekit alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from flytekitplugins_safedist import SafeTorch, Scratch, current_rank

RANKS = 8


def download(folder: FlyteDirectory) -> tuple[float, float, int]:
    """When it began and ended, and how many bytes are there."""
    began = time.monotonic()
    path = Path(folder)
    ended = time.monotonic()
    return began, ended, sum(file.stat().st_size for file in path.rglob("*"))


SCRATCH = Scratch(path=os.environ.get("INPUTS_SCRATCH"))


@task(task_config=SafeTorch(nproc_per_node=RANKS, scratch=SCRATCH))  # type: ignore[untyped-decorator]
def with_safedist(folder: FlyteDirectory) -> str:
    """Times of all ranks, which begin together."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, download(folder))
    (current_rank().node_dir / "done").touch()
    dist.destroy_process_group()
    return json.dumps(every)


def alone(uri: str, root: str, rank: int, barrier: Any, results: Any) -> None:
    """One process with flytekit's own way to the store."""
    from flytekit import FlyteContextManager
    from flytekit.configuration import DataConfig
    from flytekit.core.data_persistence import FileAccessProvider

    access = FileAccessProvider(f"{root}/{rank}", f"{root}/raw", DataConfig.auto())
    with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
        folder = FlyteDirectory.from_source(uri)
        barrier.wait()
        results.put(download(folder))


def with_flytekit(uri: str, root: str) -> list[tuple[float, float, int]]:
    """Times of as many processes as there are ranks, which begin together."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.Queue()
    processes = [context.Process(target=alone, args=(uri, root, rank, barrier, results)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    times = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return times
