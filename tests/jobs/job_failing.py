"""Tasks that fail in one way or another; ``$TEST_HOW`` says in which. Rank 1 is the culprit, rank 0 the bystander."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path

from flytekit import current_context, task
from flytekit.exceptions.system import FlyteUploadDataException
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins_safedist import (
    Hangs,
    Logs,
    RankKilledError,
    SafedistError,
    SafeHorovod,
    SafeTorch,
    Scratch,
    Timeouts,
    current_rank,
)
from flytekitplugins_safedist.checkpoint import Checkpoints
from flytekitplugins_safedist.fs import barrier, rank_zero_first, wait_for
from tests.harness.procs import say, wait_for_word
from tests.harness.product import group

QUICK = Timeouts(stop=0.5, exit=0.5)


def fail(how: str) -> None:
    """Fail in one way."""
    print("the last thing it said")
    if how == "raise":
        try:
            {}["learning_rate"]
        except KeyError as error:
            raise ValueError("no learning rate") from error
    if how == "long":
        raise FileNotFoundError("no caf\udce9.txt" + "語" * 40_000 + '"' * 40_000 + " is the reason")
    if how == "recoverable":
        raise FlyteRecoverableException("try me again")
    if how == "system":
        raise FlyteUploadDataException("the bucket is away")
    if how == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if how == "reads":
        Path(os.environ["TEST_FILE"]).read_bytes()
    if how == "ECC":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`")
    if how == "import":
        import no_such_module_at_all  # noqa: F401
    if how == "syntax":
        compile("def f(:", "broken.py", "exec")
    if how == "sys.exit":
        raise SystemExit(7)
    if how == "os._exit":
        os._exit(3)
    if how == "own class":
        raise StepFailedError("rate", step=5)
    if how.startswith("a worker's "):
        lose_a_worker(getattr(signal, how.rsplit(maxsplit=1)[-1]))
    if how.startswith("SIG"):
        signal.raise_signal(getattr(signal, how))  # to this thread, as a crash is: a process's may come to any other
        signal.pause()


class StepFailedError(Exception):
    """What a training loop makes of any error of a step; its constructor wants more than a text."""

    def __init__(self, what: str, *, step: int) -> None:
        super().__init__(f"{what}: step {step} failed")


class Ends:
    """A data set whose loader's worker is ended by a signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), self.number)
        return index


def lose_a_worker(number: int) -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader(Ends(number), num_workers=1):  # type: ignore[arg-type]
        pass


@task(task_config=SafeTorch(nproc_per_node=1))
def the_one_fails() -> None:
    """A job of one rank."""
    raise ValueError("alone")


def is_called() -> dict[str, dict[str, object]]:
    """What the caller of a task can catch, by the class that a rank has raised."""
    kinds = {"alone": ValueError, "EIO": OSError, "own class": StepFailedError, "SIGKILL": RankKilledError}
    caught: dict[str, dict[str, object]] = {}
    for how, kind in kinds.items():
        os.environ["TEST_HOW"] = how
        try:
            (the_one_fails if how == "alone" else one_fails)()
        except kind as error:
            facts = {"is ours": isinstance(error, SafedistError), "errno": getattr(error, "errno", None)}
            caught[how] = {"as": kind.__name__, "text": str(pickle.loads(pickle.dumps(error))), **facts}
    return caught


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, logs=Logs(tail_lines=3)))
def one_fails() -> int:
    """Rank 1 fails, rank 0 waits for ever."""
    if current_rank().rank == 1:
        for number in range(5):
            print(f"line {number}")
        fail(os.environ["TEST_HOW"])
        return 1
    if os.environ["TEST_HOW"] == "nothing":
        return 0
    signal.pause()
    return 0


