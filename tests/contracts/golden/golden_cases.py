"""The table of configurations whose specs are kept as files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from flytekit import Resources
from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
from flytekit.core.pod_template import PodTemplate
from flytekit.extras.accelerators import A100
from flytekit.tools.translator import get_serializable
from flytekitplugins import kfpytorch as PT
from kubernetes.client import (
    V1Container,
    V1EmptyDirVolumeSource,
    V1EnvVar,
    V1PodSpec,
    V1ResourceRequirements,
    V1Toleration,
    V1Volume,
    V1VolumeMount,
)

from flytekitplugins_safedist import SafeHorovod, Scratch
from tests.harness.product import SafeTask


def train(epochs: int, lr: float = 0.1) -> float:
    """The function of every task here; it never runs."""
    return lr / epochs


def make(config: Any, **kwargs: Any) -> SafeTask:
    task = SafeTask(config, train, **kwargs)
    # flytekit names the module from whose frames a task was made, up to the test runner's own; as far as that lies in
    # the working directory (a venv there), it would become part of the task's name.
    task._instantiated_in = None
    return task


def template_of(task: Any, settings: SerializationSettings) -> Any:
    """The ``TaskTemplate`` message that registration sends for *task*."""
    return get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()


IMAGES = ImageConfig(default_image=Image(name="default", fqn="registry.example/train", tag="1"))
BAKED = SerializationSettings(
    image_config=IMAGES, project="flytesnacks", domain="development", version="v1", env={"TEAM": "vision"}
)
FAST = SerializationSettings(
    image_config=IMAGES,
    project="flytesnacks",
    domain="development",
    version="v1",
    fast_serialization_settings=FastSerializationSettings(
        enabled=True, destination_dir="/root", distribution_location="s3://bucket/fast1234.tar.gz"
    ),
)
PACKAGED = SerializationSettings(
    image_config=IMAGES,
    project="flytesnacks",
    domain="development",
    version="v1",
    fast_serialization_settings=FastSerializationSettings(enabled=True),
)


def sidecar_template() -> PodTemplate:
    """What a platform team might hand out: a sidecar, placement, a queue."""
    return PodTemplate(
        primary_container_name="trainer",
        labels={"kueue.x-k8s.io/queue-name": "gpu-queue"},
        annotations={"scheduling.volcano.sh/queue-name": "research", "sidecar.istio.io/inject": "false"},
        pod_spec=V1PodSpec(
            containers=[
                V1Container(name="metrics", image="registry.example/metrics:2", args=["--port", "9100"]),
                V1Container(
                    name="trainer",
                    env=[V1EnvVar(name="NCCL_DEBUG", value="INFO")],
                    volume_mounts=[V1VolumeMount(name="data", mount_path="/data")],
                ),
            ],
            init_containers=[V1Container(name="warm", image="registry.example/warm:1", command=["true"])],
            node_selector={"pool": "a100"},
            tolerations=[V1Toleration(key="gpu", operator="Exists", effect="NoSchedule")],
            scheduler_name="volcano",
            volumes=[V1Volume(name="data", empty_dir=V1EmptyDirVolumeSource())],
        ),
    )


def own_shm_template() -> PodTemplate:
    return PodTemplate(
        pod_spec=V1PodSpec(
            containers=[V1Container(name="primary", volume_mounts=[V1VolumeMount(name="shm", mount_path="/dev/shm")])],
            volumes=[V1Volume(name="shm", empty_dir=V1EmptyDirVolumeSource(medium="Memory", size_limit="8Gi"))],
        )
    )


def gpu_template() -> PodTemplate:
    resources = V1ResourceRequirements(limits={"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"})
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", resources=resources)]))


GPU8 = {"requests": Resources(cpu="32", mem="200Gi", gpu="8"), "limits": Resources(cpu="48", mem="200Gi", gpu="8")}
ALL_POLICIES = PT.RunPolicy(
    clean_pod_policy=PT.CleanPodPolicy.ALL,
    ttl_seconds_after_finished=600,
    active_deadline_seconds=86400,
    backoff_limit=3,
)

Case = tuple[Callable[[], Any], SerializationSettings]
CASES: dict[str, Case] = {
    "one-node-cpu": (lambda: make(SafeHorovod()), BAKED),
    "one-node-8-gpu": (lambda: make(SafeHorovod(), **GPU8), FAST),
    "one-node-packaged": (lambda: make(SafeHorovod(nproc_per_node=2)), PACKAGED),
    "one-node-resources-pair": (lambda: make(SafeHorovod(), resources=Resources(cpu=("4", "8"), gpu="2")), BAKED),
    "one-node-retries-accelerator": (
        lambda: make(SafeHorovod(), accelerator=A100, limits=Resources(gpu="4", cpu="8", mem="32Gi")),
        FAST,
    ),
    "one-node-mig-slice": (
        lambda: make(SafeHorovod(), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="1")),
        FAST,
    ),
    "two-nodes-cpu": (lambda: make(SafeHorovod(nnodes=2, nproc_per_node=2)), BAKED),
    "two-nodes-fast": (lambda: make(SafeHorovod(nnodes=2, nproc_per_node=2)), FAST),
    "four-nodes-8-gpu": (lambda: make(SafeHorovod(nnodes=4), **GPU8), FAST),
    "fewer-ranks-than-gpus": (lambda: make(SafeHorovod(nnodes=2, nproc_per_node=4), **GPU8), FAST),
    "per-role-images": (
        lambda: make(
            SafeHorovod(
                nnodes=2,
                nproc_per_node=1,
                master=PT.Master(image="registry.example/master:1"),
                worker=PT.Worker(image="{{.image.default.fqn}}:worker"),
            )
        ),
        FAST,
    ),
    "per-role-resources": (
        lambda: make(
            SafeHorovod(
                nnodes=3,
                master=PT.Master(requests=Resources(mem="400Gi"), limits=Resources(mem="400Gi")),
                worker=PT.Worker(replicas=2),
            ),
            **GPU8,
        ),
        FAST,
    ),
    "per-role-gpus": (
        lambda: make(
            SafeHorovod(
                nnodes=2,
                master=PT.Master(requests=Resources(cpu="8", gpu="4")),
                worker=PT.Worker(requests=Resources(cpu="8", gpu="4")),
            )
        ),
        FAST,
    ),
    "restart-always": (
        lambda: make(
            SafeHorovod(
                nnodes=2,
                nproc_per_node=2,
                master=PT.Master(restart_policy=PT.RestartPolicy.ALWAYS),
                worker=PT.Worker(restart_policy=PT.RestartPolicy.NEVER),
            )
        ),
        FAST,
    ),
    "every-policy": (
        lambda: make(SafeHorovod(nnodes=2, nproc_per_node=2, run_policy=ALL_POLICIES)),
        FAST,
    ),
    "elastic": (lambda: make(SafeHorovod(nnodes="2:4", max_restarts=3), **GPU8), FAST),
    "elastic-cpu-policies": (
        lambda: make(
            SafeHorovod(
                nnodes="1:3",
                nproc_per_node=2,
                run_policy=ALL_POLICIES,
                worker=PT.Worker(replicas=3, restart_policy=PT.RestartPolicy.FAILURE),
            )
        ),
        BAKED,
    ),
    "sidecars-one-node": (lambda: make(SafeHorovod(nproc_per_node=2), pod_template=sidecar_template()), FAST),
    "sidecars-two-nodes": (
        lambda: make(SafeHorovod(nnodes=2, nproc_per_node=2), pod_template=sidecar_template()),
        FAST,
    ),
    "template-gpus": (lambda: make(SafeHorovod(nnodes=2), pod_template=gpu_template()), FAST),
    "template-brings-shm": (lambda: make(SafeHorovod(nproc_per_node=2), pod_template=own_shm_template()), FAST),
    "task-asks-for-shm": (lambda: make(SafeHorovod(nnodes=2, nproc_per_node=2), shared_memory="16Gi"), FAST),
    "shm-limited": (lambda: make(SafeHorovod(nproc_per_node=2), shared_memory="4Gi"), BAKED),
    "no-volumes": (lambda: make(SafeHorovod(scratch=Scratch(volume=None)), shared_memory=False), BAKED),
    "scratch-in-memory": (
        lambda: make(SafeHorovod(nproc_per_node=2, scratch=Scratch(volume="memory", size_limit="8Gi"))),
        BAKED,
    ),
    "scratch-claim": (
        lambda: make(SafeHorovod(nnodes=2, nproc_per_node=2, scratch=Scratch(claim="team-scratch"))),
        BAKED,
    ),
    "scratch-elsewhere": (lambda: make(SafeHorovod(scratch=Scratch(path="/data/scratch"))), BAKED),
    "ranks-spawned": (lambda: make(SafeHorovod(nproc_per_node=2, start_method="spawn")), BAKED),
    "environment": (lambda: make(SafeHorovod(nproc_per_node=2), environment={"LR": "0.1"}), BAKED),
}
