"""Tasks that save and resume by flytekitplugins_safedist.checkpoint, through rounds and attempts."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from flytekit import current_context, task

from flytekitplugins_safedist import SafeHorovod, SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints

ROUNDS = 3


def _trained(together: object) -> str:
    """Each round takes three steps from where the one before it ended, and fails; the last one returns."""
    me = current_rank()
    torch.manual_seed(0)  # all ranks begin with the same model
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, float(me.rank))
    state = {"model": model, "history": []}
    ckpt = Checkpoints(every=1, resume_from=os.environ.get("TEST_RESUME_FROM"))
    first = ckpt.restore(state)
    state["history"].append(f"{me.attempt}.{me.round}:{first}")
    for step in range(first, first + 3):
        torch.nn.init.constant_(model.weight, float(step))
        ckpt.save(step, state)
    ckpt.wait()
    together()  # type: ignore[operator]
    if me.round < int(os.environ.get("TEST_FAILING_ROUNDS", "0")):
        raise ValueError("and again")
    # Flyte's own checkpoint is another place, where nothing was saved. (Of a later attempt it says what it was told.)
    assert me.attempt or "TEST_RECOVERS" in os.environ or not current_context().checkpoint.prev_exists()
    return " ".join(state["history"])


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2))
def by_torch() -> str:
    dist.init_process_group("gloo")
    return _trained(dist.barrier)


@task(task_config=SafeHorovod(nproc_per_node=2, max_restarts=2))
def by_horovod() -> str:
    import horovod.torch as hvd

    hvd.init()
    return _trained(hvd.barrier)


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=3))
def fails_in_one_place() -> None:
    """Rank 1 finds bad data at step 5 of each round; all save every second step, and go on from there."""
    dist.init_process_group("gloo")
    state = {"done": 0}
    ckpt = Checkpoints(os.environ["TEST_CHECKPOINTS"], every=2)
    for step in range(ckpt.restore(state), 9):
        if step == 5 and current_rank().rank == 1:
            raise ValueError("no such label")
        ckpt.save(step, state)
        ckpt.wait()


@task(task_config=SafeTorch(nproc_per_node=1, nnodes=2, max_restarts=9))
def comes_no_further() -> None:
    """Node 1 finds something else that is wrong at step 5 of each round, before anything is saved."""
    dist.init_process_group("gloo")
    ckpt = Checkpoints(os.environ["TEST_CHECKPOINTS"], every=100)
    kinds = (ValueError, KeyError, IndexError)
    for step in range(9):
        if step == 5 and current_rank().rank == 1:
            raise kinds[current_rank().round]("no such label")
        ckpt.should_save(step)
        dist.barrier()


@task(task_config=SafeTorch(nproc_per_node=2))
def dies_at_once() -> str:
    """An attempt that saves nothing."""
    if current_rank().attempt:
        raise ValueError("before anything was saved")
    return "not this time"


@task(task_config=SafeTorch())
def ends_while_saving() -> str:
    """Returns with a save in flight, which is slow."""
    import threading

    from tests.checkpoint import points

    def slow(point: str) -> None:
        if point == points.PART_OPENED:
            threading.Event().wait(1)

    points.on_point = slow
    Checkpoints(every=None).save(7, {"x": torch.ones(3)}, force=True)
    return "returned"


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1))
def fails_while_saving() -> str:
    """Rank 1 raises while a save is being written, which is slow. No process group: who saves needs none."""
    import threading

    from tests.checkpoint import points

    def slow(point: str) -> None:
        if point == points.PART_OPENED:
            threading.Event().wait(1)

    points.on_point = slow
    me, state = current_rank(), {"x": torch.ones(3)}
    ckpt = Checkpoints(every=None)
    first = ckpt.restore(state)
    if me.round == 0:
        ckpt.save(7, state, force=True)
        if me.rank == 1:
            raise ValueError("a bad batch")
        threading.Event().wait()
    return f"goes on with {first}"


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=3))
def goes_back() -> str:
    """Saves some steps, goes back to one, and fails in the first rounds: where each round begins."""
    me = current_rank()
    state = {"begun": []}
    ckpt = Checkpoints(os.environ["TEST_CHECKPOINTS"], every=1, keep=2)
    if me.attempt == 0:
        ckpt.restore(state)
        for step in range(8):
            ckpt.save(step, state)
        return "saved"
    first = ckpt.restore(state, step=6)
    state["begun"].append(first)
    for step in range(first, first + 2):
        ckpt.save(step, state)
    ckpt.wait()
    if me.round < int(os.environ.get("TEST_FAILING_ROUNDS", "0")):
        raise ValueError("and again")
    return f"{state['begun']}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1))
def by_time() -> str:
    """Steps at which all ranks have saved, by rank 0's clock: as soon as one is written the next one is due."""
    dist.init_process_group("gloo")
    ckpt, saved = Checkpoints(os.environ["TEST_CHECKPOINTS"], every=timedelta(microseconds=1)), []
    step = 0
    while len(saved) < 3:
        if ckpt.should_save(step):
            saved.append(step)
            ckpt.save(step, {"x": step})
        dist.barrier()
        step += 1
    of_all = [[], []]
    dist.all_gather_object(of_all, saved)
    return repr(of_all)


@task(task_config=SafeTorch())
def ends_before_a_save_is_due() -> None:
    """Of the one step."""
    Checkpoints(os.environ["TEST_CHECKPOINTS"], every=10).save(0, {"x": 0})
