"""Stock configs and what replaces them; whatever changes its meaning is said."""

from __future__ import annotations

from typing import Any

import pytest
from flytekit import Resources, task
from flytekitplugins import kfmpi
from flytekitplugins import kfpytorch as kf

from flytekitplugins_safedist import Kubeflow, SafeHorovod, SafeTorch, Timeouts
from flytekitplugins_safedist.errors import MigrationError
from flytekitplugins_safedist.tools.migrate import migrate

GPUS = Resources(gpu="8")
CASES: dict[str, tuple[Any, str, str]] = {
    "HorovodJob": (
        kfmpi.HorovodJob(worker=kfmpi.Worker(replicas=4), launcher=kfmpi.Launcher(replicas=1), slots=8),
        "SafeHorovod(nodes=4, nproc_per_node=8, timeouts=Timeouts(rendezvous=1200.0))",
        "a worker that fails comes back",
    ),
    "HorovodJob with everything": (
        kfmpi.HorovodJob(
            worker=kfmpi.Worker(
                replicas=2,
                requests=GPUS,
                command=["/usr/sbin/sshd", "-De"],
                restart_policy=kfmpi.task.RestartPolicy.FAILURE,
            ),
            launcher=kfmpi.Launcher(replicas=1, image="l:1"),
            run_policy=kfmpi.RunPolicy(backoff_limit=2),
            slots=2,
            verbose=True,
            elastic_timeout=900,
        ),
        "SafeHorovod(nodes=2, nproc_per_node=2, cluster=Kubeflow(run_policy=RunPolicy(backoff_limit=2)))",
        "worker.command; verbose, log_level; launcher is gone; pods that still run are removed",
    ),
    "PyTorch": (
        kf.PyTorch(worker=kf.Worker(replicas=3, image="w:1"), master=kf.Master(requests=GPUS)),
        "SafeTorch(nodes=4, nproc_per_node=1, "
        "cluster=Kubeflow(master=Master(requests=Resources(gpu='8')), worker=Worker(image='w:1')))",
        "here it runs in every rank; a worker that fails comes back",
    ),
    "PyTorch without workers": (
        kf.PyTorch(worker=kf.Worker(replicas=0), increase_shared_mem=False, run_policy=kf.RunPolicy()),
        "SafeTorch(nproc_per_node=1, cluster=Kubeflow(shared_memory=False))",
        "run_policy is gone: one node is an ordinary pod",
    ),
    "Elastic": (
        kf.Elastic(nnodes=2, nproc_per_node=4, max_restarts=3),
        "SafeTorch(nodes=2, nproc_per_node=4, max_restarts=3, start_method='spawn')",
        "a worker that fails comes back",
    ),
    "Elastic range": (
        kf.Elastic(
            nnodes="2:4",
            nproc_per_node="gpu",  # type: ignore[arg-type]  # torchrun takes it, and so people write it
            start_method="fork",
            monitor_interval=1,
            rdzv_configs={"timeout": 60, "join_timeout": 120, "read_timeout": 90},
        ),
        "SafeTorch(nodes='2:4', timeouts=Timeouts(rendezvous=120.0))",
        'rdzv_configs read_timeout; nproc_per_node=; "fork" becomes "preload"; monitor_interval is gone',
    ),
    "Elastic on one node": (
        kf.Elastic(nnodes="1:1", nproc_per_node=8),
        "SafeTorch(nproc_per_node=8, start_method='spawn')",
        "",
    ),
}


def train(x: int) -> int:
    return x


@pytest.mark.parametrize("case", CASES)
def test_a_stock_config_has_a_counterpart_that_can_be_registered(case: str) -> None:
    config, text, notes = CASES[case]

    migration = migrate(config)

    if case == "HorovodJob with everything":
        assert migration.config.cluster.master == kf.Master(requests=GPUS, restart_policy=kf.RestartPolicy.FAILURE)
        assert migration.config.cluster.worker == kf.Worker(requests=GPUS, restart_policy=kf.RestartPolicy.FAILURE)
    else:
        assert migration.source() == text
    assert all(part in "\n".join(migration.notes) for part in notes.split("; "))
    said = "a worker that fails comes back" in "\n".join(migration.notes)
    assert said == (migration.config.nodes != 1 and case != "HorovodJob with everything")
    assert bool(notes) == bool(migration.notes)
    assert task(task_config=migration.config)(train).settings.nproc_per_node >= 1


def test_a_horovod_job_can_stay_with_its_operator() -> None:
    config = kfmpi.HorovodJob(
        worker=kfmpi.Worker(replicas=2, requests=GPUS, command=["sshd"]),
        launcher=kfmpi.Launcher(replicas=1, image="l:1"),
        slots=8,
    )

    migration = migrate(config, operator="mpi")

    assert migration.config == SafeHorovod(
        nodes=2,
        nproc_per_node=8,
        timeouts=Timeouts(rendezvous=1200.0),
        cluster=Kubeflow(
            operator="mpi", worker=kfmpi.Worker(requests=GPUS), launcher=kfmpi.Launcher(replicas=1, image="l:1")
        ),
    )


def test_the_source_is_python_that_makes_the_same_config() -> None:
    for config, _, _ in CASES.values():
        migration = migrate(config)
        names = {
            **vars(kf),
            "SafeTorch": SafeTorch,
            "SafeHorovod": SafeHorovod,
            "Timeouts": Timeouts,
            "Kubeflow": Kubeflow,
        }
        again = eval(migration.source(), {**names, "Resources": Resources})  # our own text
        assert again.nodes == migration.config.nodes
        assert again.cluster.worker == migration.config.cluster.worker
        assert migration.source() == type(migration)(again, ()).source()


def test_other_configs_are_refused_by_name() -> None:
    with pytest.raises(MigrationError, match="no counterpart") as caught:
        migrate(kfmpi.MPIJob(worker=kfmpi.Worker(replicas=1)))

    assert "HorovodJob, PyTorch, Elastic" in str(caught.value)


def test_a_job_without_workers_is_refused() -> None:
    with pytest.raises(MigrationError, match="does not say how many workers"):
        migrate(kfmpi.HorovodJob())
