"""``with_overrides`` on a call of our tasks: what reaches the cluster, and what is refused when it is called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from flytekit import ImageSpec, Resources, conditional, map_task, workflow
from flytekit.configuration import FastSerializationSettings
from flytekit.core.base_task import PythonTask
from flytekit.core.node_creation import create_node
from flytekit.core.pod_template import PodTemplate
from flytekit.core.workflow import ImperativeWorkflow
from flytekit.extras.accelerators import A100
from flytekit.tools import translator
from flytekit.tools.translator import get_serializable
from flytekitplugins import kfpytorch
from google.protobuf.json_format import MessageToDict
from kubernetes.client import V1Container, V1PodSpec, V1ResourceRequirements, V1Volume, V1VolumeMount

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.compat import flytekit as flytekit_inside
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.task import SafeTask
from tests.harness.flyte import SETTINGS

FAST = replace(
    SETTINGS,
    fast_serialization_settings=FastSerializationSettings(
        enabled=True, destination_dir="/root", distribution_location="s3://bucket/code.tar.gz"
    ),
)
GPU8 = Resources(cpu="8", gpu="8")
EFA = {"vpc.amazonaws.com/efa": "4"}


def body(x: int) -> int:
    return x


def make(config: Any, **kwargs: Any) -> SafeTask:
    return SafeTask(config, body, **kwargs)


def overrides_of(task: PythonTask[Any], *calls: dict[str, Any], **said: Any) -> dict[str, Any]:
    """The overrides of the node that registration sends, after these calls of ``with_overrides``."""
    inputs = task.python_interface.inputs

    def call(x: Any) -> None:
        node = task(x=x)
        for each in (*calls, *([said] if said else ())):
            node = node.with_overrides(**each)

    call.__annotations__ = {**inputs, "return": None}
    return sent(workflow(call))


def sent(called: Any) -> dict[str, Any]:
    """The overrides of a workflow's first node."""
    node = MessageToDict(get_serializable(OrderedDict(), FAST, called).template.nodes[0].to_flyte_idl())
    while "taskNode" not in node:
        node = node["arrayNode"]["node"] if "arrayNode" in node else node["branchNode"]["ifElse"]["case"]["thenNode"]
    overrides: dict[str, Any] = node["taskNode"]["overrides"]
    return overrides


def sidecar_first(**primary: Any) -> PodTemplate:
    containers = [V1Container(name="side", image="side:1"), V1Container(name="main", **primary)]
    return PodTemplate(primary_container_name="main", pod_spec=V1PodSpec(containers=containers))


def shm_template() -> PodTemplate:
    template = sidecar_first(volume_mounts=[V1VolumeMount(name="m", mount_path="/dev/shm")])
    template.pod_spec.volumes = [V1Volume(name="m", empty_dir={})]
    return template


def test_a_pod_template_gets_the_scratch_volume_its_variable_and_the_primary_container_first() -> None:
    given = sidecar_first()

    spec = overrides_of(make(SafeTorch(nnodes=2), requests=GPU8), pod_template=given)["podTemplate"]["podSpec"]

    primary, side = spec["containers"]
    assert (primary["name"], side["name"]) == ("main", "side")
    assert primary["volumeMounts"] == [{"name": "safedist-scratch", "mountPath": "/var/run/safedist/scratch"}]
    assert [one["name"] for one in spec["volumes"]] == ["safedist-scratch"]
    assert {"name": "SAFEDIST_SCRATCH_ROOT", "value": "/var/run/safedist/scratch"} in primary["env"]
    assert primary["args"][0] == "safedist-execute"
    assert given == sidecar_first()


def test_the_variable_of_the_scratch_volume_is_only_where_its_mount_is() -> None:
    container = make(SafeTorch(nnodes=2))._get_container(SETTINGS)

    assert "SAFEDIST_SCRATCH_ROOT" not in container.env


def test_shared_memory_replaces_what_the_task_asks_for() -> None:
    task = make(SafeTorch(nnodes=2))

    assert task.get_extended_resources(SETTINGS).shared_memory.mount_path == "/dev/shm"
    assert overrides_of(task, shared_memory="8Gi")["extendedResources"]["sharedMemory"]["sizeLimit"] == "8Gi"


