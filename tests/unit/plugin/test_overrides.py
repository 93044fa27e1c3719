"""``with_overrides`` on a call of our tasks: what reaches the cluster, and what is refused when it is called."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from flytekit import Resources, map_task, workflow
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.base_task import PythonTask
from flytekit.core.pod_template import PodTemplate
from flytekit.tools.translator import get_serializable
from flytekitplugins import kfpytorch
from google.protobuf.json_format import MessageToDict
from kubernetes.client import V1Container, V1PodSpec, V1Volume, V1VolumeMount

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.task import SafeTask

SETTINGS = SerializationSettings(
    image_config=ImageConfig(default_image=Image(name="default", fqn="registry.example/train", tag="1")),
    project="p",
    domain="d",
    version="v",
)
GPU8 = Resources(cpu="8", gpu="8")


def body(x: int) -> int:
    return x


def make(config: Any, **kwargs: Any) -> SafeTask:
    return SafeTask(config, body, **kwargs)


def overrides_of(task: PythonTask[Any], **said: Any) -> dict[str, Any]:
    """The overrides of the node that registration sends."""
    inputs = task.python_interface.inputs

    def call(x: Any) -> None:
        task(x=x).with_overrides(**said)

    call.__annotations__ = {**inputs, "return": None}
    found = get_serializable(OrderedDict(), SETTINGS, workflow(call)).template.nodes[0].to_flyte_idl()
    node = MessageToDict(found)
    called: dict[str, Any] = node.get("arrayNode", {}).get("node", node)["taskNode"]["overrides"]
    return called


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


@pytest.mark.parametrize(
    ("config", "kwargs", "size"),
    [
        (SafeTorch(), {}, ""),
        (SafeTorch(), {"shared_memory": "16Gi"}, "16Gi"),
        (SafeTorch(), {"shared_memory": True}, ""),
        (SafeTorch(), {"shared_memory": False}, None),
        (SafeTorch(), {"pod_template": shm_template()}, None),
    ],
)
def test_shared_memory_is_asked_of_the_backend(config: Any, kwargs: dict[str, Any], size: str | None) -> None:
    found = make(config, **kwargs).get_extended_resources(SETTINGS)

    assert (None if found is None else found.shared_memory.size_limit) == size


REFUSED: dict[str, tuple[SafeTask, dict[str, Any], str]] = {
    "another config": (make(SafeTorch(nnodes=2)), {"task_config": SafeTorch(nnodes=4)}, "never reaches the cluster"),
    "memory that is no amount": (make(SafeTorch()), {"requests": Resources(mem="lots")}, "requests.mem='lots'"),
    "a request above its limit": (
        make(SafeTorch()),
        {"requests": Resources(mem="8Gi"), "limits": Resources(mem="4Gi")},
        "requests.mem='8Gi' is above limits.mem='4Gi'",
    ),
    "a pod template as dict": (make(SafeTorch()), {"pod_template": {}}, "is not a PodTemplate"),
    "resources that a role names": (
        make(SafeTorch(nnodes="2:4", worker=kfpytorch.Worker(requests=Resources(cpu="8")))),
        {"limits": Resources(cpu="16")},
        "the job's worker names its own resources, which win",
    ),
    "GPUs of some nodes": (
        make(SafeTorch(nnodes=2, worker=kfpytorch.Worker(requests=Resources(gpu="8"))), requests=GPU8),
        {"requests": Resources(gpu="4")},
        "changes the GPUs of some nodes only: worker",
    ),
    "two mounts of shared memory": (
        make(SafeTorch()),
        {"pod_template": shm_template()},
        "and the task both bring /dev/shm",
    ),
    "shared memory beside a mount": (
        make(SafeTorch(), pod_template=shm_template()),
        {"shared_memory": "8Gi"},
        "and the task both bring /dev/shm",
    ),
    "a command in the template": (
        make(SafeTorch()),
        {"pod_template": sidecar_first(command=["python"])},
        "is replaced by the task's command",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_when_it_is_called(case: str) -> None:
    task, said, reason = REFUSED[case]

    with pytest.raises(ConfigError, match=reason):
        overrides_of(task, **said)


def test_another_config_is_refused_on_a_mapped_task_too() -> None:
    mapped = map_task(make(SafeTorch()))

    with pytest.raises(ConfigError, match="never reaches the cluster"):
        overrides_of(mapped, task_config=SafeTorch(nnodes=4))


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
    monkeypatch.setattr(logger, "warning", lambda text, *_: texts.append(text))
    role = kfpytorch.Worker(image="w:1", requests=Resources(cpu="2"))

    overrides_of(make(SafeTorch(nnodes=2, worker=role)), **said)

    assert any(warning in one for one in texts)


def test_a_mapped_tasks_node_is_left_to_flytekit() -> None:
    mapped = map_task(make(SafeTorch()))

    assert overrides_of(mapped, requests=Resources(cpu="2"))["resources"]["requests"] == [{"name": "CPU", "value": "2"}]
