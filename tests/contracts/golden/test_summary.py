"""What ``safedist render`` says above a job, and registration in the log: how much of what, and what it gives up."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from flytekit import ImageSpec, Resources
from flytekit.configuration import Image, ImageConfig
from flytekit.configuration.default_images import DefaultImages
from flytekit.core.pod_template import PodTemplate
from flytekit.extras.accelerators import A100
from flytekit.image_spec.image_spec import ImageBuildEngine, ImageSpecBuilder
from flytekitplugins import kfpytorch as kf
from golden_cases import CASES, FAST, GPU8, make, sidecar_template, template_of
from kubernetes.client import (
    V1Container,
    V1ContainerPort,
    V1PodSecurityContext,
    V1PodSpec,
    V1Probe,
    V1ResourceRequirements,
    V1TCPSocketAction,
)

from flytekitplugins_safedist import Profile, SafeHorovod, SafeTorch, Scratch
from tests.harness.flyte import called, pods
from tests.harness.product import job_manifest, summary
from tests.harness.product import template_of as template_to_show


def facts_of(task: Any) -> dict[str, str]:
    lines = [
        line[2:].split("  ", 1) for line in summary(task, template_of(task, FAST)) if not line.startswith("# WARN")
    ]
    return {name: text.strip() for name, text in lines}


def test_the_summary_counts_what_the_job_takes() -> None:
    task = make(SafeHorovod(nnodes=4, max_restarts=3), **GPU8)

    assert facts_of(task) == {
        "task": "golden_cases.train",
        "job": "a PyTorchJob: 1 master, 3 worker",
        "nodes": "4",
        "ranks": "32 (8 per node, horovod)",
        "GPUs": "32 in total",
        "images": "registry.example/train:1",
        "restarts": "3 of all ranks together in each attempt, 0 retries of the attempt by Flyte",
        "platform": "Flyte's own defaults; what yours adds or bounds is not shown",
    }


def test_the_summary_of_a_range_has_a_range_of_ranks() -> None:
    assert facts_of(make(SafeHorovod(nnodes="2:4", nproc_per_node=2)))["ranks"] == "4 to 8 (2 per node, horovod)"


def test_per_role_images_are_all_named() -> None:
    images = facts_of(CASES["per-role-images"][0]())["images"]

    assert images == "registry.example/master:1 (master), registry.example/train:worker (worker)"


def test_a_pod_template_of_the_cluster_is_named() -> None:
    platform = facts_of(make(SafeTorch(), pod_template_name="gpu-template"))["platform"]

    assert platform.endswith("nor its PodTemplate 'gpu-template', on which these pods lie")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of by flytekit's log."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("flytekit"), "warning", lambda text, *more: said.append(text % more))
    return said


def a_template(**spec: Any) -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[], **spec))


def with_image(image: str | None) -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", image=image)]))


def with_probe(*, stays: bool = False) -> PodTemplate:
    probe = V1Probe(tcp_socket=V1TCPSocketAction(port=5432))
    policy = {"restart_policy": "Always"} if stays else {}
    own = [V1Container(name="proxy", readiness_probe=probe, image="proxy:1", **policy)]
    containers = {"containers": [], "init_containers": own} if stays else {"containers": own}
    return PodTemplate(pod_spec=V1PodSpec(**containers))


def as_user(number: int | None) -> PodTemplate:
    return a_template(security_context=V1PodSecurityContext(run_as_non_root=True, run_as_user=number))


def with_policy(policy: str) -> SafeHorovod:
    return SafeHorovod(nnodes=2, master=kf.Master(restart_policy=kf.RestartPolicy[policy]))


WARNED = {
    "a profile": (
        lambda: make(SafeHorovod(profile=Profile(steps=(10, 12)))),
        "profile is seen on the task's deck alone: set enable_deck=True of @task",
    ),
    "scratch above the pod's limit": (
        lambda: make(
            SafeHorovod(nnodes=2, scratch=Scratch(size_limit="20Gi")),
            requests=Resources(ephemeral_storage="10Gi"),
        ),
        "scratch.size_limit=20Gi is above requests.ephemeral_storage=10Gi, at which the kubelet evicts the pod",
    ),
    "idle GPUs": (
        lambda: make(SafeHorovod(nnodes=2, nproc_per_node=4), **GPU8),
        "8 GPUs per master, but 4 ranks: 4 GPUs",
    ),
    "slices": (
        lambda: make(SafeHorovod(nproc_per_node=2), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="2")),
        "NCCL joins no two slices of one GPU",
    ),
    "sidecars": (lambda: make(SafeHorovod(), pod_template=sidecar_template()), "metrics must end by themselves"),
    "a short grace period": (
        lambda: make(SafeHorovod(), pod_template=a_template(termination_grace_period_seconds=45)),
        "terminationGracePeriodSeconds=45 is less than the 60 s",
    ),
    "pods that stay away": (
        lambda: make(with_policy("NEVER")),
        "master.restart_policy is NEVER: when that pod is lost",
    ),
    "pods without end": (lambda: make(with_policy("ALWAYS")), "the operator never sees it succeed"),
    "two images": (
        lambda: make(SafeHorovod(), container_image="mine:1", pod_template=with_image("the-platforms:1")),
        "container_image= of @task is not used: the pod template's primary container names an image, which wins",
    ),
    "host network": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=a_template(host_network=True)),
        "Kubernetes puts no two pods with one port, 23456, on one machine",
    ),
    "a deadline": (
        lambda: make(SafeHorovod(nnodes=2, run_policy=kf.RunPolicy(active_deadline_seconds=3600))),
        "run_policy.active_deadline_seconds ends no job that runs undisturbed",
    ),
    "names of the machine": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=a_template(dns_policy="Default")),
        "dnsPolicy=Default looks names up on the machine, which does not know node 0's",
    ),
    "names of the machine, by its network": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=a_template(dns_policy="ClusterFirst", host_network=True)),
        "or use ClusterFirstWithHostNet",
    ),
    "a probe": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=with_probe()),
        "before the readiness probe of proxy has passed",
    ),
    "a probe of what stays": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=with_probe(stays=True)),
        "before the readiness probe of proxy has passed",
    ),
    "no root, and nobody else": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=as_user(None)),
        "runAsNonRoot without runAsUser keeps workers from starting",
    ),
    "queue": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=sidecar_template()),
        "kueue.x-k8s.io/queue-name is put on the pods, not on the PyTorchJob",
    ),
}


def with_port() -> PodTemplate:
    primary = V1Container(name="primary", ports=[V1ContainerPort(name="pytorchjob-port", container_port=24567)])
    return PodTemplate(pod_spec=V1PodSpec(containers=[primary], host_network=True))


WITHIN = Resources(ephemeral_storage="10Gi")
FINE = {
    "a port of one's own": lambda: make(SafeHorovod(nnodes=2), pod_template=with_port()),
    "somebody who is not root": lambda: make(SafeHorovod(nnodes=2), pod_template=as_user(1000)),
    "no root, in a range": lambda: make(SafeHorovod(nnodes="1:2"), pod_template=as_user(None)),
    "no root, alone": lambda: make(SafeHorovod(), pod_template=as_user(None)),
    "names of the machine, alone": lambda: make(SafeHorovod(), pod_template=a_template(dns_policy="Default")),
    "names of the cluster": lambda: make(SafeHorovod(nnodes=2), pod_template=a_template(dns_policy="ClusterFirst")),
    "scratch as large as the pod's limit": lambda: make(
        SafeHorovod(nnodes=2, scratch=Scratch(size_limit="10Gi")), requests=WITHIN
    ),
    "an image": lambda: make(SafeHorovod(), container_image="mine:1"),
    "an image beside a template without": lambda: make(
        SafeHorovod(), container_image="mine:1", pod_template=with_image(None)
    ),
    "an image twice": lambda: make(SafeHorovod(), container_image="mine:1", pod_template=with_image("mine:1")),
}


def test_what_can_be_meant_is_not_warned_of() -> None:
    said = {}
    for case, make_task in FINE.items():
        task = make_task()
        said[case] = [line for line in summary(task, template_of(task, FAST)) if "WARN" in line]
    assert {case: lines for case, lines in said.items() if lines} == {}


@pytest.mark.parametrize("case", WARNED)
def test_what_people_may_not_have_meant_is_said_once_when_it_is_registered_and_when_it_is_shown(
    case: str, warnings: list[str]
) -> None:
    make_task, text = WARNED[case]
    task = make_task()
    template = template_of(task, FAST)

    assert [text in one for one in warnings].count(True) == 1
    assert [text in line for line in summary(task, template) if line.startswith("# WARNING")].count(True) == 1


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

    assert master["spec"]["containers"][0]["image"] == image.image_name()


DEFAULTS = [
    DefaultImages.default_image(),
    "cr.flyte.org/flyteorg/flytekit:py3.12-latest",
    "harbor.corp/proxy-cache/flyteorg/flytekit:py3.11-1.16.31",
]
NO_COMMAND = "It does not contain safedist-execute, so the pods cannot start"


def of_image(image: str) -> Any:
    name, _, tag = image.rpartition(":")
    return replace(FAST, image_config=ImageConfig(default_image=Image(name="default", fqn=name, tag=tag)))


OWN = {"master": kf.Master(image="m:1"), "worker": kf.Worker(image="w:1")}
IMAGES = [
    *((SafeTorch(nnodes=nodes), image, 1) for image in DEFAULTS for nodes in (1, 2)),
    (SafeTorch(nnodes=2, master=OWN["master"]), DEFAULTS[0], 1),
    (SafeTorch(nnodes=2, **OWN), DEFAULTS[0], 0),
    (SafeTorch(), "registry.example/train:1", 0),
    (SafeTorch(), "registry.example/my-flyteorg/flytekit-train:1", 0),
]


def test_flytekits_default_image_is_warned_of_unless_it_is_nobodys(warnings: list[str]) -> None:
    for config, image, count in IMAGES:
        warnings.clear()
        template_of(make(config), of_image(image))
        assert len(warnings) == count, (config, image)
        assert all(NO_COMMAND in one and image in one for one in warnings)


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
        built = called(template_of(task, FAST), node)
        for pod in [built] if nodes == 1 else pods(built):
            found = pod["spec"]["containers"][0]["resources"]
            assert EXTENDED.items() <= found["limits"].items()
            assert EXTENDED.items() <= found["requests"].items()
            if node is None and asked:
                assert found["limits"]["cpu"] == "2", "what the task names is the task's"


def test_an_init_container_of_a_client_that_knows_no_sidecars_among_them_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kubernetes before 28."""
    template = PodTemplate(pod_spec=V1PodSpec(containers=[], init_containers=[V1Container(name="waits", image="w:1")]))
    monkeypatch.delattr(V1Container, "restart_policy")
    monkeypatch.delitem(V1Container.openapi_types, "restart_policy")
    task = make(SafeTorch(nnodes=2), pod_template=template)
    assert not [line for line in summary(task, template_of(task, FAST)) if "readiness" in line]
