"""Tasks whose rank raises one of the package's own errors, or makes the package raise it; ``$TEST_HOW`` says which."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from flytekit import task

import flytekitplugins_safedist
from flytekitplugins_safedist import CheckpointError, ConfigError, DownloadError, SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints
from flytekitplugins_safedist.errors import Problem
from flytekitplugins_safedist.fs import ensure_dir, once_per_job


def _resumes_from_what_is_not_there() -> None:
    import torch

    state = {"model": torch.nn.Linear(1, 1), "step": 0}
    Checkpoints(str(Path.cwd() / "saves"), every=1, resume_from=str(Path.cwd() / "nowhere")).restore(state)


def _makes_a_directory_on_a_file() -> None:
    Path("file").touch()
    ensure_dir("file")


def _fails_by(cause: BaseException, error: type[Exception]) -> Callable[[], None]:
    def fail() -> None:
        raise error("it broke") from cause

    return fail


def _own_work_loses_a_connection() -> None:
    def work() -> str:
        raise ConnectionRefusedError("the feature store is down")

    once_per_job("features", work)


HOW: dict[str, Callable[[], None]] = {
    "resume_from that is not there": _resumes_from_what_is_not_there,
    "a directory on a file": _makes_a_directory_on_a_file,
    "a checkpoint's store that is down": _fails_by(ConnectionResetError("reset"), CheckpointError),
    "a download's source that is not there": _fails_by(FileNotFoundError("404"), DownloadError),
}


def _raise(name: str) -> None:
    if name == "ConfigError":
        raise ConfigError([Problem("nodes", 0, "is too few", "use 1")])
    raise getattr(flytekitplugins_safedist, name, flytekitplugins_safedist.errors.SafedistError)("it broke")


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=0, timeouts=Timeouts(stop=0.5, exit=0.5)))
def one_raises() -> None:
    """Rank 1 raises, rank 0 waits for ever."""
    if current_rank().rank == 0:
        signal.pause()
    _raise(os.environ["TEST_HOW"])


@task(task_config=SafeTorch(nproc_per_node=1))
def the_one_raises() -> None:
    """The only rank raises."""
    HOW[os.environ["TEST_HOW"]]()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.5, exit=0.5)))
def work_fails() -> None:
    """The work that one rank does for both fails, as work of a user's own."""
    _own_work_loses_a_connection()


class _NotWritten:
    """What a disk that fails makes of a value as it is written."""

    def __reduce__(self) -> str:
        raise OSError(errno.EIO, "Input/output error")


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=0, timeouts=Timeouts(stop=0.5, exit=0.5)))
def torch_saves() -> None:
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp

    dist.init_process_group("gloo")
    failing = {"step": _NotWritten()} if current_rank().rank == 1 else {}
    dcp.save(failing, checkpoint_id=Path.cwd() / "save")
