"""Tasks whose runs are looked at afterwards."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from flytekit import Deck, task

from flytekitplugins_safedist import Profile, SafeTorch, Timeouts, current_rank, stage
from tests.harness.procs import say, wait_for_word

STEPS = 12
THREE = SafeTorch(nproc_per_node=3)


def _train(late: int, seconds: float) -> None:
    """Ranks in step: each waits for the others in ``sync``, as in a collective; one of them loads for longer."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for _ in range(STEPS):
        for name in ("load", "forward"):
            with stage(name):
                time.sleep(seconds if (current_rank().rank, name) == (late, "load") else 0.002)
        with stage("sync"):
            dist.barrier()
    dist.destroy_process_group()


@task(task_config=THREE, enable_deck=True)
def one_is_late() -> int:
    _train(2, 0.3)
    return STEPS


TWO_NODES = SafeTorch(nnodes=2, nproc_per_node=2, timeouts=Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60))


@task(task_config=TWO_NODES, enable_deck=True)
def two_nodes() -> int:
    """The last rank, on node 1, is late, and then it raises."""
    _train(3, 0.05)
    if current_rank().rank == 3:
        raise ValueError("no learning rate")
    return STEPS


# A host that is here waits half a heartbeat for another pod.
RANGE = SafeTorch(nnodes="1:2", nproc_per_node=2, timeouts=replace(TWO_NODES.timeouts, heartbeat=60))


@task(task_config=RANGE, enable_deck=True)
def a_range() -> int:
    """Waits for the test's word, in each round."""
    say(f"rank {current_rank().rank}")
    wait_for_word()
    return current_rank().round


@task(task_config=SafeTorch(nproc_per_node=2, profile=Profile(ranks=(1,), steps=(2, 3))))
def one_is_profiled() -> int:
    """Five steps, each in a block of its own."""
    import torch
    from torch.profiler import record_function

    for step in range(5):
        with record_function(f"step {step}"), record_function(f"at {os.environ['DATABASE_PASSWORD']}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        current_rank().progress(step)
    return 5


@task(task_config=SafeTorch(nproc_per_node=1, profile=Profile(steps=(2, 3))))
def profiles_itself() -> int:
    """A process can have one profiler."""
    from torch import profiler

    with profiler.profile() as own:
        for step in range(5):
            with profiler.record_function("a step"):
                current_rank().progress(step)
    print("steps seen by its own:", next(each.count for each in own.key_averages() if each.key == "a step"))
    return 5


@task(task_config=THREE, enable_deck=True)
def one_raises() -> None:
    """Prints a secret, and raises with it."""
    secret = os.environ["DATABASE_PASSWORD"]
    with stage("load"):
        if current_rank().rank == 1:
            print("connecting to", secret, "at postgres://me:hunter2secret@db/x")
            raise ValueError(f"cannot connect with {secret} <b>")
        time.sleep(30)


@task(task_config=SafeTorch(nproc_per_node=2))
def each_alone() -> dict[str, float]:
    """Trains without a process group."""
    me = current_rank()
    for step in range(3):
        me.progress(step, loss=1 / (2 + step), rank=me.rank)
    return me.values


def _steps_and_waits() -> None:
    me = current_rank()
    for step in range(3):
        with stage("load"):
            pass
        me.progress(step, loss=0.25)
    Deck("mine", f"drawn by rank {me.rank}")
    Deck.publish()
    say(f"rank {me.rank} of process {os.getpid()} of {os.getppid()}")
    wait_for_word()


@task(task_config=TWO_NODES, enable_deck=True)
def two_nodes_wait() -> None:
    """Takes three steps, publishes a deck, and waits for the test's word."""
    _steps_and_waits()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.5, preemption=0.1)), enable_deck=True)
def one_node_waits() -> None:
    """The same, on one node."""
    _steps_and_waits()
