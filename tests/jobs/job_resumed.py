"""The examples of checkpoints, unbroken, or killed at a step of their first round, and held there in the next one until
a pod is told to stop.

``$TEST_HOW`` is ``unbroken``, ``killed`` (rank 1 dies once rank 0 has committed what it saved) or ``killed and told``
(and then each rank says that it is there, and goes on when it knows of the preemption).
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.harness.procs import say, wait_for_word

sys.path.append(str(Path(__file__).parents[2] / "examples"))
STEP = 11
"""In the middle of the second epoch of eight steps, two after a save and three before the next one."""

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60, preemption=60)


def run(module: str) -> float:
    how = os.environ["TEST_HOW"]
    me = current_rank()
    save, should_save, restore = Checkpoints.save, Checkpoints.should_save, Checkpoints.restore
    done: set[int] = set()

    def restored(self: Checkpoints, state: Any, step: int | None = None) -> int:
        first = restore(self, state, step)
        if me.round > 0:
            say(f"rank {me.rank} goes on with {first}")
        return first

    def saved(self: Checkpoints, step: int, state: Any, force: bool = False) -> None:
        save(self, step, state, force)
        happen(self, step)

    def asked(self: Checkpoints, step: int) -> bool:
        is_wanted = should_save(self, step)
        if not is_wanted:
            happen(self, step)
        return is_wanted

    def happen(self: Checkpoints, step: int) -> None:
        if step != STEP or step in done or how == "unbroken":
            return
        done.add(step)
        if me.round == 0:
            self.wait()
            if me.rank == 0:
                say(f"rank 0 has committed {self.latest}")
            else:
                wait_for_word()
                os.kill(os.getpid(), signal.SIGKILL)
        elif me.round == 1 and how == "killed and told":
            say(f"rank {me.rank} is there")
            while not me.preempted:
                select.select([], [], [], 0.01)

    Checkpoints.save, Checkpoints.should_save, Checkpoints.restore = saved, asked, restored
    trained: float = importlib.import_module(module).train.task_function(where=os.environ["TEST_WHERE"], epochs=4)
    return trained


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def torch(module: str) -> float:
    return run(module)


@task(task_config=SafeHorovod(nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def horovod(module: str) -> float:
    return run(module)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, max_restarts=1, timeouts=TIMEOUTS))
def torch_nodes() -> str:
    return repr(run(os.environ["TEST_MODULE"]))


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=1, max_restarts=1, timeouts=TIMEOUTS))
def horovod_nodes() -> str:
    return repr(run(os.environ["TEST_MODULE"]))
