"""Tasks whose ranks are in the midst of something long when a pod is told to stop; ``$TEST_PHASE`` says in what.

In the first round every rank says that it is there, and waits for a word that may never come. Later rounds take two
more steps.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.harness.procs import say, wait_for_word

SAVED, LAST = 1, 3
"""Of the first round: the step that is saved as usual, and the last one that is done."""


def stay() -> None:
    say(f"rank {current_rank().rank} is there")
    wait_for_word()


def compile_model(_: Any) -> None:
    """The first call of a compiled model, in whose compiler it is."""

    def compiler(graph: Any, _inputs: Any) -> Any:
        stay()
        return graph

    torch.compile(torch.nn.Linear(2, 2), backend=compiler)(torch.ones(1, 2))


def hold_the_interpreter(_: Any) -> None:
    """Native code that no other thread of this process gets past."""
    say(f"rank {current_rank().rank} is there")
    ctypes.PyDLL(None).pause()


def evaluate(model: torch.nn.Module) -> None:
    """All ranks in a collective, for one of them does not come."""
    import torch.distributed as dist

    if current_rank().rank == 0:
        stay()
    else:
        say(f"rank {current_rank().rank} is there")
    dist.all_reduce(model(torch.ones(2)).detach())


def evaluate_on_rank_0(_: Any) -> None:
    """The other rank is in the next step's collective meanwhile."""
    if current_rank().rank == 0:
        stay()
    else:
        say(f"rank {current_rank().rank} is there")


PHASES: dict[str, Callable[[Any], None]] = {
    "compiles": compile_model,
    "holds the interpreter": hold_the_interpreter,
    "evaluates": evaluate,
    "evaluates on rank 0": evaluate_on_rank_0,
}


def train(*, at: int = LAST) -> str:
    import torch.distributed as dist

    me, phase = current_rank(), PHASES[os.environ["TEST_PHASE"]]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "steps": []}
    ckpt = Checkpoints(os.environ["TEST_WHERE"], every=None)
    first = ckpt.restore(state)
    if me.round:
        say(f"rank {me.rank} goes on with {first}")
    step = first
    while me.round == 0 or step < first + 2:
        if me.round == 0 and step == at + 1:
            phase(model)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1))
        state["steps"].append(step)
        ckpt.save(step, state, force=step == SAVED)
        if step == SAVED:
            ckpt.wait()
        step += 1
    return repr(state["steps"])


PATIENT = Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60, preemption=240)
IMPATIENT = Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60, preemption=2)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=PATIENT))
def before_the_first_step() -> str:
    return train(at=-1)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=PATIENT))
def patient() -> str:
    return train()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=IMPATIENT))
def impatient() -> str:
    return train()
