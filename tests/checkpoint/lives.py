"""Lives of a job that saves: each resumes what the one before has left, and is killed somewhere. For tests and soak.

Every number of the state is ``life * 1000 + step``, so that a state of two saves, also of two saves of one step, shows.
All that must hold is in the ledger, a file to which ranks append a line at once: what was committed, and what was
resumed (:func:`faults`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint import points
from tests.checkpoint.saving import reach_stores
from tests.fs.ranks import Outcome, Process, meeting_point, rank_env

WRITER = "safedist-checkpoint_0"
"""The thread that writes saves."""


@dataclass(frozen=True)
class Kill:
    """Who is killed with SIGKILL, and where.

    Attributes:
        whom: the rank itself, all ranks at once, their agent, or what serves the store.
        rank: that comes to where it happens.
        at: a point of a save (:mod:`points`), the name of an event of Python's audit hooks, or "time".
        arrival: the how-manieth time that the rank's writing thread comes there, from 1; milliseconds from the first
            step, for "time".
    """

    whom: str
    rank: int
    at: str
    arrival: int


@dataclass(frozen=True)
class Life:
    """What each rank of a job does.

    Attributes:
        number: from 1.
        place: where saves go, as this rank names it.
        directory: of the ledger and of process ids.
        sharded: whether each rank holds a part of the model.
        steps: how many it takes, saving after each.
        kill: what happens to it.
        floats: in the part of the state that is one large tensor.
    """

    number: int
    place: str
    directory: Path
    sharded: bool = False
    steps: int = 3
    kill: Kill | None = None
    floats: int = 1000


def new_state(floats: int, *, sharded: bool) -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    if sharded and dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"model": model, "again": torch.zeros(floats), "number": 0}
    fill(state, -1)
    return state


def fill(state: dict[str, Any], value: int) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(value)
    state["again"].fill_(value)
    state["number"] = value


def values(state: dict[str, Any]) -> set[int]:
    """All numbers that the state is made of: one, unless it is of two saves."""
    tensors = [*state["model"].parameters(), state["again"]]
    held = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return {int(one) for tensor in held for one in tensor.detach().unique()} | {int(state["number"])}


def said(directory: Path, line: str) -> None:
    with open(directory / "ledger", "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


_step: ContextVar[int] = ContextVar("step")
"""The step that is being saved; the writing thread runs in a copy of the context in which the save was begun."""


def live(life: Life, rank: int) -> None:
    """One rank's life. It has joined its process group, where there are several."""
    (life.directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    state = new_state(life.floats, sharded=life.sharded)
    ckpt = Checkpoints(life.place, every=1, keep=2)
    first = ckpt.restore(state)
    said(life.directory, f"resumed {life.number} {rank} {first - 1} {' '.join(map(str, sorted(values(state))))}")
    _arm(life, rank)
    for step in range(first, first + life.steps):
        fill(state, life.number * 1000 + step)
        _step.set(step)
        ckpt.save(step, state)
    ckpt.wait()


def _arm(life: Life, rank: int) -> None:
    kill = life.kill if life.kill is not None and life.kill.rank == rank else None
    seen = 0

    def happened(event: str) -> None:
        nonlocal seen
        if kill is not None and event == kill.at and threading.current_thread().name == WRITER:
            seen += 1
            if seen == kill.arrival:
                _strike(life.directory, kill)

    def reached(point: str) -> None:
        if point == points.COMMITTED:
            said(life.directory, f"committed {_step.get()}")
        happened(point)

    points.on_point = reached
    if kill is not None and kill.at == "time":
        timer = threading.Timer(kill.arrival / 1000, _strike, (life.directory, kill))
        timer.daemon = True
        timer.start()
    elif kill is not None and kill.at not in points.IN_ORDER:
        sys.addaudithook(lambda event, _: happened(event))


def _strike(directory: Path, kill: Kill) -> None:
    said(directory, "struck saving" if points.under_way else "struck")
    names = {"all": "rank-*.pid", "rank": f"rank-{kill.rank}.pid"}.get(kill.whom, f"{kill.whom}.pid")
    pids = [int(path.read_text()) for path in directory.glob(names)]
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # this one last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lived(
    life: Life, places: Sequence[str], env: Mapping[str, str], *, within: float = 240.0, together: bool = True
) -> list[Outcome]:
    """A life without an agent: one process for each of ``places``. When one is killed the others are, too; where they
    do not die ``together``, each comes to its own end."""
    for path in life.directory.glob("rank-*.pid"):
        path.unlink()
    meeting, count = meeting_point(), len(places)
    ranks = [
        Process(_start, life, rank, place, env={**rank_env(rank, count), **meeting, **env})
        for rank, place in enumerate(places)
    ]
    deadline = time.monotonic() + within
    running = list(ranks)
    try:
        while running:
            connection.wait([rank._process.sentinel for rank in running], timeout=deadline - time.monotonic())
            running = [rank for rank in running if rank._process.is_alive()]
            killed = together and any(rank._process.exitcode == -signal.SIGKILL for rank in ranks)
            if killed or time.monotonic() > deadline:
                break
        hung = time.monotonic() > deadline
    finally:
        for rank in ranks:
            if rank._process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
    return [Outcome("hung", f"for {within:g} s")] if hung else [rank.outcome() for rank in ranks]


def _start(life: Life, rank: int, place: str) -> None:
    reach_stores()
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    live(replace(life, place=place), rank)


def faults(ledger: str) -> list[str]:
    """What is wrong with what was resumed: torn, older than what was committed, or not the same on every rank."""
    found: list[str] = []
    committed = -1
    of_life: dict[int, int] = {}
    for line in ledger.splitlines():
        what, *numbers = line.split()
        if what == "committed":
            committed = max(committed, int(numbers[0]))
        if what != "resumed":
            continue
        life, rank, step, *held = map(int, numbers)
        if len(held) != 1 or (step >= 0 and held[0] % 1000 != step):
            found.append(f"life {life}, rank {rank}: step {step} is made of {held}")
        if rank == 0 and step < committed:  # the others may come here when rank 0 has saved again
            found.append(f"life {life}: step {step} after {committed} was committed")
        if of_life.setdefault(life, step) != step:
            found.append(f"life {life}: rank {rank} resumed step {step}, another one {of_life[life]}")
    return found
