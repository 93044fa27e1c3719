"""Tasks of two nodes with two ranks each; ``$TEST_HOW`` says what happens to rank 3, on node 1."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

from flytekit import current_context, task
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins_safedist import Hangs, SafeHorovod, SafeTorch, Scratch, Timeouts, current_rank
from flytekitplugins_safedist.fs import barrier
from tests.harness.procs import say, wait_for_word

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60)


def happen(how: str) -> None:
    """What becomes of this rank; the other three are on their way into a collective."""
    me = current_rank()
    if how == "gate":
        say(f"rank {me.rank} round {me.round} pid {os.getpid()}")
        wait_for_word()
    if me.rank != 3:
        return
    if how == "raise" or (how == "raise once" and me.round == 0):
        raise ValueError("no learning rate")
    if how == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if how == "recoverable":  # as long as what compilers of graphs say, and repeated in the traceback
        raise FlyteRecoverableException("a layer, " * 1_200)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def horovod() -> str:
    import horovod.torch as hvd
    import torch

    hvd.init()
    happen(os.environ["TEST_HOW"])
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
    me = current_rank()
    return f"{total.item():g} from {me.world_size} ranks in round {me.round}; {hvd.size()} {hvd.local_size()}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def torch() -> str:
    import torch as pytorch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    happen(os.environ["TEST_HOW"])
    total = pytorch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    me = current_rank()
    dist.destroy_process_group()
    return f"{total.item():g} from {me.world_size} ranks in round {me.round}; {me.nnodes} {me.local_world_size}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def torch_by_hand() -> str:
    """Ranks say themselves who they are, as scripts for other launchers do."""
    import torch.distributed as dist

    me = current_rank()
    ways: dict[str, dict[str, int]] = {
        "world_size=8": {"rank": me.rank, "world_size": 8},
        "in another order": {"rank": (0, 2, 1, 3)[me.rank], "world_size": 4},
        "in groups of a node each": {"rank": me.local_rank, "world_size": 2},
    }
    dist.init_process_group("gloo", **ways[os.environ["TEST_HOW"]])
    dist.barrier()
    return f"{dist.get_world_size()} ranks"


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def horovod_on_a_host_without_address() -> str:
    import ctypes
    import socket

    import horovod.torch as hvd

    ctypes.CDLL(None).unshare(0x04000000)  # CLONE_NEWUTS
    socket.sethostname("no-such-host.invalid")
    hvd.init()
    return f"{hvd.size()} ranks"


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def horovod_by_interface() -> str:
    import horovod.torch as hvd

    hvd.init()
    return f"{hvd.size()} ranks"


PATIENT = Timeouts(stop=600, exit=5, heartbeat=600, rendezvous=600)
"""Whoever waits these out here waits for ever: no test does."""


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=PATIENT))
def torch_patient() -> str:
    return torch.task_function()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_replacements=0, timeouts=TIMEOUTS))
def torch_no_replacement() -> str:
    return torch.task_function()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=PATIENT))
def torch_saves() -> str:
    """Rank 0 goes on from what flytekit's checkpoint holds, and saves one more."""
    me, checkpoint = current_rank(), current_context().checkpoint
    count = int(checkpoint.read()) + 1
    barrier()
    if me.rank == 0:
        checkpoint.write(str(count).encode())
    say(f"rank {me.rank} round {me.round} count {count}")
    wait_for_word()
    return str(count)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def torch_done_early() -> str:
    """Node 1 is done while rank 0 still works, as in a long upload of outputs."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    me = current_rank()
    if me.rank == 0:
        say(f"rank 0 round {me.round}")
        wait_for_word()
    return f"round {me.round}"


@task(
    task_config=SafeTorch(
        nnodes=2,
        nproc_per_node=1,
        timeouts=TIMEOUTS,
        scratch=Scratch(size_limit="1Mi"),
        hangs=Hangs(action="fail", floor=1, ceiling=2),
    )
)
def torch_found_by_the_agent() -> None:
    """In the second round the agent of rank 1 finds that it is to fail."""
    import torch.distributed as dist

    me, hangs = current_rank(), os.environ["TEST_HOW"] == "hangs"
    dist.init_process_group("gloo")
    dist.barrier()
    say(f"rank {me.rank} round {me.round}")
    if me.round == 1 and me.rank == 1 and not hangs:
        (me.scratch / "much").write_bytes(b"x" * (3 << 20))
    if me.round == 0 or me.rank == 1 or not hangs:
        wait_for_word()
    dist.barrier()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=Timeouts(rendezvous=1)))
def torch_impatient() -> str:
    return "never"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def torch_points() -> str:
    """A rank says where it is and waits for a word: before it meets the others, among them, and when it is done."""
    import torch as pytorch
    import torch.distributed as dist

    me, point = current_rank(), os.environ["TEST_HOW"]

    def here(name: str) -> None:
        if point == name:
            say(f"rank {me.rank} round {me.round}")
            wait_for_word()

    here("ranks start")
    dist.init_process_group("gloo")
    here("in the function")
    total = pytorch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    here("function returns")
    return f"{total.item():g} from {me.world_size} ranks in round {me.round}"


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def torch_no_restart() -> str:
    """Rank 3 fails when it gets the word; the others lose it, and it says what happened in its own time."""
    import torch.distributed as dist

    me = current_rank()
    dist.init_process_group("gloo")
    say(f"rank {me.rank} round {me.round}")
    if me.rank == 3:
        wait_for_word()
        raise ValueError("no learning rate")
    dist.barrier()
    return "never"


NOT_REPLACED = replace(TIMEOUTS, rendezvous=12)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=NOT_REPLACED))
def torch_not_replaced() -> str:
    return torch.task_function()


def train(step: Callable[[], object]) -> str:
    """Steps without an end."""
    step()
    say("trains")
    while True:
        step()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=NOT_REPLACED))
def torch_trains() -> str:
    import torch as pytorch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train(lambda: dist.all_reduce(pytorch.ones(1)))


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=TIMEOUTS))
def torch_calls() -> str:
    """Rank 0 calls rank 1 by torch's RPC, in round 0 without an end."""
    from torch.distributed import rpc

    me = current_rank()
    rpc.init_rpc(f"rank{me.rank}", rank=me.rank, world_size=me.world_size)
    if me.rank == 0:
        rpc.rpc_sync("rank1", os.getpid)
        say("has called")
        while me.round == 0:
            rpc.rpc_sync("rank1", os.getpid)
    rpc.shutdown()
    return f"called in round {me.round}"


@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2, timeouts=NOT_REPLACED))
def horovod_trains() -> str:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return train(lambda: hvd.allreduce(torch.ones(1)))


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS, scratch=Scratch(keep="on_failure")))
def torch_kept() -> str:
    return torch_points.task_function()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def torch_callers() -> str:
    """Four threads of each rank meet those of the others, and stay."""
    called, leave = threading.Barrier(5), threading.Event()

    def call(number: int) -> None:
        barrier(str(number))
        called.wait()
        leave.wait()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    called.wait()
    say(f"rank {current_rank().rank}")
    wait_for_word()
    leave.set()
    for thread in threads:
        thread.join()
    return "all have met"
