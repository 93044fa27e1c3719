"""The same function as a stock HorovodJob, a kfpytorch Elastic task, and ours: it says when it was entered, makes
a step of an optimizer, says so, and waits.

Run by ``benchmarks/startup.py``; importing it costs what importing a real training module costs: torch and Horovod.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import horovod.torch as hvd
import torch
from flytekit import task
from flytekitplugins.kfmpi import HorovodJob, Launcher, Worker
from flytekitplugins.kfpytorch import Elastic

from flytekitplugins_safedist import SafeHorovod

RANKS = int(os.environ.get("BENCH_RANKS", "1"))

_until = time.process_time() + float(os.environ.get("BENCH_IMPORT_SECONDS", "0"))
while time.process_time() < _until:  # as pandas, transformers or datasets take it
    pass


def _mark(here: Path, what: str) -> None:
    mark = here / f"{uuid.uuid4().hex}.tmp"
    mark.write_text(repr(time.time()))
    mark.rename(mark.with_suffix(f".{what}"))


def _enter(directory: str) -> int:
    assert hvd is not None
    here = Path(directory)
    _mark(here, "entered")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    _mark(here, "stepped")
    while not (here / "release").exists():
        time.sleep(0.02)
    return 0


@task(task_config=HorovodJob(worker=Worker(replicas=1), launcher=Launcher(replicas=1), slots=RANKS))
def stock(directory: str) -> int:
    return _enter(directory)


@task(task_config=Elastic(nnodes=1, nproc_per_node=RANKS, start_method="spawn"))
def elastic(directory: str) -> int:
    return _enter(directory)


@task(task_config=SafeHorovod(nproc_per_node=RANKS))
def ours(directory: str) -> int:
    return _enter(directory)


@task(task_config=SafeHorovod(nproc_per_node=RANKS, start_method="spawn"))
def ours_spawn(directory: str) -> int:
    return _enter(directory)
