"""Ranks that let processes of their own work for them: DataLoader workers, and queues of tensors."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from flytekit import task
from squares import Large, Squares
from torch.utils.data import DataLoader

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank

DEADLINE = 100.0
"""Seconds for a batch: a worker that cannot hand its tensors over is then an error, and not a hang."""


def loaded(epochs: int = 2, **options: object) -> list[float]:
    """What epochs of a loader bring."""
    loader = DataLoader(Squares(), batch_size=2, timeout=DEADLINE, **options)
    return [batch[:, 0].sum().item() for _ in range(epochs) for batch in loader]


def put(queue: torch.multiprocessing.Queue, received: torch.multiprocessing.Event) -> None:
    """In another process, which keeps the tensor until the rank has it: it hands the memory over when asked."""
    queue.put(torch.arange(5.0))
    received.wait(DEADLINE)


def through_a_queue() -> float:
    """A tensor from another process."""
    context = torch.multiprocessing.get_context("fork")
    queue, received = context.Queue(), context.Event()
    process = context.Process(target=put, args=(queue, received))
    process.start()
    total = queue.get(timeout=DEADLINE).sum().item()
    received.set()
    process.join()
    return float(total)


@task(task_config=SafeTorch(nproc_per_node=2))
def load() -> dict[str, list[float]]:
    """Batches of every kind of worker."""
    sharing = torch.multiprocessing.get_sharing_strategy()
    found = {
        "fork": loaded(num_workers=2),
        "persistent": loaded(num_workers=2, persistent_workers=True),
        "queue": [through_a_queue()],
    }
    if current_rank().rank == 0:  # each worker of each epoch imports torch: once is enough
        found["spawn"] = loaded(1, num_workers=1, multiprocessing_context="spawn")
        found["forkserver"] = loaded(1, num_workers=1, multiprocessing_context="forkserver")
    torch.multiprocessing.set_sharing_strategy("file_system")  # by torch_shm_manager, which has a socket of its own
    found["by file system"] = loaded(num_workers=2)
    torch.multiprocessing.set_sharing_strategy(sharing)
    assert os.path.realpath(os.environ["TMPDIR"]).endswith(f"rank-{current_rank().rank}/tmp")
    return found


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1))
def shares_memory() -> dict[str, Any]:
    """What two ranks have in /dev/shm as one of them is killed."""
    from joblib.externals.loky.backend import get_context

    me = current_rank()
    found, others = me.node_dir / "found", (f"torch_{os.getpid()}_", f"sem.loky-{os.getpid()}-")
    if me.round:
        names = json.loads(found.read_text())
        left = [name for name in (names["python's"], *names["others'"]) if Path("/dev/shm", name).exists()]
        return {**names, "left in round 1": left}
    torch.multiprocessing.set_sharing_strategy("file_system")
    own = shared_memory.SharedMemory(create=True, size=1)
    kept = torch.ones(1000).share_memory_()
    joblibs = get_context("loky").Lock()
    gathered: list[Any] = [None, None]
    dist.init_process_group("gloo")
    dist.all_gather_object(gathered, [name for name in os.listdir("/dev/shm") if name.startswith(others)])
    if me.rank == 1:
        found.write_text(json.dumps({"python's": own.name, "others'": [name for each in gathered for name in each]}))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return {"kept": [len(kept), joblibs]}


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.5, exit=0.5)))
def hands_over_too_much() -> None:
    if current_rank().rank == 0:
        signal.pause()
    for _ in DataLoader(Large(), num_workers=1):
        pass
