"""Tasks whose code does what no task should, to itself and to the process it is in; ``$TEST_HOW`` says what."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.fs import atomic_write

QUICK = Timeouts(stop=0.5, exit=0.5)


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=QUICK))
def forks() -> list[int]:
    """Children that the function forks end the function as well."""
    found = []
    for how in ("returns", "raises", "exits"):
        child = os.fork()
        if child == 0:
            if how == "raises":
                raise ValueError("in the child")
            if how == "exits":
                sys.exit(3)
            return [99]
        # The child has done all that it ever does.
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    # The room that is kept for the rank's own outputs is zeros.
    left = sum(any(each.read_bytes()) for each in current_rank().scratch.parents[1].rglob("*.result"))
    return [*found, left]


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def stands_in() -> list[int]:
    """For libraries, as tests and code that does without them do."""
    for name in ("horovod", "horovod.torch", "horovod.tensorflow", "torch.distributed.distributed_c10d"):
        sys.modules[name] = types.ModuleType(name)
    return [1]


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def clears() -> list[int]:
    """How often work is done that is to be done once per job; and of how many ranks a save is."""
    from flytekitplugins_safedist.checkpoint import Checkpoints
    from flytekitplugins_safedist.fs import barrier, once_per_job

    os.environ.clear()
    shared = current_rank().node_dir
    once_per_job("once", (shared / str(current_rank().rank)).touch)
    barrier()
    count = len(list(shared.iterdir()))
    with Checkpoints(shared / "saves", every=None) as ckpt:
        ckpt.save(0, {"step": 0}, force=True)
    (manifest,) = (shared / "saves").glob("*/manifest.json")
    return [count, json.loads(manifest.read_text())["manifest"]["world_size"]]


OPEN: list[Any] = []


@task(task_config=SafeTorch(nproc_per_node=1, timeouts=QUICK))
def leaves_open() -> None:
    """Files that nobody closes."""
    at = os.environ["TEST_AT"]
    OPEN.extend([open(f"{at}/text", "w"), gzip.open(f"{at}/zipped", "wt"), open(f"{at}/bytes", "wb")])  # noqa: SIM115
    for file, written in zip(OPEN, ("text", "zipped", b"bytes"), strict=True):
        file.write(written)


class Endless(Exception):
    def __str__(self) -> str:
        threading.Event().wait()
        return "never"


class WithoutCode(ValueError):
    @property
    def error_code(self) -> str:
        raise RuntimeError("no code")


class LongCode(ValueError):
    error_code = "X" * 1_000_000


@dataclass(frozen=True)
class Frozen(Exception):
    why: str


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=QUICK))
def fails() -> None:
    """Rank 1 ends with an exception that does not say what it is."""
    if current_rank().rank == 0:
        signal.pause()
    how = os.environ["TEST_HOW"]
    if how == "endless str":
        raise Endless
    if how == "frozen":
        raise Frozen("the reason")
    if how == "frozen in a block":
        with atomic_write(current_rank().scratch / "model"):
            raise Frozen("the reason")
    if how == "error_code raises":
        raise WithoutCode("the reason")
    if how == "error_code of 1 MB":
        raise LongCode("the reason")
    if how == "no descriptors":
        held = []
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    if how == "no modules":
        sys.modules.clear()
        raise ValueError("the reason")
