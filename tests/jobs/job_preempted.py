"""Tasks whose ranks train until a pod of the job is told to stop; what goes on from their save ends soon."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints
from flytekitplugins_safedist.fs import barrier
from flytekitplugins_safedist.run import run_script
from tests.harness.procs import say, wait_for_word
from tests.harness.product import context

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60, preemption=60)
MORE = 3


def train(together) -> str:
    """Steps that all ranks take together, until some after a save for a pod that was told to stop. What is saved is the
    step, by every rank, in a file of its own."""
    me, shared = current_rank(), context.page()
    kept = Path(os.environ["TEST_KEPT"])
    files = sorted(kept.glob("rank-*"))
    saved, urgent = files[0].read_text().split() if files else ("0", "False")
    first = int(saved)
    shared.take_part(first)
    step = first
    while urgent == "False" or step < first + MORE:
        save = shared.at(step)
        if save is not None:
            (kept / f"rank-{me.rank}").write_text(f"{step} {save.urgent}")
            say(f"rank {me.rank} saved {step} urgent {save.urgent} preempted {me.preempted}")
            shared.finish(save.call)
            shared.stand_still()
        together()
        if step == first:
            say(f"rank {me.rank} round {me.round} from {first} of {me.world_size}")
        step += 1
    return f"from {first} to {step} in round {me.round} with {me.world_size} ranks"


def by_torch() -> str:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train(lambda: dist.all_reduce(torch.ones(1)))


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def torch() -> str:
    return by_torch()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=TIMEOUTS))
def torch_alone() -> str:
    return by_torch()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=2, timeouts=TIMEOUTS))
def torch_range() -> str:
    return by_torch()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=2, timeouts=TIMEOUTS))
def range_by_checkpoints() -> str:
    """Steps of which none is saved by itself, until a third node has joined."""
    me = current_rank()
    ckpt = Checkpoints(os.environ["TEST_KEPT"], every=timedelta(hours=1))
    step = first = ckpt.restore(state := {"steps": 0})
    say(f"rank {me.rank} from {first} of {me.world_size}")
    while me.nnodes == 2:
        barrier()
        state["steps"] = step
        ckpt.save(step, state)
        step += 1
    return "all are there"


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def horovod() -> str:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return train(lambda: hvd.allreduce(torch.ones(1)))


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def by_hand() -> str:
    """No steps: each rank looks, and takes its time to save."""
    me = current_rank()
    say(f"rank {me.rank} round {me.round} preempted {me.preempted}")
    if me.round == 0:
        while not me.preempted:
            pass
        say(f"rank {me.rank} preempted")
        wait_for_word()
        say(f"rank {me.rank} has saved")
        me.saved()
        context.page().stand_still()
    return f"round {me.round}"


def done() -> str:
    """The last steps are done by the time that a pod is told to stop."""
    me = current_rank()
    say(f"rank {me.rank} round {me.round} preempted {me.preempted}")
    while not me.preempted:
        pass
    return f"done in round {me.round}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def done_on_two() -> str:
    return done()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def done_first_on_node_0() -> str:
    """In the first round the others have yet to save."""
    me = current_rank()
    say(f"rank {me.rank} round {me.round} preempted {me.preempted}")
    if me.round == 0 and me.node_rank == 1:
        while not me.preempted:
            pass
        say(f"rank {me.rank} has saved")
        me.saved()
        context.page().stand_still()
    return f"done in round {me.round}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def looks_late_on_node_1() -> str:
    """As :func:`done_first_on_node_0`; the others look at it for the first time when the test gives the word."""
    me = current_rank()
    if me.round == 0 and me.node_rank == 1:
        say(f"rank {me.rank} has begun")
        wait_for_word()
    return done_first_on_node_0.task_function()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=TIMEOUTS))
def done_alone() -> str:
    return done()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=replace(TIMEOUTS, preemption=20_000)))
def by_script() -> None:
    run_script(os.environ["TEST_SCRIPT"])


OF_ATTEMPTS = replace(TIMEOUTS, preemption=float(os.environ.get("TEST_PREEMPTION", "60")))


@task(task_config=SafeTorch(timeouts=OF_ATTEMPTS))
def alone_by_checkpoints() -> str:
    return by_checkpoints()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=OF_ATTEMPTS))
def two_by_checkpoints() -> str:
    return by_checkpoints()


def by_checkpoints() -> str:
    """One long step, in which the pods are told to stop; then one more, after which they save."""
    attempt = current_rank().attempt
    ckpt = Checkpoints(os.environ["TEST_KEPT"], every=None)
    first = ckpt.restore(state := {"steps": 0})
    say(f"attempt {attempt} begins with {first}")
    if attempt:
        return f"from {first}"
    ckpt.save(0, state)
    say("in a long step")
    wait_for_word()
    how = os.environ.get("TEST_HOW")
    if how == "raise":
        raise ValueError("the loss is NaN")
    if how == "exit":
        sys.exit(3)
    step = 0
    while not ckpt.should_save(step := step + 1):
        pass
    ckpt.save(step, state)
    return "nobody told this pod to stop"
