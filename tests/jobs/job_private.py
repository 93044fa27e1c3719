"""Tasks that look at, and misuse, what a rank has for itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from flytekit import current_context, task

from flytekitplugins_safedist import Logs, SafeTorch, Scratch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word
from tests.harness.product import CACHES

QUICK = Timeouts(stop=0.5, exit=0.5)
WHERE = os.environ.get("TEST_SCRATCH")
LIMIT = os.environ.get("TEST_LIMIT")


@task(
    task_config=SafeTorch(nproc_per_node=2, scratch=Scratch(shared_caches=("triton",))),
    environment={"TRITON_CACHE_DIR": "/shared/triton"},
)
def look_around() -> None:
    """Says every place that is this rank's own."""
    me = current_rank()
    places = {
        "scratch": str(me.scratch),
        "TMPDIR": os.environ["TMPDIR"],
        "tempfile": tempfile.gettempdir(),
        "of a child": subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip(),
        "working directory": current_context().working_directory,
        **{cache.variable: os.environ[cache.variable] for cache in CACHES},
    }
    modes = {name: oct(Path(path).stat().st_mode & 0o777) for name, path in places.items() if Path(path).exists()}
    # Here and now: links among them are gone after the job.
    real = {name: str(Path(path).resolve()) for name, path in places.items()}
    say(json.dumps({"rank": me.rank, "places": places, "real": real, "modes": modes}))


@task(task_config=SafeTorch(nproc_per_node=2))
def write_results() -> dict[str, str]:
    """Every rank writes one name in three places, rank 1 after rank 0; what rank 0 finds there then."""
    me = current_rank()
    dist.init_process_group("gloo")
    places = {"scratch": me.scratch, "working directory": Path(current_context().working_directory)}
    for writer in range(me.world_size):
        if me.rank == writer:
            for directory in (*places.values(), Path()):
                (directory / "result.txt").write_text(f"rank {me.rank}")
        dist.barrier()
    dist.destroy_process_group()
    found = {name: (directory / "result.txt").read_text() for name, directory in places.items()}
    return {"data": Path("data.txt").read_text(), **found}


@task(task_config=SafeTorch(nproc_per_node=1, scratch=Scratch(path=WHERE)))
def fill_the_disk_and_go_on() -> str:
    """As a task does whose logger, say, swallows that."""
    try:
        with (current_rank().scratch / "too much").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 512)
    except OSError as full:
        return str(full)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, scratch=Scratch(path=WHERE, size_limit=LIMIT)))
def fill_the_disk() -> None:
    """Rank 1 writes until the file system is full; rank 0 has a little there, too."""
    me = current_rank()
    (me.scratch / "some").write_bytes(b"x" * 10_000)
    if me.rank == 0:
        say("wrote")
        signal.pause()
    wait_for_word()
    with (me.scratch / "too much").open("wb") as file:
        while True:
            file.write(b"x" * (1 << 20))


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK, scratch=Scratch(path=WHERE, size_limit=LIMIT)))
def over_the_limit() -> None:
    """Rank 1 writes more than the limit, far from filling the disk, and goes on."""
    if current_rank().rank == 1:
        Path("much").write_bytes(b"x" * (3 << 20))  # beside: a look at scratch must not find a part of it
        Path("much").rename(current_rank().scratch / "too much")
    signal.pause()


@task(task_config=SafeTorch(nproc_per_node=2, scratch=Scratch(path=WHERE)))
def nothing() -> int:
    return 1


PIECES = 400


@task(task_config=SafeTorch(nproc_per_node=4, logs=Logs(prefix="<{rank}/{local_rank}/{node_rank}> ")))
def talk_all_at_once() -> None:
    """Lines in pieces, from Python and from below it, on both streams."""
    rank = current_rank().rank
    for number in range(PIECES):
        os.write(1, f"rank {rank} says ".encode())
        os.write(1, f"line {number}".encode())
        os.write(1, b" and that is all\n")
    print("grüße", file=sys.stderr)
    subprocess.run(["sh", "-c", "echo from a child"], check=True)
    sys.stdout.write("half a line at the end")


@task(task_config=SafeTorch(nproc_per_node=3, logs=Logs(show=(1,)), scratch=Scratch(keep="always")))
def talk_but_show_one() -> None:
    print(f"I am rank {current_rank().rank}")


@task(task_config=SafeTorch(nproc_per_node=2))
def live() -> None:
    """Prints, and waits: the line must be in the node's log while this runs."""
    print(f"live from {current_rank().rank}")
    say("printed")
    wait_for_word()


@task(task_config=SafeTorch(nproc_per_node=2))
def raises_in_an_exit_handler() -> int:
    """Its result counts; what goes wrong afterwards is in the log all the same."""
    import atexit

    def broken() -> None:
        raise OSError("cannot close the tap")

    if current_rank().rank == 1:
        atexit.register(broken)
    return 3
