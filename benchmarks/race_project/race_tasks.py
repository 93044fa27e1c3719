"""One function as a stock HorovodJob with a pod template, and as SafeHorovod. Run by ``benchmarks/race.py``."""

from __future__ import annotations

from importlib import import_module

from flytekit import PodTemplate, task
from flytekitplugins.kfmpi import HorovodJob, Launcher, Worker
from kubernetes.client import V1PodSpec, V1Toleration

from flytekitplugins_safedist import SafeHorovod

RANKS = 8


def template() -> PodTemplate:
    """What sends users down flytekit's pod path: here, a toleration."""
    tolerated = V1Toleration(key="gpu", operator="Exists")
    return PodTemplate(pod_spec=V1PodSpec(containers=[], tolerations=[tolerated]))


def train() -> int:
    """Every module of the project as it was written (the benchmark writes them), and every rank in one allreduce."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    ranks = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    return int(ranks.item()) * int(import_module("race_code").total())


@task(
    task_config=HorovodJob(worker=Worker(replicas=1), launcher=Launcher(replicas=1), slots=RANKS),
    pod_template=template(),
)
def stock() -> int:
    return train()


@task(task_config=SafeHorovod(nproc_per_node=RANKS), pod_template=template())
def ours() -> int:
    return train()
