"""What pods train that are told to stop: step after step until then, and three more steps from what was saved."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from flytekit import PodTemplate, task
from kubernetes.client import V1Container, V1PodSpec

from flytekitplugins_safedist import SafeHorovod, SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.checkpoint import checkpoints

from .jobs import model, say

TIMEOUTS = Timeouts(stop=1, exit=10)
MORE = 3


def grace(seconds: int) -> PodTemplate:
    """Pods that are killed so long after they were told to stop."""
    spec = V1PodSpec(containers=[V1Container(name="primary")], termination_grace_period_seconds=seconds)
    return PodTemplate(pod_spec=spec)


def train(trained: Any, optimizer: Any, meet: Callable[[], object], sharded: bool | None = None) -> str:
    """Each rank writes every step into a file that outlives it; what is saved has a list of them, too."""
    import torch

    me = current_rank()
    state = {"model": trained, "optimizer": optimizer, "steps": []}
    ckpt = checkpoints(every=None, sharded=sharded, resume_from=os.environ.get("TEST_RESUME_FROM"))
    first = step = ckpt.resume(state)
    with open(f"/gate/steps-{me.rank}", "a", buffering=1) as file:
        while not first or step < first + MORE:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(trained(torch.ones(4, 1).double()), torch.zeros(4, 1).double()).backward()
            optimizer.step()
            meet()
            state["steps"].append(step)
            file.write(f"{step}\n")
            if step == first:
                say(f"rank {me.rank} of {me.world_size} from {first}")
            ckpt.step(step, state)
            step += 1
    return json.dumps({"steps": state["steps"], "size": me.world_size})


def with_torch(sharded: bool | None = None) -> str:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    trained, optimizer = model()
    return train(DistributedDataParallel(trained), optimizer, dist.barrier, sharded)


@task(task_config=SafeTorch(nodes=2, nproc_per_node=2, timeouts=TIMEOUTS), pod_template=grace(15))
def preempted_15() -> str:
    return with_torch()


@task(task_config=SafeTorch(nodes=2, nproc_per_node=2, timeouts=TIMEOUTS), pod_template=grace(30))
def preempted_30() -> str:
    return with_torch()


@task(task_config=SafeTorch(nodes=2, nproc_per_node=2, timeouts=TIMEOUTS), pod_template=grace(120))
def preempted_120() -> str:
    return with_torch()


@task(task_config=SafeHorovod(nodes=2, nproc_per_node=2, timeouts=TIMEOUTS), pod_template=grace(30))
def preempted_horovod() -> str:
    import horovod.torch as hvd

    hvd.init()
    trained, optimizer = model()
    together = hvd.DistributedOptimizer(optimizer, named_parameters=trained.named_parameters())
    return train(trained, together, hvd.barrier)


@task(task_config=SafeTorch(nodes=2, nproc_per_node=2, timeouts=TIMEOUTS))
def preempted_sharded() -> str:
    return with_torch(sharded=True)


@task(task_config=SafeTorch(nodes="2:3", nproc_per_node=1, timeouts=TIMEOUTS))
def preempted_range() -> str:
    return with_torch()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=TIMEOUTS))
def preempted_alone() -> str:
    return with_torch()