class LateWordsError(ValueError):
    """Says what has happened when its rank is told to stop, which has a handler that leaves by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()
        signal.signal(signal.SIGTERM, self.leave)

    def leave(self, *_: object) -> None:
        self.stopped.set()
        raise SystemExit(143)

    def __str__(self) -> str:
        (current_rank().node_dir / "is asked").touch()
        self.stopped.wait()
        return "the reason"


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_is_stopped_as_it_says_why_it_failed() -> None:
    if current_rank().rank == 1:
        raise LateWordsError
    wait_for(current_rank().node_dir / "is asked")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31121")


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_returns_early() -> None:
    """Rank 1 has a batch less than rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for _ in range(2 - current_rank().rank):
        dist.all_reduce(torch.ones(4))


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_aborts_as_the_other_has_returned() -> None:
    """Two ranks that never meet. Rank 0 holds the other end of ``$TEST_PIPE`` until its process ends."""
    if current_rank().rank == 0:
        os.open(os.environ["TEST_PIPE"], os.O_WRONLY)
        return
    Path(os.environ["TEST_PIPE"]).read_bytes()
    fail("SIGABRT")


def evaluates_alone() -> None:
    signal.pause()


def skips(*, monitored: bool = False, is_stopped: bool = False) -> None:
    """Rank 1 does not take part in an allreduce, or a barrier that names who is missing, and is there all the time."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(4), group=group)
    if current_rank().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if is_stopped else 0)
        evaluates_alone()
    if monitored:
        dist.monitored_barrier(group, timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(4), group=group)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_skips_a_monitored_barrier() -> None:
    skips(monitored=True)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, hangs=Hangs(action="report")))
def one_is_stopped_beside_a_collective() -> None:
    skips(is_stopped=True)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1, timeouts=QUICK))
def one_node_skips_a_collective() -> None:
    skips()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def stubborn() -> None:
    """Rank 0 does not listen to SIGTERM."""
    if current_rank().rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("deaf")
        threading.Event().wait()
    wait_for_word()
    fail("raise")


SAVING = Timeouts(stop=0.1, exit=0.5, preemption=float(os.environ.get("TEST_PREEMPTION", "120")))


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=SAVING))
def saves_in_its_handler() -> None:
    """The rank has a handler of its own for SIGTERM, which takes longer than ``Timeouts.stop``, and ends its step."""
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(100), num_workers=1, prefetch_factor=1))  # type: ignore[arg-type]
    next(batches)

    def save(*_: object) -> None:
        say("saves")
        wait_for_word()
        for _ in range(5):  # of a worker that is told to end, too, there is one more at most
            next(batches)
        print("all is saved")
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, save)
    say("listens")
    threading.Event().wait()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def lingering() -> int:
    """Rank 1 returns, but a thread of it never does."""
    if current_rank().rank == 1:
        threading.Thread(target=threading.Event().wait).start()
    return 7


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def with_grandchildren() -> None:
    """Rank 1 leaves a child, and a child in a session of its own, and fails."""
    if current_rank().rank == 1:
        for own_session in (False, True):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
            say(str(child.pid))
        wait_for_word()
        fail(os.environ["TEST_HOW"])
        return
    if os.environ["TEST_HOW"] != "nothing":
        signal.pause()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def waits_with_a_child() -> None:
    """Each rank starts processes, and waits for ever."""
    child = subprocess.Popen(["sleep", "1000"])
    if "TEST_OWN_SESSION" in os.environ:  # where nobody but the rank server would find it
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    say(json.dumps({"pid": os.getpid(), "child": child.pid, "server": os.getppid()}))
    signal.pause()


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2, timeouts=QUICK))
def saves_and_fails() -> str:
    """Each round goes on from what the one before it saved, and fails, up to the third."""
    checkpoint = current_context().checkpoint
    assert checkpoint.prev_exists()
    step = int(checkpoint.read())
    barrier()
    if current_rank().rank == 0:
        checkpoint.write(str(step + 1).encode())
    barrier()
    if current_rank().round < 2:
        raise ValueError("and again")
    return str(step)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_waits_in_vain() -> None:
    """Rank 1 has waited for rank 0 for too long before that one fails, as the test says."""
    how, me = os.environ["TEST_HOW"], current_rank()
    if me.rank == 0:
        with rank_zero_first() if how == "the block of rank_zero_first" else nullcontext():
            wait_for_word()
            fail("raise")
    say(str(os.getpid()))
    if how == "barrier":
        barrier(timeout=1)
    elif how == "wait_for":
        wait_for(me.node_dir / "by rank 0", made_by="rank 0", timeout=1)
    else:
        with rank_zero_first(timeout=1):
            pass


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def one_saves_alone() -> str:
    """As under ``if rank == 0:``. The other has ended."""
    group.LOOK_SECONDS = 0.2
    if current_rank().rank == int(os.environ["TEST_HOW"]):
        ckpt = Checkpoints(os.environ["TEST_CHECKPOINTS"])
        ckpt.save(0, {"y": 1}, force=True)
    return "done"


def _rounds() -> str:
    me = current_rank()
    marker = me.scratch / "been here"
    fresh = not marker.exists()
    marker.touch()
    say(json.dumps({"rank": me.rank, "round": me.round, "fresh": fresh, "scratch": str(me.scratch)}))
    if me.rank == 1:
        wait_for_word()
        if me.round < int(os.environ["TEST_GOOD_ROUND"]):
            fail(os.environ["TEST_HOW"])
    if me.round < int(os.environ["TEST_GOOD_ROUND"]):
        signal.pause()
    return f"round {me.round}"


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2, timeouts=QUICK))
def restarted() -> str:
    """Fails until round $TEST_GOOD_ROUND."""
    return _rounds()


@task(task_config=SafeHorovod(nproc_per_node=2, max_restarts=1, timeouts=QUICK))
def restarted_horovod() -> float:
    """Meets in an allreduce in each round; rank 1 fails in the first."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    if current_rank().round == 0:
        if hvd.rank() == 1:
            fail("raise")
        hvd.allreduce(torch.ones(1), name="never complete")
    return float(total)


