"""What pods train that are told to stop: step after step until then, and three more steps from what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flytekit import PodTemplate, task
from kubernetes.client import V1Container, V1PodSpec

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints

from .jobs import LEARNING_RATE, model, say

TIMEOUTS = Timeouts(stop=1, exit=10, preemption=120)
MORE = 3


def grace(seconds: int) -> PodTemplate:
    """Pods that are killed so long after they were told to stop."""
    spec = V1PodSpec(containers=[V1Container(name="primary")], termination_grace_period_seconds=seconds)
    return PodTemplate(pod_spec=spec)


def train(trained: Any, optimizer: Any, meet: Callable[[], object]) -> str:
    """Each rank writes every step into a file that outlives it; what is saved has a list of them, too."""
    import torch

    me = current_rank()
    state = {"model": trained, "optimizer": optimizer, "steps": []}
    ckpt = Checkpoints(every=None)
    first = step = ckpt.restore(state)
    with open(f"/gate/steps-{me.rank}", "a", buffering=1) as file:
        while not first or step < first + MORE:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(trained(torch.ones(4, 1).double()), torch.zeros(4, 1).double()).backward()
            optimizer.step()
            meet()
            state["steps"].append(step)
            file.write(f"{step}\n")
            ckpt.save(step, state)
            if step == first:  # only now a pod that is told to stop knows that this rank would save
                say(f"rank {me.rank} of {me.world_size} from {first}")
            step += 1
    return json.dumps({"steps": state["steps"], "size": me.world_size})


class Descent:
    """What ``torch.optim.SGD`` does, without the second of imports that the first of torch's optimizers costs a rank.
    Every rank has the same points here, so that nothing need be averaged."""

    def __init__(self, trained: Any) -> None:
        self.trained = trained
        self.taken = 0

    def zero_grad(self) -> None:
        self.trained.zero_grad()

    def step(self) -> None:
        import torch

        self.taken += 1
        with torch.no_grad():
            for value in self.trained.parameters():
                value.sub_(LEARNING_RATE * value.grad)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def by_hand() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    trained = model()
    return train(trained, Descent(trained), dist.barrier)


def with_torch() -> str:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    trained = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
    return train(trained, optimizer, dist.barrier)


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS), pod_template=grace(15))
def preempted_15() -> str:
    return by_hand()


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, timeouts=TIMEOUTS), pod_template=grace(30))
def preempted_30() -> str:
    return with_torch()


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=TIMEOUTS))
def preempted_alone() -> str:
    return with_torch()
