"""What a platform adds, bounds and does not tell: given by files, or said to be assumed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flytekit import ImageSpec, Resources
from flytekit.configuration import Image, ImageConfig
from flytekit.configuration.default_images import DefaultImages
from flytekit.core.pod_template import PodTemplate
from flytekit.image_spec.image_spec import ImageBuildEngine, ImageSpecBuilder
from flytekitplugins import kfpytorch as kf
from golden_cases import FAST, GPU8, MPI, make, template_of
from kubernetes.client import V1Container, V1EnvVar, V1PodSpec, V1ResourceRequirements

from flytekitplugins_safedist import Kubeflow, SafeHorovod, SafeTorch
from flytekitplugins_safedist.errors import RenderError
from tests.harness.product import (
    Cluster,
    Execution,
    build,
    canonical,
    main,
    notes_of,
    pods,
    read_platform,
    refusals,
    summarise,
    warning_of_image,
)
from tests.harness.product import template_of as template_to_show

PLATFORM = """
task_resources:
  defaults: {cpu: 500m, memory: 512Mi}
  limits: {cpu: "16", gpu: "1"}
plugins:
  k8s:
    default-tolerations: [{key: train, operator: Exists}]
"""
TASK_FILE = """
from flytekit import task, Resources
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nodes=2), requests=Resources(cpu="32", gpu="8"), pod_template_name="gpu-template")
def train(x: int) -> int:
    return x
"""
POD_TEMPLATE = """
apiVersion: v1
kind: PodTemplate
metadata: {name: gpu-template}
template:
  spec:
    containers: [{name: default, image: x, env: [{name: FROM, value: platform}]}]