REFUSED: dict[str, tuple[SafeTask, dict[str, Any], str]] = {
    "another config": (make(SafeTorch(nnodes=2)), {"task_config": SafeTorch(nnodes=4)}, "never reaches the cluster"),
    "memory that is no amount": (make(SafeTorch()), {"requests": Resources(mem="lots")}, "requests.mem='lots'"),
    "a pod template as dict": (make(SafeTorch()), {"pod_template": {}}, "is not a PodTemplate"),
    "resources that a role names": (
        make(SafeTorch(nnodes="2:4", worker=kfpytorch.Worker(requests=Resources(cpu="8")))),
        {"limits": Resources(cpu="16")},
        "the job's worker names its own resources, which win",
    ),
    "GPUs of some nodes": (
        make(SafeTorch(nnodes=2, worker=kfpytorch.Worker(requests=Resources(gpu="8"))), requests=GPU8),
        {"requests": Resources(gpu="4")},
        "nproc_per_node=None is not decided by requests.gpu=4 and worker.requests.gpu=8",
    ),
    "two mounts of shared memory": (
        make(SafeTorch()),
        {"pod_template": shm_template()},
        "shared_memory=True and the pod template both mount /dev/shm",
    ),
    "shared memory beside a mount": (
        make(SafeTorch(), pod_template=shm_template()),
        {"shared_memory": "8Gi"},
        "shared_memory='8Gi' and the pod template both mount /dev/shm",
    ),
    "a request above the task's limit": (
        make(SafeTorch(), limits=Resources(mem="4Gi")),
        {"requests": Resources(mem="8Gi")},
        "requests.mem='8Gi' is above @task's limits.mem='4Gi'",
    ),
    "no GPU in the place of eight": (
        make(SafeTorch(nnodes=2), requests=GPU8),
        {"requests": Resources(gpu="0")},
        "requests.gpu='0' does not take away @task's requests.gpu=8: the backend drops a zero",
    ),
    "an accelerator without a GPU": (make(SafeTorch()), {"accelerator": A100}, "but no GPU is requested"),
    "no shared memory": (
        make(SafeTorch()),
        {"shared_memory": False},
        "shared_memory='False' does not take away the task's /dev/shm: flytekit sends nothing of it",
    ),
    "a template's cpu for a role that names its own": (
        make(SafeTorch(nnodes=2, worker=kfpytorch.Worker(requests=Resources(mem="8Gi")))),
        {"pod_template": sidecar_first(resources=V1ResourceRequirements(limits={"cpu": "4"}))},
        "pod_template main limits.cpu='4' does not reach worker, whose own resources win",
    ),
    "an ImageSpec": (
        make(SafeTorch()),
        {"container_image": ImageSpec(name="train", registry="registry.example")},
        "container_image='ImageSpec' is sent as it is: flytekit builds no ImageSpec there",
    ),
    "a name of an image that nobody fills in": (
        make(SafeTorch()),
        {"container_image": "{{.image.default.fqn}}:2"},
        "container_image='{{.image.default.fqn}}:2' is sent as it is",
    ),
    "what with_overrides does not have": (
        make(SafeTorch()),
        {"nproc_per_node": 4},
        "nproc_per_node='set' is no argument of with_overrides, which drops it",
    ),
}


def refusal(task: SafeTask, said: dict[str, Any]) -> str:
    """Why the call is refused; "" where it is not."""
    try:
        overrides_of(task, **said)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_cannot_work_is_refused_when_it_is_called() -> None:
    """As in the decorator, and for what only a call can be wrong about."""
    errors = {reason: refusal(task, said) for task, said, reason in REFUSED.values()}

    assert {reason: said for reason, said in errors.items() if reason not in said} == {}


def test_a_count_of_gpus_is_sent_as_request_and_limit() -> None:
    """Kubernetes refuses a pod where they differ, and nobody hears of it."""
    task = make(SafeTorch(nnodes=2), requests=GPU8, limits=GPU8)

    resources = overrides_of(task, requests=Resources(cpu="4", gpu="2"))["resources"]

    gpu = {"name": "GPU", "value": "2"}
    assert resources == {"requests": [{"name": "CPU", "value": "4"}, gpu], "limits": [gpu]}


def efa_template() -> PodTemplate:
    return sidecar_first(resources=V1ResourceRequirements(limits={**EFA, "cpu": "64"}))


def test_calls_that_follow_each_other_are_one() -> None:
    """flytekit forgets what the first one said of shared memory, and its limits with the second one's requests."""
    task = make(SafeTorch(nnodes=2), requests=GPU8)

    sent = overrides_of(
        task,
        {"shared_memory": "8Gi", "limits": Resources(cpu="16"), "accelerator": A100},
        {"requests": Resources(cpu="4")},
        {"retries": 2},
    )

    assert sent["extendedResources"]["sharedMemory"]["sizeLimit"] == "8Gi"
    assert sent["extendedResources"]["gpuAccelerator"]["device"] == "nvidia-tesla-a100"
    cpu = {part: [each["value"] for each in sent["resources"][part]] for part in ("requests", "limits")}
    assert cpu == {"requests": ["4"], "limits": ["16"]}


