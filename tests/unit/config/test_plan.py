"""What follows from a config that is accepted: defaults are decided once, ranks follow GPUs."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from flytekit import Resources
from flytekit.core.pod_template import PodTemplate
from flytekit.extras.accelerators import A100
from flytekitplugins import kfpytorch as kf
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import V1Container, V1EnvVar, V1PodSpec, V1ResourceRequirements

from flytekitplugins_safedist import Logs, SafeHorovod, SafeTorch, Scratch, Timeouts
from flytekitplugins_safedist.config.arguments import TaskArguments
from flytekitplugins_safedist.config.options import parse_nodes
from flytekitplugins_safedist.config.plan import plan as plan_of
from tests.unit.config.plans import planned


def test_every_word_of_the_user_reaches_the_plan() -> None:
    config = SafeHorovod(
        nnodes="2:4",
        nproc_per_node=3,
        max_restarts=5,
        start_method="spawn",
        scratch=Scratch(path="/scratch", keep="on_failure", size_limit="1.5Gi", shared_caches=("triton",)),
        timeouts=Timeouts(start=1, rendezvous=2.5, stop=3, exit=4),
        logs=Logs(show=(0, 2), tail_lines=0, prefix="{node_rank:>2}/{local_rank} {{x}} "),
    )
    plan = planned(config, requests=Resources(gpu="4"), environment={"B": "2", "A": "1"})
    assert (plan.min_nodes, plan.max_nodes, plan.nproc_per_node) == (2, 4, 3)
    assert (plan.max_restarts, plan.start_method, plan.backend) == (5, "spawn", "horovod")
    assert (plan.scratch, plan.size_limit) == (config.scratch, 3 * 512 * 1024 * 1024)
    assert (plan.timeouts, plan.logs) == (config.timeouts, config.logs)
    assert plan.variables == ("A", "B"), "their values are in the container"
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("config", [SafeHorovod(), Scratch(), Timeouts(), Logs()])
def test_configs_are_frozen_and_hashable(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)
    assert hash(config) == hash(dataclasses.replace(config)) == hash(pickle.loads(pickle.dumps(config)))


def template(**container: Any) -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", **container)]))


GPU4 = V1ResourceRequirements(limits={"nvidia.com/gpu": "4"})
SIDECAR = V1Container(name="side", image="i:1", env=[V1EnvVar(name="RANK", value="0")])
TWO = Resources(gpu="2")
RANKS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "no GPUs": (SafeTorch(), {}, 1),
    "zero GPUs": (SafeTorch(), {"requests": Resources(gpu="0")}, 1),
    "requests": (SafeTorch(), {"requests": Resources(gpu="8")}, 8),
    "limits": (SafeTorch(), {"limits": Resources(gpu=4)}, 4),
    "resources": (SafeTorch(), {"resources": Resources(gpu=("2", "2"))}, 2),
    "template": (SafeTorch(), {"pod_template": template(resources=GPU4)}, 4),
    "template, and cpu of the task": (
        SafeTorch(),
        {"requests": Resources(cpu="4"), "pod_template": template(resources=GPU4)},
        4,
    ),
    "fewer than GPUs": (SafeTorch(nproc_per_node=2), {"requests": Resources(gpu="8")}, 2),
    "any number on CPUs": (SafeTorch(nproc_per_node=16), {"requests": Resources(gpu="0")}, 16),
    "roles": (SafeTorch(nnodes=2, master=kf.Master(requests=TWO), worker=kf.Worker(requests=TWO)), {}, 2),
    "worker of a range": (SafeTorch(nnodes="1:2", worker=kf.Worker(requests=TWO)), {}, 2),
    "a range has no master": (
        SafeTorch(nnodes="1:2", worker=kf.Worker(requests=TWO)),
        {"requests": Resources(gpu="8")},
        2,
    ),
    "one slice": (SafeTorch(), {"accelerator": A100.partition_2g_10gb, "limits": Resources(gpu="1")}, 1),
    "explicit slices": (SafeTorch(nproc_per_node=2), {"accelerator": A100.partition_2g_10gb, "limits": TWO}, 2),
    "a sidecar's environment is its own": (
        SafeTorch(nnodes=2),
        {"pod_template": PodTemplate(pod_spec=V1PodSpec(containers=[SIDECAR]))},
        1,
    ),
}


def test_ranks_per_node_follow_the_gpus_of_a_pod() -> None:
    found = {case: plan_of(config, TaskArguments(**arguments)) for case, (config, arguments, _) in RANKS.items()}

    assert {case: problems or (made and made.nproc_per_node) for case, (made, problems) in found.items()} == {
        case: ranks for case, (*_, ranks) in RANKS.items()
    }


@given(st.integers(1, 999_999), st.integers(0, 999_999))
def test_a_range_of_nodes_is_read_when_it_goes_upwards(low: int, further: int) -> None:
    high = min(low + further, 999_999)
    assert parse_nodes(f"{low}:{high}") == (low, high)
    assert parse_nodes(low) == parse_nodes(str(low)) == (low, low)
    if high > low:
        assert parse_nodes(f"{high}:{low}") is None
