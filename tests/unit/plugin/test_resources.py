"""What the pods ask for is what one function says: of the task, its roles, its pod template, a call, a registration."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from flytekit import Resources, workflow
from flytekit.configuration import SerializationSettings
from flytekit.core.pod_template import PodTemplate
from flytekit.core.resources import ResourceSpec
from flytekit.tools.translator import get_serializable
from flytekitplugins import kfpytorch
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.client import V1Container, V1EnvVar, V1PodSpec, V1ResourceRequirements

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.config.arguments import TaskArguments
from flytekitplugins_safedist.config.effective import by_part
from flytekitplugins_safedist.config.plan import plan
from flytekitplugins_safedist.config.quantities import value_of
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.task import SafeTask
from tests.fs.ranks import AT_LENGTH
from tests.harness.flyte import SETTINGS, called


def body(x: int) -> int:
    return x


def pods_of(
    task: SafeTask, call: dict[str, Any] | None = None, settings: SerializationSettings = SETTINGS
) -> dict[str, Any]:
    """The training container of each role, as the backend makes it of the registered task, called with overrides."""

    def one_call(x: int) -> None:
        node = task(x=x)
        if call:
            node.with_overrides(**call)

    known: Any = OrderedDict()
    node = get_serializable(known, settings, workflow(one_call)).template.nodes[0].to_flyte_idl()
    template = get_serializable(known, settings, task).template.to_flyte_idl()
    manifest = called(template, MessageToDict(node))
    if manifest["kind"] == "Pod":
        return {"pod": manifest["spec"]["containers"][0]}
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    return {name.lower(): role["template"]["spec"]["containers"][0] for name, role in roles.items()}


def with_resources(resources: Any, **container: Any) -> PodTemplate:
    made = V1ResourceRequirements(**resources)
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", resources=made, **container)]))


def test_what_a_role_does_not_name_is_the_tasks_and_the_templates() -> None:
    """By itself the backend gives such a role the platform's cpu and memory."""
    role = kfpytorch.Worker(requests=Resources(ephemeral_storage="50Gi"))
    template = with_resources({"limits": {"memory": "64Gi", "nvidia.com/gpu": "4"}})
    task = SafeTask(SafeTorch(nnodes=2, worker=role), body, requests=Resources(cpu="16"), pod_template=template)

    pods = pods_of(task)

    same = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert pods["master"]["resources"] == {"requests": same, "limits": same}
    same["ephemeral-storage"] = "50Gi"
    assert pods["worker"]["resources"] == {"requests": same, "limits": same}


def test_what_a_registration_asks_for_holds_for_every_role_and_decides_the_ranks() -> None:
    """``pyflyte register --resource-requests cpu=16,mem=64Gi,gpu=4``, of a task that asks for nothing."""
    spec = ResourceSpec(requests=Resources(cpu="16", mem="64Gi", gpu="4"), limits=Resources())
    registration = replace(SETTINGS, default_resources=spec)
    role = kfpytorch.Worker(requests=Resources(ephemeral_storage="50Gi"))

    pods = pods_of(SafeTask(SafeTorch(nnodes=2, worker=role), body), settings=registration)

    assert pods["master"]["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert pods["worker"]["resources"]["limits"] == {
        **pods["master"]["resources"]["limits"],
        "ephemeral-storage": "50Gi",
    }
    variables = {one["name"]: one.get("value", "") for one in pods["worker"]["env"]}
    assert '"nproc_per_node": 4' in variables["SAFEDIST_JOB"]
    with pytest.raises(ConfigError, match=r"nproc_per_node=8 exceeds requests.gpu=4 .*resources=of the registration"):
        pods_of(SafeTask(SafeTorch(nproc_per_node=8), body), settings=registration)