def test_a_second_call_is_judged_with_the_first() -> None:
    task = make(SafeTorch(nnodes=2), shared_memory=False)

    with pytest.raises(ConfigError, match="shared_memory='1Gi' and the pod template both mount /dev/shm"):
        overrides_of(task, {"pod_template": shm_template()}, {"shared_memory": "1Gi"})


def test_arguments_by_place_are_looked_at() -> None:
    task = make(SafeTorch(nnodes=2), limits=GPU8)

    def call(x: int) -> None:
        task(x=x).with_overrides("name", None, Resources(cpu="16"))

    with pytest.raises(ConfigError, match=r"requests.cpu='16' is above @task's limits.cpu='8'"):
        workflow(call)()


def test_a_template_that_does_not_bring_the_shared_memory_of_the_tasks_gets_it_from_the_backend() -> None:
    task = make(SafeTorch(), pod_template=shm_template())

    assert (
        overrides_of(task, pod_template=sidecar_first())["extendedResources"]["sharedMemory"]["mountPath"] == "/dev/shm"
    )


def mapped(task: SafeTask, **said: Any) -> Any:
    def call(x: list[int]) -> None:
        map_task(task)(x=x).with_overrides(**said)

    return workflow(call)


def in_a_condition(task: SafeTask, **said: Any) -> Any:
    def call(x: int) -> int:
        chosen: int = conditional("c").if_(x > 1).then(task(x=x).with_overrides(**said)).else_().then(task(x=x))
        return chosen

    return workflow(call)


def by_create_node(task: SafeTask, **said: Any) -> Any:
    def call(x: int) -> None:
        create_node(task, x=x).with_overrides(**said)

    return workflow(call)


def imperative(task: SafeTask, **said: Any) -> Any:
    called = ImperativeWorkflow(name="called")
    called.add_entity(task, x=1).with_overrides(**said)
    return called


NODES: list[Callable[..., Any]] = [mapped, in_a_condition, by_create_node, imperative]


@pytest.mark.parametrize("node", NODES)
def test_every_kind_of_node_is_guarded(node: Callable[..., Any]) -> None:
    task = make(SafeTorch(nnodes=2), requests=GPU8, limits=GPU8)

    with pytest.raises(ConfigError, match="never reaches the cluster"):
        node(task, task_config=SafeTorch(nnodes=4))()
    if node is mapped and not flytekit_inside.sends_pod_templates_of_mapped_tasks():
        return  # the next test is of that
    overrides = sent(node(task, requests=Resources(gpu="2"), pod_template=efa_template()))

    assert overrides["resources"]["limits"] == [{"name": "GPU", "value": "2"}]
    primary = overrides["podTemplate"]["podSpec"]["containers"][0]
    assert primary["name"] == "main"
    assert primary["resources"]["limits"] == {**EFA, "cpu": "8", "gpu": "8"}
    assert [one["name"] for one in primary["volumeMounts"]] == ["safedist-scratch"]
    assert "SAFEDIST_GRACE_SECONDS" in {one["name"] for one in primary["env"]}
    assert primary["args"][:2] == ["safedist-execute", "--additional-distribution"]
    assert primary["args"][5:7] == ["--", "pyflyte-map-execute" if node is mapped else "pyflyte-execute"]


def test_of_a_mapped_task_a_pod_template_that_this_flytekit_would_drop_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flytekit before 1.16.22, whose translator never looks at it."""
    monkeypatch.setattr(translator, "get_serializable_array_node_map_task", lambda *_: None)
    task = make(SafeTorch(), requests=GPU8, limits=GPU8)

    with pytest.raises(ConfigError, match="pod_template='set' of a mapped task is not sent by this flytekit"):
        mapped(task, pod_template=efa_template())()
    mapped(task, requests=Resources(gpu="2")).compile()
    by_create_node(task, pod_template=efa_template()).compile()


def test_the_nodes_of_other_tasks_are_left_to_flytekit() -> None:
    from flytekit import task

    plain = task(body)

    assert overrides_of(plain, requests=Resources(gpu="2"))["resources"] == {
        "requests": [{"name": "GPU", "value": "2"}]
    }


@pytest.mark.parametrize(
    ("said", "warning"),
    [
        ({"container_image": "other:2"}, "worker keeps its own image w:1"),
        ({"requests": Resources(cpu="4")}, "worker keeps its own resources"),
    ],
)
def test_a_role_that_keeps_what_is_its_own_is_named(
    said: dict[str, Any], warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flytekit.loggers import logger

    texts: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *facts: texts.append(text % facts))
    role = kfpytorch.Worker(image="w:1", requests=Resources(cpu="2"))

    overrides_of(make(SafeTorch(nnodes=2, worker=role)), **said)

    assert any(warning in one for one in texts)
    assert not any("master keeps" in one for one in texts), "what nothing is written of has the node's"
