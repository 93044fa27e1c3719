"""What one should know of a task before it is registered: its images, its PodTemplate, what a template asks for."""

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
from golden_cases import FAST, make, template_of
from kubernetes.client import V1Container, V1PodSpec, V1ResourceRequirements

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.errors import RenderError
from tests.harness.product import (
    Execution,
    canonical,
    job_manifest,
    main,
    notes_of,
    pods,
    warning_of_image,
)
from tests.harness.product import template_of as template_to_show

TASK_FILE = """
from flytekit import task, Resources
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nnodes=2), requests=Resources(cpu="32", gpu="8"), pod_template_name="gpu-template")
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


def test_a_pod_template_that_nobody_has_shown_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "named_template.py"
    file.write_text(TASK_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["render", str(file), "train", "--image", "registry.example/train:1"]

    assert main(command) == 0
    assert "PodTemplate 'gpu-template', on which the backend lays these pods, is not known" in capsys.readouterr().out

    shown = tmp_path / "template.yaml"
    shown.write_text(POD_TEMPLATE)
    assert main([*command, "--pod-template", str(shown)]) == 0
    out = capsys.readouterr().out
    assert "value: platform" in out
    assert "is not known" not in out


def test_looking_builds_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(ImageSpecBuilder):
        def build_image(self, image_spec: ImageSpec) -> str | None:
            raise AssertionError("an image is built")

        def should_build(self, image_spec: ImageSpec) -> bool:
            raise AssertionError("a registry is asked")

    monkeypatch.setitem(ImageBuildEngine._REGISTRY, "fails", (Fails(), 5))
    image = ImageSpec(name="train", registry="registry.example", builder="fails")
    task = make(SafeTorch(nnodes=2), container_image=image)

    (master, *_) = pods(job_manifest(template_to_show(task)))

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
    task = make(SafeTorch(nnodes=nodes))

    notes = notes_of(task, template_of(task, of_image(image)), None)

    assert [NO_COMMAND in note and image in note for note in notes] == [True]
    assert [one for one in warnings if NO_COMMAND in one] == [f"{task.name}: {notes[0]}"]


@pytest.mark.parametrize("image", ["registry.example/train:1", "registry.example/my-flyteorg/flytekit-train:1"])
def test_an_image_of_ones_own_is_not_warned_of(image: str, warnings: list[str]) -> None:
    task = make(SafeTorch())

    assert notes_of(task, template_of(task, of_image(image)), None) == []
    assert warnings == []


def test_no_image_at_all_is_warned_of() -> None:
    assert NO_COMMAND in str(warning_of_image(None, ()))
    assert NO_COMMAND in str(warning_of_image("flyteorg/flytekit", ()))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of by flytekit's log."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("flytekit"), "warning", lambda text, *more: said.append(text % more))
    return said


def test_an_image_that_cannot_work_is_said_above_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shown_image.py"
    file.write_text(TASK_FILE.replace(', pod_template_name="gpu-template"', ""))

    assert main(["render", str(file), "train"]) == 0
    assert NO_COMMAND in capsys.readouterr().out
    assert main(["render", str(file), "train", "--image", "registry.example/train:1"]) == 0
    assert NO_COMMAND not in capsys.readouterr().out


def test_roles_that_all_have_an_image_need_none_of_the_task() -> None:
    own = {"master": kf.Master(image="m:1"), "worker": kf.Worker(image="w:1")}
    for roles, warned in ((own, False), ({"master": own["master"]}, True)):
        task = make(SafeTorch(nnodes=2, **roles))
        notes = notes_of(task, template_of(task, of_image(DEFAULTS[0])), None)
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
    task = make(SafeTorch(nnodes=nodes, nproc_per_node=1, **roles), pod_template=template, **asked)
    of_call = {"requests": [{"name": "CPU", "value": "1"}], "limits": [{"name": "CPU", "value": "1"}]}

    for node in (None, {"taskNode": {"overrides": {"resources": of_call}}}):
        built = job_manifest(template_of(task, FAST), Execution(node=node))
        for pod in [built] if nodes == 1 else pods(built):
            found = training(pod)["resources"]
            assert EXTENDED.items() <= found["limits"].items()
            assert EXTENDED.items() <= found["requests"].items()
            if node is None and asked:
                assert found["limits"]["cpu"] == "2", "what the task names is the task's"
