"""Tasks of a soak (benchmarks/soak.py): two nodes with two ranks each, of which ``$TEST_FAULT`` makes one fail."""

from __future__ import annotations

import json
import os
import signal
import time

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word

TIMEOUTS = Timeouts(stop=1, exit=5, heartbeat=8, rendezvous=90, upload=90, start=90)
STEPS = 10


class UnspeakableError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def fail(kind: str) -> None:
    """Fail in one way."""
    print(f"about to {kind}")
    if kind == "raise":
        raise ValueError("no learning rate")
    if kind == "giant":
        raise ValueError("語" * 300_000 + '"' * 300_000 + "\\" * 100_000)
    if kind == "surrogate":
        raise FileNotFoundError("no caf\udce9\0.txt")
    if kind == "unspeakable":
        raise UnspeakableError
    if kind == "sys.exit":
        raise SystemExit({"a": "dict"})
    if kind == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(60)


def maybe_fail(step: int) -> None:
    """The fault that this run is to have, at its step."""
    me = current_rank()
    if step == 0 and me.round == 0 and os.environ.get("TEST_GATE"):
        say(f"rank {me.rank}")
        wait_for_word()
    fault = json.loads(os.environ["TEST_FAULT"])
    if fault and me.rank == fault["rank"] and step == fault["step"] and (me.round == 0 or not fault["once"]):
        fail(fault["kind"])
    time.sleep(0.1)


def with_torch() -> str:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for step in range(STEPS):
        maybe_fail(step)
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
    dist.destroy_process_group()
    return f"{total.item():g} from {current_rank().world_size} ranks in round {current_rank().round}"


def with_horovod() -> str:
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = torch.zeros(1)
    for step in range(STEPS):
        maybe_fail(step)
        total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
    return f"{total.item():g} from {current_rank().world_size} ranks in round {current_rank().round}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def torch_fixed() -> str:
    return with_torch()


@task(task_config=SafeTorch(nnodes="2:3", nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def torch_range() -> str:
    return with_torch()


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def horovod_fixed() -> str:
    return with_horovod()


@task(task_config=SafeHorovod(nnodes="2:3", nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def horovod_range() -> str:
    return with_horovod()
