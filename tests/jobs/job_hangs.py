"""Tasks whose ranks stop moving in one way or another; rank 1 is the culprit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from flytekit import task
from torch.utils.data import DataLoader, Dataset

from flytekitplugins_safedist import Hangs, SafeTorch, Timeouts, current_rank, fs
from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.harness.procs import say, wait_for_word

QUICK = Timeouts(stop=0.5, exit=0.5)
FAIL = Hangs(action="fail", floor=2, ceiling=float(os.environ.get("TEST_CEILING", "4")))


def waits_alone() -> None:
    """Where rank 1 stands."""
    wait_for_word()


def holds_the_interpreter() -> None:
    """In C, with the GIL: no Python of this process runs, signal handlers included. A read goes on after a signal."""
    file = os.open(os.environ["TEST_WORD"], os.O_RDWR)
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)


def meet() -> None:
    """One collective."""

    dist.all_reduce(torch.ones(3))


@task(task_config=SafeTorch(nproc_per_node=3, timeouts=QUICK))
def one_holds_the_interpreter() -> None:
    """Ranks 0 and 2 wait for rank 1; the test is told when all are about to."""

    dist.init_process_group("gloo")
    meet()
    say(f"{current_rank().rank}")
    if current_rank().rank == 1:
        holds_the_interpreter()
    meet()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_waits() -> None:
    """Rank 1 waits for the test's word, rank 0 for rank 1."""

    dist.init_process_group("gloo")
    meet()
    say(f"{current_rank().rank}")
    if current_rank().rank == 1:
        waits_alone()
    meet()


class Stuck(Dataset):  # type: ignore[type-arg]
    """Something happens to the worker that reads its second item."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self._happens()
        return index


def loads(happens: Callable[[], None]) -> None:
    for _ in DataLoader(Stuck(happens), num_workers=1, batch_size=1):
        pass


def reads_from_a_killed_process() -> None:
    """Of the user's own making: nobody but the kernel knows that it is gone, and the queue stays open in the rank."""
    queue: multiprocessing.Queue[int] = multiprocessing.get_context("fork").Queue()
    multiprocessing.get_context("fork").Process(target=dies).start()
    queue.get()


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loops() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(3600)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def mixes(how: str) -> None:
    """What each rank calls last, where all call something."""
    rank, tensor = current_rank().rank, torch.ones(3)
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    if how == "groups crossed":
        for group in reversed(groups) if rank == 1 else groups:
            dist.all_reduce(tensor, group=group)
    elif how == "other collective":
        if rank == 1:
            dist.broadcast(tensor, src=1)
        dist.all_gather([torch.ones(3) for _ in range(3)], tensor)
    elif how == "other shape":
        if rank == 1:
            dist.all_reduce(torch.ones(5))
        dist.all_reduce(tensor)
        dist.barrier()
    elif how == "new group":
        if rank == 1:
            dist.new_group([0, 1, 2])
        dist.all_reduce(tensor)
    elif how == "skipped":
        if rank != 1:
            dist.all_reduce(tensor)
        dist.barrier()
    elif how == "barrier as it raises":
        try:
            if rank == 1:
                raise ValueError("a bad batch")
            dist.all_reduce(tensor)
        finally:
            dist.barrier()
    elif how == "barrier in one branch":
        if rank == 1:
            dist.barrier()
        dist.broadcast(tensor, src=0)
        dist.all_reduce(tensor)


ALONE = {"asleep": sleeps, "loop": loops, "gil": holds_the_interpreter, "stopped": stops}
ALONE["input"] = partial(loads, wait_for_word)  # from a pipe that nobody writes to
ALONE["worker stopped"], ALONE["worker killed"] = partial(loads, stops), partial(loads, dies)
ALONE["process killed"] = reads_from_a_killed_process


def stays() -> None:
    """The process does, though the function returns."""
    threading.Thread(target=threading.Event().wait).start()


def leaves_the_group() -> None:
    dist.destroy_process_group()
    sleeps()


RETURNS = {"returned": lambda: None, "returned, stays": stays}
RANK_0 = {"rank 0 killed": dies, "rank 0 asleep": leaves_the_group}


def begins() -> None:
    dist.init_process_group("gloo")
    meet()


def hangs(how: str) -> None:
    if how in ALONE:
        if current_rank().rank == 1:
            ALONE[how]()
        meet()
    elif how in RETURNS:
        if current_rank().rank == 1:
            RETURNS[how]()
            return
        meet()
    elif how in RANK_0:
        if current_rank().rank == 0:
            RANK_0[how]()
        dist.new_group([0, 1, 2])
    else:
        mixes(how)


@task(task_config=SafeTorch(nproc_per_node=3, timeouts=QUICK, hangs=FAIL))
def fails(how: str) -> None:
    """Hang in one way or another; the job fails for it."""
    begins()
    hangs(how)


