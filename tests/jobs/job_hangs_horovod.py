"""Tasks of Horovod whose ranks stop moving in one way or another; rank 1 is the culprit."""

from __future__ import annotations

import select
import time

import horovod.torch as hvd
import torch
from flytekit import task
from job_hangs import AGAIN, ALONE, FAIL, QUICK, RETURNS, open_word

from flytekitplugins_safedist import Hangs, SafeHorovod, current_rank
from tests.harness.procs import say


def meet(name: str, **options: object) -> None:
    hvd.allreduce(torch.ones(3), name=name, **options)


PAIR = hvd.ProcessSet([0, 1])
MIXES = {
    "other collective": lambda: hvd.broadcast(torch.ones(3), root_rank=0, name="other"),
    "skipped": lambda: meet("third"),
    "barrier in one branch": hvd.barrier,
    "other shape": lambda: hvd.allreduce(torch.ones(5), name="second"),
    "new group": lambda: hvd.add_process_set([0, 1]),
    "groups crossed": lambda: meet("mine", process_set=PAIR),  # where rank 0 comes after the next one
}


def begins(how: str) -> None:
    hvd.init(process_sets={"new group": "dynamic", "groups crossed": [PAIR]}.get(how))
    meet("first")


def hangs(how: str) -> None:
    if current_rank().rank == 1:
        if how in RETURNS:
            RETURNS[how]()
            return
        {**ALONE, **MIXES}[how]()
    meet("second")


@task(task_config=SafeHorovod(nproc_per_node=3, timeouts=QUICK, hangs=FAIL))
def fails(how: str) -> None:
    """Hang in one way or another; the job fails for it."""
    begins(how)
    hangs(how)


@task(task_config=SafeHorovod(**AGAIN))
def starts_again(how: str) -> float:
    """As in job_hangs.py."""
    if current_rank().round == 0:
        begins(how)
        say(f"{time.time()}")
        hangs(how)
    return time.time()


@task(task_config=SafeHorovod(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=600)))
def evaluates() -> str:
    """Rank 1 computes for long, the other waits; the test says when it is done."""
    hvd.init()
    meet("first")
    if current_rank().rank == 1:
        say("evaluates")
        word = open_word()
        while not select.select([word], [], [], 0)[0]:
            sum(range(10_000))
    meet("second")
    return "evaluated"