def test_of_two_variables_of_one_name_the_tasks_stays_and_the_users_scratch_root() -> None:
    """The API server refuses a job in which one stands twice."""
    env = [V1EnvVar(name=name, value="of the template") for name in ("FOO", "BAR", "SAFEDIST_SCRATCH_ROOT")]
    template = with_resources({}, env=env)
    task = SafeTask(SafeTorch(nnodes=2), body, pod_template=template, environment={"FOO": "of the task"})

    listed = pods_of(task)["master"]["env"]

    names = [one["name"] for one in listed]
    assert len(names) == len(set(names))
    values = {one["name"]: one.get("value") for one in listed}
    assert (values["FOO"], values["BAR"]) == ("of the task", "of the template")
    assert values["SAFEDIST_SCRATCH_ROOT"] == "of the template"


TEXTS = {"cpu": ("0", "2", "500m"), "mem": ("1Gi", "4096Mi"), "gpu": ("0", "2", "4", 4), "ephemeral_storage": ("5Gi",)}
SAID = st.fixed_dictionaries({}, optional={name: st.sampled_from(texts) for name, texts in TEXTS.items()})
RESOURCES = st.none() | SAID.map(lambda said: Resources(**said))
EXTENDED = ("cpu", "memory", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "amd.com/gpu", "vpc.amazonaws.com/efa")
PART = st.dictionaries(st.sampled_from(EXTENDED), st.sampled_from(["1", "2", "4"]), max_size=2)
TEMPLATE = st.none() | st.builds(lambda requests, limits: {"requests": requests, "limits": limits}, PART, PART)
ROLE = st.none() | st.fixed_dictionaries({"requests": RESOURCES, "limits": RESOURCES})


@settings(max_examples=4000 if AT_LENGTH else 80, deadline=None)
@given(
    nodes=st.sampled_from([1, 2, "1:2"]),
    asks=st.fixed_dictionaries({"requests": RESOURCES, "limits": RESOURCES}),
    roles=st.fixed_dictionaries({"master": ROLE, "worker": ROLE}),
    template=TEMPLATE,
    call=st.fixed_dictionaries({"requests": RESOURCES, "limits": RESOURCES}),
    called_template=TEMPLATE,
)
def test_every_pod_asks_for_what_the_one_function_says(
    nodes: Any, asks: Any, roles: Any, template: Any, call: Any, called_template: Any
) -> None:
    """Registration, ``with_overrides`` and the backend's own code (as ``tests/contracts/oracle`` proves) agree with it;
    and Kubernetes takes it."""
    kinds = {"master": kfpytorch.Master, "worker": kfpytorch.Worker}
    chosen = {name: kinds[name](**said) for name, said in roles.items() if said and nodes != 1}
    if nodes == "1:2":
        chosen.pop("master", None)
    config = SafeTorch(nnodes=nodes, nproc_per_node=None, **chosen)
    own = None if template is None else with_resources(template)
    others = None if called_template is None else with_resources(called_template)
    said = {name: value for name, value in {**call, "pod_template": others}.items() if value is not None}
    try:
        task = SafeTask(config, body, pod_template=own, **asks)
        pods = pods_of(task, said)
    except ConfigError:
        return
    arguments = TaskArguments(pod_template=others or own, **asks)
    planned, problems = plan(config, arguments, task.plan, TaskArguments(**call))

    assert planned is not None, problems
    for role, container in pods.items():
        parts = container["resources"]
        taken = {"limits": parts["limits"], "requests": {**parts["limits"], **parts["requests"]}}  # as the API server
        for part, listed in by_part(planned.resources[role]).items():
            found = {name: value_of(value) for name, value in taken[part].items()}
            assert {name: value_of(amount.value) for name, amount in listed.items()}.items() <= found.items()
            assert {name for name in found if found[name]} <= {*listed, "cpu", "memory"}
        for name, limit in parts["limits"].items():
            assert value_of(taken["requests"][name]) == value_of(limit) or "/" not in name
    assert len({gpus(container["resources"]["limits"]) for container in pods.values()}) == 1


def gpus(limits: dict[str, str]) -> int:
    return sum(int(value) for name, value in limits.items() if name.endswith("/gpu") or "/mig-" in name)