"""


@pytest.fixture
def platform(tmp_path: Path) -> Path:
    path = tmp_path / "platform.yaml"
    path.write_text(PLATFORM)
    return path


def training(pod: dict[str, Any]) -> dict[str, Any]:
    return pod["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("1000m", "1"),
        ("0.5", "500m"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("512", "512"),
        ("1000", "1k"),
        (8.0, "8"),
        ("0", "0"),
        ("1e3", "1e3"),
        ("0.5Ki", "512"),
        ("100000000000", "100G"),
    ],
)
def test_quantities_are_written_as_the_api_server_writes_them(said: object, written: str) -> None:
    assert canonical(said) == written


def test_what_is_no_quantity_is_said() -> None:
    with pytest.raises(RenderError, match="not a Kubernetes quantity"):
        canonical("many")


def test_the_platforms_defaults_fill_and_its_limits_bound(platform: Path) -> None:
    cluster = read_platform(platform)
    built = build(template_of(make(SafeHorovod(nodes=2), **GPU8), FAST), cluster=cluster)

    (master, *_) = pods(built.manifest)

    limits = training(master)["resources"]["limits"]
    assert limits == {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "1"}
    assert master["spec"]["tolerations"][0] == {"key": "train", "operator": "Exists"}
    said = summarise(built.manifest, task="t", cluster=cluster, clamps=built.clamps, assumed=False)
    assert any("make nvidia.com/gpu=8 of Worker's container 'primary' 1" in one for one in said.warnings)
    assert dict(said.facts)["platform"] == (
        "cpu 500m, memory 512Mi for containers that ask for nothing; limits: cpu 16, nvidia.com/gpu 1"
    )


def test_gpus_in_a_role_are_bounded_too_and_that_is_said(platform: Path) -> None:
    task = make(SafeHorovod(nodes=2, cluster=Kubeflow(operator="mpi", worker=MPI.Worker(requests=Resources(gpu="4")))))

    built = build(template_of(task, FAST), cluster=read_platform(platform))

    assert ("Worker", "nvidia.com/gpu", "4", "1") in [(role, c.name, c.asked, c.got) for role, c in built.clamps]


def test_a_setting_that_flyte_does_not_know_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text("plugins: {k8s: {default_tolerations: []}}")

    with pytest.raises(RenderError, match="default_tolerations"):
        read_platform(file)


def test_a_pod_template_that_nobody_has_shown_is_named_and_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "named_template.py"
    file.write_text(TASK_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["render", str(file), "train", "--check", "--image", "registry.example/train:1"]

    assert main(command) == 1
    assert "PodTemplate 'gpu-template', on which the backend lays these pods, is not known" in capsys.readouterr().err

    shown = tmp_path / "template.yaml"
    shown.write_text(POD_TEMPLATE)
    assert main([*command, "--pod-template", str(shown)]) == 0
    assert "value: platform" in capsys.readouterr().out


def test_looking_builds_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(ImageSpecBuilder):
        def build_image(self, image_spec: ImageSpec) -> str | None:
            raise AssertionError("an image is built")

        def should_build(self, image_spec: ImageSpec) -> bool:
            raise AssertionError("a registry is asked")

    monkeypatch.setitem(ImageBuildEngine._REGISTRY, "fails", (Fails(), 5))
    image = ImageSpec(name="train", registry="registry.example", builder="fails")
    task = make(SafeTorch(nodes=2), container_image=image)

    (master, *_) = pods(build(template_to_show(task)).manifest)

    assert training(master)["image"] == image.image_name()


DEFAULTS = [
    DefaultImages.default_image(),
    "cr.flyte.org/flyteorg/flytekit:py3.12-latest",
    "ghcr.io/flyteorg/flytekit:py3.11-1.16.31",
]
NO_COMMAND = "no safedist-execute, the command of every pod"


def of_image(image: str) -> Any:
    name, _, tag = image.rpartition(":")
    return replace(FAST, image_config=ImageConfig(default_image=Image(name="default", fqn=name, tag=tag)))


@pytest.mark.parametrize("image", DEFAULTS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_flytekits_default_image_is_warned_of_when_it_is_shown_and_registered(
    image: str, nodes: int, warnings: list[str]
) -> None:
    task = make(SafeTorch(nodes=nodes))

    notes = notes_of(task, template_of(task, of_image(image)), Cluster())

    assert [NO_COMMAND in note and image in note for note in notes] == [True]
    assert [one for one in warnings if NO_COMMAND in one] == [f"{task.name}: {notes[0]}"]


@pytest.mark.parametrize("image", ["registry.example/train:1", "registry.example/my-flyteorg/flytekit-train:1"])
def test_an_image_of_ones_own_is_not_warned_of(image: str, warnings: list[str]) -> None:
    task = make(SafeTorch())

    assert notes_of(task, template_of(task, of_image(image)), Cluster()) == []
    assert warnings == []


def test_no_image_at_all_is_warned_of() -> None:
    assert NO_COMMAND in str(warning_of_image(None, None))
    assert NO_COMMAND in str(warning_of_image("flyteorg/flytekit", None))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of by flytekit's log."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("flytekit"), "warning", lambda text, *more: said.append(text % more))
    return said


def test_check_finds_an_image_that_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "checked_image.py"
    file.write_text(TASK_FILE.replace(', pod_template_name="gpu-template"', ""))

    assert main(["render", str(file), "train", "--check"]) == 1
    assert NO_COMMAND in capsys.readouterr().err
    assert main(["render", str(file), "train", "--check", "--image", "registry.example/train:1"]) == 0


def test_roles_that_all_have_an_image_need_none_of_the_task() -> None:
    own = {"master": kf.Master(image="m:1"), "worker": kf.Worker(image="w:1")}
    for roles, warned in ((own, False), ({"master": own["master"]}, True)):
        task = make(SafeTorch(nodes=2, cluster=Kubeflow(**roles)))
        notes = notes_of(task, template_of(task, of_image(DEFAULTS[0])), Cluster())
        assert any(NO_COMMAND in note for note in notes) == warned


EXTENDED = {"vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5Gi", "nvidia.com/mig-1g.5gb": "1", "intel.com/gpu": "1"}


@pytest.mark.parametrize("nodes", [1, 2, "2:3"])
@pytest.mark.parametrize(
    "asked",
    [
        {"requests": Resources(cpu="2", mem="8Gi"), "limits": Resources(cpu="2", mem="8Gi")},
        {"resources": Resources(cpu="2", mem="8Gi", ephemeral_storage="20Gi")},
        {},
    ],
)
def test_what_a_template_asks_for_and_the_task_does_not_name_reaches_every_pod(asked: Any, nodes: Any) -> None:
    """As the backend makes pods of it, with a role's own resources and with a call's over them."""
    resources = V1ResourceRequirements(limits={**EXTENDED, "cpu": "64"}, requests={**EXTENDED, "cpu": "64"})
    template = PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", resources=resources)]))
    roles = {} if nodes == 1 else {"worker": kf.Worker(requests=Resources(mem="4Gi"))}
    task = make(SafeTorch(nodes=nodes, nproc_per_node=1, cluster=Kubeflow(**roles)), pod_template=template, **asked)
    of_call = {"requests": [{"name": "CPU", "value": "1"}], "limits": [{"name": "CPU", "value": "1"}]}

    for node in (None, {"taskNode": {"overrides": {"resources": of_call}}}):
        built = build(template_of(task, FAST), Execution(node=node)).manifest
        for pod in [built] if nodes == 1 else pods(built):
            found = training(pod)["resources"]
            assert EXTENDED.items() <= found["limits"].items()
            assert EXTENDED.items() <= found["requests"].items()
            if node is None and asked:
                assert found["limits"]["cpu"] == "2", "what the task names is the task's"


POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p"},
    "spec": {"containers": [{"name": "main", "image": "i"}]},
}


@pytest.mark.parametrize(
    ("container", "finding"),
    [
        ({"ports": [{"containerPort": 70000}]}, "70000 is not a port"),
        ({"ports": [{"containerPort": 1, "name": "a-name-that-is-long"}]}, "15 characters at most"),
        ({"ports": [{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}]}, "'a' is there 2 times"),
        ({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}, "less than or equal to the limit '1'"),
        ({"resources": {"requests": {"nvidia.com/gpu": "1"}}}, "must be equal to the limit None"),
        ({"resources": {"limits": {"nvidia.com/gpu": "500m"}}}, "must be a whole number"),
        ({"volumeMounts": [{"name": "v", "mountPath": "/a"}] * 2}, "'/a' is there 2 times"),
        ({"volumeMounts": [{"name": "w", "mountPath": "/a"}]}, "there is no volume 'w'"),
        ({"env": [{"name": "1A", "value": "x"}]}, "'1A' is not a name of a variable"),
        ({"image": ""}, ".image: is required"),
        ({"name": "Main"}, "'Main' must be lower-case"),
        ({"restartPolicy": "Always"}, "may only be Always, in an init container"),
    ],
)
def test_what_an_api_server_refuses_is_found(container: dict[str, Any], finding: str) -> None:
    spec = {"containers": [{**POD["spec"]["containers"][0], **container}], "volumes": [{"name": "v", "emptyDir": {}}]}

    assert any(finding in one for one in refusals({**POD, "spec": spec}))
    assert refusals(POD) == []


@pytest.mark.parametrize("in_template", [False, True])
@pytest.mark.parametrize("operator", ["pytorch", "mpi"])
def test_a_variable_that_platform_and_task_name_is_refused_in_a_job(
    tmp_path: Path, operator: Any, in_template: bool
) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text("plugins: {k8s: {default-env-vars: {AWS_REGION: a, OTHER: b}}}")
    env = [V1EnvVar(name="AWS_REGION", value="c")]
    template = PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", env=env)]))
    own: Any = {"pod_template": template} if in_template else {"environment": {"AWS_REGION": "c"}}

    def found(task: Any) -> list[str]:
        return refusals(build(template_of(task, FAST), cluster=read_platform(file)).manifest)

    findings = found(make(SafeHorovod(nodes=2, cluster=Kubeflow(operator=operator)), **own))
    assert findings
    for finding in findings:
        assert "ReplicaSpecs[" in finding
        assert "Duplicate value: 'AWS_REGION' is there 2 times" in finding
    assert found(make(SafeHorovod(nodes=2, cluster=Kubeflow(operator=operator)))) == []
    assert found(make(SafeTorch(nodes=1), **own)) == [], "a pod may name one twice: the last counts"