AGAIN = {"nproc_per_node": 3, "max_restarts": 1, "timeouts": QUICK, "hangs": Hangs(floor=5, ceiling=5)}


@task(task_config=SafeTorch(**AGAIN))
def starts_again(how: str) -> float:
    """When rank 0 is in the function again. Ranks say when they are about to hang, for benchmarks/hangs.py."""
    if current_rank().round == 0:
        begins()
        say(f"{time.time()}")
        hangs(how)
    return time.time()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="report", floor=1, ceiling=2)))
def reports() -> str:
    """Rank 1 sleeps, until the test has seen it told of."""
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 1:
        waits_alone()
    meet()
    return "done"


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=600)))
def evaluates() -> str:
    """Rank 1 computes for long, the others wait at a barrier; the test says when it is done."""
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 1:
        say("evaluates")
        word = open_word()
        while not select.select([word], [], [], 0)[0]:
            sum(range(10_000))
    dist.barrier()
    return "evaluated"


COMPUTES = """
import os, select
word = os.open(os.environ["TEST_WORD"], os.O_RDONLY | os.O_NONBLOCK)
while not select.select([word], [], [], 0)[0]:
    sum(range(10_000))
"""


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=600)))
def compiles() -> str:
    """Rank 1 waits for a compiler, a process in a session of its own; the test says when that is done."""
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 1:
        subprocess.run([sys.executable, "-c", COMPUTES], start_new_session=True, check=True)
    meet()
    return "compiled"


def open_word() -> int:
    """The test's pipe."""
    return os.open(os.environ["TEST_WORD"], os.O_RDONLY | os.O_NONBLOCK)


@task(
    task_config=SafeTorch(
        nnodes=2, nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=2, ceiling=4), max_replacements=3
    )
)
def one_of_another_node_sleeps() -> None:
    """Rank 3, the last of node 1, does not come."""
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 3:
        sleeps()
    meet()


# --- jobs that tell their steps -------------------------------------------------------------------------------------
TOLD = 3


def tells(first: int = 0, until: int = TOLD) -> None:
    """Some steps."""
    for step in range(first, until):
        current_rank().progress(step)
        time.sleep(0.05)


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=2)))
def stands_alone() -> None:
    """A job of one rank, which waits for nobody."""
    tells()
    sleeps()


@task(task_config=SafeTorch(nproc_per_node=3, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=2)))
def stands_behind() -> None:
    """Ranks work by themselves; rank 1 comes no further."""
    tells()
    if current_rank().rank == 1:
        sleeps()
    tells(TOLD, until=1_000_000)


@task(task_config=SafeTorch(nproc_per_node=3, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=2)))
def stands_before_a_barrier() -> None:
    """All but rank 1 are in a barrier that no library records."""
    tells()
    if current_rank().rank == 1:
        sleeps()
    fs.barrier("everybody")


@task(
    task_config=SafeTorch(
        nnodes=2, nproc_per_node=1, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=2), max_replacements=3
    )
)
def waits_for_a_node_that_has_returned() -> None:
    """Rank 1 returns at once; rank 0 comes to a barrier when the test says so."""
    if current_rank().rank == 1:
        return
    wait_for_word()
    tells()
    fs.barrier("everybody")


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(floor=1, ceiling=2)))
def fails_as_it_is_found_out() -> None:
    dist.init_process_group("gloo")
    meet()
    if current_rank().rank == 1:
        wait_for_word()
        raise ValueError("the file server has answered at last: no such file")
    meet()


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=5, timeouts=QUICK, hangs=Hangs(floor=1, ceiling=2)))
def stands_at_the_same_step_again() -> None:
    dist.init_process_group("gloo")
    for step in range(TOLD):
        meet()
        current_rank().progress(step)
    if current_rank().rank == 1:
        sleeps()
    meet()


class Copied:
    """Its first copy on rank 0, for a save, takes until the test has seen that."""

    copies = 0

    def state_dict(self) -> dict[str, int]:
        self.copies += 1
        if self.copies == 1 and current_rank().rank == 0:
            wait_for_word()
        return {"y": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing is loaded."""


def writes(point: str) -> None:
    from tests.checkpoint import points

    if point == points.PART_OPENED:
        wait_for_word()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="fail", floor=1, ceiling=600)))
def saves(how: str) -> str:
    """Rank 0's part of a save takes until the test has seen it told."""
    from tests.checkpoint import points
    from tests.harness.product import group

    group.WORD_SECONDS = 2.0
    dist.init_process_group("gloo")
    if how == "writes" and current_rank().rank == 0:
        points.on_point = writes
    ckpt = Checkpoints(os.environ["TEST_CHECKPOINTS"], every=1)
    ckpt.save(0, {"x": Copied() if how == "copies" else {"y": torch.ones(3)}})
    return "saved"
