"""A task with two trackers: one run of each per job, whatever becomes of its ranks. Rank 0 alone imports them: a second
and more for each process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from pathlib import Path

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.fs import barrier

sys.path.append(os.path.join(sys.prefix, "libraries"))


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1), retries=1)
def tracked() -> str:
    me = current_rank()
    if me.rank == 0 and "TEST_TRACKED" in os.environ:
        _by_wandb(os.environ["TEST_TRACKED"])
        if "TEST_FAILURES" in os.environ:
            _by_mlflow(os.environ["TEST_TRACKED"])
    barrier("tracked")  # no rank fails before the run is written
    if me.round < int(os.environ.get("TEST_FAILURES", "0")):
        if me.rank == 0:
            raise ValueError(f"bad data in round {me.round}")
        threading.Event().wait()
    return me.job


def _by_wandb(where: str) -> None:
    import wandb

    me = current_rank()
    with wandb.init(project="digits", id=me.job, resume="allow", mode="offline", dir=where) as run:
        run.log({"loss": 1.0}, step=me.round)


def _by_mlflow(where: str) -> None:
    import mlflow

    me = current_rank()
    mlflow.set_tracking_uri(Path(where, "mlruns").as_uri())
    experiment = mlflow.set_experiment("digits").experiment_id
    found = mlflow.MlflowClient().search_runs([experiment], f"tags.job = '{me.job}'", max_results=1)
    with mlflow.start_run(run_id=found[0].info.run_id if found else None, tags={"job": me.job}):
        mlflow.log_metric("loss", 1.0, step=10 * me.attempt + me.round)


@task(task_config=SafeTorch(nproc_per_node=2))
def ends_badly() -> None:
    """A tracker of rank 0's takes down what its process ends by, as wandb does, and tells its run at the exit: that is
    not done before rank 1 was told to end."""
    status = ["finished"]

    def takes_down(_kind: object, error: BaseException, _trace: object) -> None:
        status[0] = f"failed ({error})"
        print("a word of the tracker", file=sys.stderr)

    def ends_the_run() -> None:
        Path(os.environ["TEST_TRACKED"]).read_text()
        print("the run has", status[0])

    if current_rank().rank == 0:
        sys.excepthook = takes_down
        atexit.register(ends_the_run)
    else:
        signal.signal(signal.SIGTERM, lambda *_: Path(os.environ["TEST_TRACKED"]).write_text("told to end"))
    barrier("both listen")
    if current_rank().rank == 0:
        raise ValueError("bad data")
    signal.pause()