def _report_and_wait() -> str:
    me = current_rank()
    (me.scratch / "work").write_text("half done")
    say(
        json.dumps(
            {
                "rank": me.rank,
                "pid": os.getpid(),
                "server": os.getppid(),
                "scratch": str(me.scratch),
                "tmp": os.environ["TMPDIR"],
                "working": current_context().working_directory,
            }
        )
    )
    wait_for_word()
    if os.environ.get("TEST_HOW") and me.rank == 1:
        fail(os.environ["TEST_HOW"])
    return os.environ.get("TEST_NAME", "done")


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def waits() -> str:
    """Says where it is, and waits for the test's word."""
    return _report_and_wait()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, start_method="spawn"))
def waits_spawned() -> str:
    """The same in fresh interpreters."""
    return _report_and_wait()


@task(task_config=SafeHorovod(nproc_per_node=2, timeouts=QUICK))
def waits_horovod() -> str:
    """The same with Horovod's key-value server open."""
    return _report_and_wait()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, scratch=Scratch(keep="on_failure")))
def keeps_on_failure() -> str:
    """Scratch stays when it fails."""
    return _report_and_wait()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, scratch=Scratch(keep="always")))
def keeps_always() -> str:
    """Scratch stays."""
    return _report_and_wait()


@task(task_config=SafeTorch(nproc_per_node=3, timeouts=QUICK))
def losses_are_wrapped() -> None:
    """Rank 1 is killed in the middle of training; the others make an error of their own of that."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(100):
        try:
            if step == 5 and current_rank().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1000))
        except Exception as error:
            raise StepFailedError("x", step=step) from error


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def has_a_wrong_interface() -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    dist.init_process_group("gloo")


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def takes_a_port_twice() -> None:
    import socket

    import torch.distributed as dist

    held = socket.create_server(("127.0.0.1", 0))
    dist.TCPStore("127.0.0.1", held.getsockname()[1], 2, is_master=True)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def expects_more_ranks() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    rank, where = current_rank().rank, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*where, is_master=rank == 0, multi_tenant=True)
    dist.init_process_group("gloo", store=store, world_size=4, rank=rank, timeout=timedelta(seconds=3))


@task(task_config=SafeTorch(nproc_per_node=2))
def shows_who_goes_first_when_memory_is_out() -> list[int]:
    """The scores of the rank server, of this rank, and of a process that it starts."""
    started = subprocess.run(["cat", "/proc/self/oom_score_adj"], check=True, capture_output=True, text=True).stdout
    scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (os.getppid(), os.getpid())]
    return [*map(int, scores), int(started)]
