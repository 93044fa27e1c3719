"""Tasks whose ranks stop moving in one way or another; rank 1 is the culprit."""

from __future__ import annotations

import ctypes
import os

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word

QUICK = Timeouts(stop=0.5, exit=0.5)


def waits_alone() -> None:
    """Where rank 1 stands."""
    wait_for_word()


def holds_the_interpreter() -> None:
    """In C, with the GIL: no Python of this process runs, signal handlers included. A read goes on after a signal."""
    file = os.open(os.environ["TEST_WORD"], os.O_RDWR)
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)


def meet() -> None:
    """One collective."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))


@task(task_config=SafeTorch(nproc_per_node=3, timeouts=QUICK))
def one_holds_the_interpreter() -> None:
    """Ranks 0 and 2 wait for rank 1; the test is told when all are about to."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    meet()
    say(f"{current_rank().rank}")
    if current_rank().rank == 1:
        holds_the_interpreter()
    meet()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_waits() -> None:
    """Rank 1 waits for the test's word, rank 0 for rank 1."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    meet()
    say(f"{current_rank().rank}")
    if current_rank().rank == 1:
        waits_alone()
    meet()
