"""Tasks whose ranks wait: for one that never comes, in groups and messages; or for one that comes late."""

from __future__ import annotations

import os
import select
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from flytekit import task
from job_hangs import QUICK, meet, open_word, sleeps

from flytekitplugins_safedist import Hangs, SafeTorch, current_rank
from tests.harness.procs import say

LONG = 600


def pipeline() -> None:
    """Two stages, two replicas: rank 3 does not send."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, tensor = current_rank().rank, torch.ones(3)
    if rank == 1:
        dist.recv(tensor, 3)
    elif rank == 3:
        sleeps()
    dist.all_reduce(tensor, group=groups[rank // 2])


def evaluators() -> None:
    """Ranks 0 and 3 are in no group of the others, and poll."""
    pair = dist.new_group([1, 2])
    if current_rank().rank == 1:
        sleeps()
    while current_rank().rank != 2:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(3), group=pair)


def beside() -> None:
    """A thread of ranks 0 and 2 exchanges something all the time."""
    side = dist.new_group([0, 2])

    def exchanges() -> None:
        while True:
            dist.all_reduce(torch.ones(1), group=side)
            time.sleep(0.02)

    if current_rank().rank in (0, 2):
        threading.Thread(target=exchanges, daemon=True).start()
    if current_rank().rank == 1:
        sleeps()
    meet()


def messages() -> None:
    """Sent and received before, in the same group: they are counted otherwise than collectives are."""
    rank, tensor = current_rank().rank, torch.ones(3)
    if rank < 2:
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        way = dist.irecv if rank == 0 else dist.isend
        [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, 1 - rank)])]
    meet()
    if rank == 1:
        sleeps()
    meet()


WAITS = {"pipeline": pipeline, "evaluators": evaluators, "beside": beside, "messages": messages}


@task(task_config=SafeTorch(nproc_per_node=4, timeouts=QUICK, hangs=Hangs(action="fail", floor=2, ceiling=LONG)))
def waits(how: str) -> None:
    dist.init_process_group("gloo")
    WAITS[how]()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=2, ceiling=LONG)))
def remembers_much() -> None:
    """As many operations as torchtitan has torch remember, of each rank by itself, for it is the sooner done."""
    dist.init_process_group("gloo")
    tensor, alone = torch.ones(1), [dist.new_group([rank]) for rank in range(2)]
    for _ in range(int(os.environ["TORCH_FR_BUFFER_SIZE"])):
        dist.all_reduce(tensor, group=alone[current_rank().rank])
    if current_rank().rank == 1:
        sleeps()
    meet()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail")))
def has_a_short_timeout() -> None:
    """By the defaults: torch would end it after 24 seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=24))
    meet()
    if current_rank().rank == 1:
        sleeps()
    meet()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=2, ceiling=LONG)))
def never_comes_to_a_group() -> None:
    """Nothing is recorded of the group that rank 0 makes."""
    dist.init_process_group("gloo")
    if current_rank().rank == 1:
        sleeps()
    dist.new_group([0, 1])


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=2, ceiling=LONG)))
def makes_its_group_again() -> None:
    """Rank 1 has come to more operations than rank 0 now waits in, in a group of the same name."""
    me = current_rank()
    store = dist.FileStore(str(me.node_dir / "store"), me.world_size)  # rank 0's other one might not be closed yet
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    for _ in range(5):
        meet()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 1:
        sleeps()
    meet()


# --- nobody hangs ---------------------------------------------------------------------------------------------------
@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(ceiling=2)))
def has_long_steps() -> str:
    """Nothing but a step is old, when rank 0 evaluates and the other begins to wait for it."""
    dist.init_process_group("gloo")
    for step in range(2):
        current_rank().progress(step)
        meet()
    if current_rank().rank == 0:
        say("evaluates")
        word = open_word()
        while not select.select([word], [], [], 0)[0]:
            sum(range(10_000))
    dist.barrier()
    return "done"


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=2, ceiling=LONG)))
def writes_predictions() -> str:
    """Rank 0, while the other waits for it; it uses hardly any of a core."""
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 0:
        say("writes")
        word, file = open_word(), os.open(Path(os.environ["TMPDIR"], "predictions"), os.O_WRONLY | os.O_CREAT)
        while not select.select([word], [], [], 0.02)[0]:
            os.pwrite(file, bytes(1 << 14), 0)
            os.fsync(file)
    meet()
    return "written"
