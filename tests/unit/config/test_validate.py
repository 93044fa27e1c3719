"""Every job that cannot work is refused when the decorator runs, with field, value and repair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flytekit import Resources, task
from flytekit.core.pod_template import PodTemplate
from flytekit.extras.accelerators import A100, T4, V5E
from flytekitplugins import kfmpi
from flytekitplugins import kfpytorch as kf
from kubernetes.client import V1Container, V1EnvVar, V1PodSpec, V1ResourceRequirements, V1Volume, V1VolumeMount

from flytekitplugins_safedist import Kubeflow, SafeHorovod, SafeTorch, ScratchVolume
from flytekitplugins_safedist.errors import ConfigError


def train(x: int) -> int:
    return x


def declare(config: Any, **kwargs: Any) -> Any:
    return task(task_config=config, **kwargs)(train)


def template(**container: Any) -> PodTemplate:
    volumes = [V1Volume(name="v")]
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", **container)], volumes=volumes))


def with_containers(*names: str, **spec: Any) -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name=name, image="i:1") for name in names], **spec))


def gpus(value: str) -> V1ResourceRequirements:
    return V1ResourceRequirements(limits={"nvidia.com/gpu": value})


def run_policy(**kwargs: Any) -> Callable[[], Any]:
    return lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(run_policy=kf.RunPolicy(**kwargs))))


def mount(path: str) -> list[V1VolumeMount]:
    return [V1VolumeMount(name="v", mount_path=path)]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cluster as text": (
        lambda: declare(SafeTorch(nodes=2, cluster="mpi")),  # type: ignore[arg-type]
        "cluster='mpi' is not a Kubeflow (use Kubeflow(operator=..., worker=..., ...))",
    ),
    "unknown operator": (
        lambda: declare(SafeTorch(cluster=Kubeflow(operator="slurm"))),
        "cluster.operator='slurm' is not an operator that Flyte has a plugin for (use 'pytorch' or 'mpi')",
    ),
    "elastic mpi": (
        lambda: declare(SafeTorch(nodes="2:4", cluster=Kubeflow(operator="mpi"))),
        "nodes='2:4' is a range, which an MPIJob cannot have",
    ),
    "one-node job of two": (
        lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(one_node_job=True))),
        "cluster.one_node_job=True has no meaning with 2 nodes (drop it, or use nodes=1)",
    ),
    "role of a pod": (
        lambda: declare(SafeTorch(cluster=Kubeflow(master=kf.Master()))),
        "cluster.master='set' has no effect: this 1-node pytorch job has no roles: it is an ordinary pod (drop master)",
    ),
    "launcher of a PyTorchJob": (
        lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(launcher=kfmpi.Launcher()))),
        "cluster.launcher='set' has no effect: this 2-node pytorch job has master and worker "
        "(drop launcher or use master)",
    ),
    "master of an MPIJob": (
        lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(operator="mpi", master=kf.Master()))),
        "cluster.master='set' has no effect: this 2-node mpi job has launcher and worker",
    ),
    "master of an elastic job": (
        lambda: declare(SafeTorch(nodes="2:3", cluster=Kubeflow(master=kf.Master()))),
        "cluster.master='set' has no effect: this elastic pytorch job has worker (drop master or use worker)",
    ),
    "role of another class": (
        lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(worker={"image": "x"}))),
        "cluster.worker={'image': 'x'} is not a Worker (import Worker from kfpytorch or kfmpi)",
    ),
    "replicas against nodes": (
        lambda: declare(SafeTorch(nodes=4, cluster=Kubeflow(worker=kf.Worker(replicas=4)))),
        "cluster.worker.replicas=4 contradicts nodes, which makes 3 (leave replicas out; nodes decides)",
    ),
    "two launchers": (
        lambda: declare(SafeTorch(nodes=4, cluster=Kubeflow(operator="mpi", launcher=kfmpi.Launcher(replicas=2)))),
        "cluster.launcher.replicas=2 contradicts nodes, which makes 1",
    ),
    "command of a role": (
        lambda: declare(
            SafeTorch(nodes=4, cluster=Kubeflow(operator="mpi", worker=kfmpi.Worker(command=["/usr/sbin/sshd", "-De"])))
        ),
        "cluster.worker.command=['/usr/sbin/sshd', '-De'] would replace the command that stages the code",
    ),
    "restart policy as text": (
        lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(worker=kf.Worker(restart_policy="OnFailure")))),
        "cluster.worker.restart_policy='OnFailure' is not a RestartPolicy",
    ),
    "run policy as dict": (
        lambda: declare(SafeTorch(nodes=2, cluster=Kubeflow(run_policy={}))),
        "cluster.run_policy={} is not a RunPolicy",
    ),
    "run policy of a pod": (
        lambda: declare(SafeTorch(cluster=Kubeflow(run_policy=kf.RunPolicy()))),
        "cluster.run_policy='set' has no effect: nodes=1 is an ordinary pod, not a job",
    ),
    "clean pod policy as text": (run_policy(clean_pod_policy="All"), "clean_pod_policy='All' is not a CleanPodPolicy"),
    "no backoff": (run_policy(backoff_limit=0), "cluster.run_policy.backoff_limit=0 must be a whole number, 1 or more"),
    "no deadline": (run_policy(active_deadline_seconds=0), "cluster.run_policy.active_deadline_seconds=0 must be"),
    "negative ttl": (
        run_policy(ttl_seconds_after_finished=-1),
        "cluster.run_policy.ttl_seconds_after_finished=-1 must be",
    ),
    "shm as number": (
        lambda: declare(SafeTorch(cluster=Kubeflow(shared_memory=64))),
        "cluster.shared_memory=64 is not True, False or a quantity",
    ),
    "shm nonsense": (
        lambda: declare(SafeTorch(cluster=Kubeflow(shared_memory="a lot"))),
        "cluster.shared_memory='a lot' is not True, False",
    ),
    "shm twice": (
        lambda: declare(SafeTorch(cluster=Kubeflow(shared_memory="1Gi")), shared_memory="2Gi"),
        "cluster.shared_memory='1Gi' and @task(shared_memory='2Gi') both size /dev/shm (keep one of them)",
    ),
    "shm mounted twice": (
        lambda: declare(SafeTorch(), shared_memory=True, pod_template=template(volume_mounts=mount("/dev/shm/"))),
        "@task shared_memory=True and the pod template both mount /dev/shm, which the backend refuses",
    ),
    "scratch medium": (
        lambda: declare(SafeTorch(cluster=Kubeflow(scratch_volume=ScratchVolume(medium="tape")))),
        "cluster.scratch_volume.medium='tape' is unknown (use 'disk' or 'memory')",
    ),
    "scratch size": (
        lambda: declare(SafeTorch(cluster=Kubeflow(scratch_volume=ScratchVolume(size_limit="big")))),
        "cluster.scratch_volume.size_limit='big' is not a quantity",
    ),
    "sized claim": (
        lambda: declare(SafeTorch(cluster=Kubeflow(scratch_volume=ScratchVolume(claim="c", size_limit="1Gi")))),
        "cluster.scratch_volume.claim='c' brings its own medium and size",
    ),
    "scratch path": (
        lambda: declare(SafeTorch(cluster=Kubeflow(scratch_volume=ScratchVolume(mount_path="scratch")))),
        "cluster.scratch_volume.mount_path='scratch' is not an absolute path below /",
    ),
    "scratch over a mount": (
        lambda: declare(
            SafeTorch(cluster=Kubeflow(scratch_volume=ScratchVolume(mount_path="/data"))),
            pod_template=template(volume_mounts=mount("/data")),
        ),
        "cluster.scratch_volume.mount_path='/data' is where the pod template mounts something already",
    ),
    "identity in the environment": (
        lambda: declare(SafeTorch(nodes=2), environment={"RANK": "0"}),
        "@task environment='RANK' says who a node or rank is, which differs in each",
    ),
    "operator's variables": (
        lambda: declare(SafeTorch(nodes=2), environment={"PET_NNODES": "4"}),
        "@task environment='PET_NNODES' says who a node or rank is",
    ),
    "pinned in the environment": (
        lambda: declare(SafeTorch(nodes=2), environment={"SAFEDIST_NODES": "4"}),
        "@task environment='SAFEDIST_NODES' is decided by the task config (set nodes in the task config)",
    ),
    "identity in the template": (
        lambda: declare(SafeTorch(nodes=2), pod_template=template(env=[V1EnvVar(name="WORLD_SIZE", value="2")])),
        "pod_template env='WORLD_SIZE' says who a node or rank is",
    ),
    "sidecar with the operator's name": (
        lambda: declare(SafeTorch(nodes=2), pod_template=with_containers("primary", "pytorch")),
        "pod_template container='pytorch' is the name that the backend gives to the primary container 'primary'",
    ),
    "command in the template": (
        lambda: declare(SafeTorch(), pod_template=template(command=["sh"])),
        "pod_template command=['sh'] is replaced by the task's command (use an init container)",
    ),
    "volume of ours": (
        lambda: declare(
            SafeTorch(), pod_template=with_containers("primary", volumes=[V1Volume(name="safedist-scratch")])
        ),
        "pod_template volume='safedist-scratch' is the name of a volume that safedist adds",
    ),
    "ranks above requests": (
        lambda: declare(SafeTorch(nproc_per_node=8), requests=Resources(gpu="4")),
        "nproc_per_node=8 exceeds requests.gpu=4 (lower it to 4 or request 8 GPUs)",
    ),
    "ranks above limits": (
        lambda: declare(SafeTorch(nproc_per_node=8), limits=Resources(gpu="4")),
        "nproc_per_node=8 exceeds limits.gpu=4",
    ),
    "ranks above resources": (
        lambda: declare(SafeTorch(nproc_per_node=8), resources=Resources(gpu=4)),
        "nproc_per_node=8 exceeds resources.gpu=4",
    ),
    "ranks above the template": (
        lambda: declare(SafeTorch(nproc_per_node=8), pod_template=template(resources=gpus("4"))),
        "nproc_per_node=8 exceeds pod_template nvidia.com/gpu=4",
    ),
    "ranks above a role": (
        lambda: declare(
            SafeTorch(nodes=2, nproc_per_node=8, cluster=Kubeflow(worker=kf.Worker(limits=Resources(gpu="4")))),
            requests=Resources(gpu="8"),
        ),
        "nproc_per_node=8 exceeds cluster.worker.limits.gpu=4",
    ),
    "part of a GPU": (
        lambda: declare(SafeTorch(), requests=Resources(gpu="0.5")),
        "requests.gpu='0.5' is not a whole number of GPUs",
    ),
    "request against limit": (
        lambda: declare(SafeTorch(), requests=Resources(gpu="4"), limits=Resources(gpu="8")),
        "requests.gpu='4' differs from limits.gpu='8' (Kubernetes wants the same number in both; give one of them)",
    ),
    "pair against itself": (
        lambda: declare(SafeTorch(), resources=Resources(gpu=("4", "8"))),
        "resources.gpu[0]='4' differs from resources.gpu[1]='8'",
    ),
    "template's GPUs lost": (
        lambda: declare(SafeTorch(), requests=Resources(cpu="4"), pod_template=template(resources=gpus("4"))),
        "pod_template nvidia.com/gpu='4' is lost: the task's own resources replace those",
    ),
    "roles differ": (
        lambda: declare(
            SafeTorch(nodes=2, cluster=Kubeflow(worker=kf.Worker(requests=Resources(gpu="4")))),
            requests=Resources(gpu="8"),
        ),
        "nproc_per_node=None is not decided by requests.gpu=8 and cluster.worker.requests.gpu=4",
    ),
    "role without GPUs": (
        lambda: declare(
            SafeTorch(nodes=2, nproc_per_node=1, cluster=Kubeflow(master=kf.Master(requests=Resources(gpu="0")))),
            requests=Resources(gpu="8"),
        ),
        "cluster.master.requests.gpu='0' does not take away requests.gpu=8: the backend drops a count of zero",
    ),
    "launcher with the template's GPUs": (
        lambda: declare(
            SafeTorch(nodes=2, cluster=Kubeflow(operator="mpi")), pod_template=template(resources=gpus("4"))
        ),
        "pod_template nvidia.com/gpu='4' goes to the launcher too, which runs no ranks",
    ),
    "accelerator without a GPU": (
        lambda: declare(SafeTorch(), accelerator=T4),
        "accelerator='nvidia-tesla-t4' names a kind of GPU, but no GPU is requested",
    ),
    "not a GPU": (
        lambda: declare(SafeTorch(), accelerator=V5E, limits=Resources(gpu="1")),
        "is a TPU, which neither Horovod nor torch ranks here can use",
    ),
    "slices undecided": (
        lambda: declare(SafeTorch(), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="3")),
        "nproc_per_node=None cannot be derived from 3 slices: a process sees one MIG slice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_cannot_work_is_refused_with_its_reason(case: str) -> None:
    make, text = REFUSED[case]

    with pytest.raises(ConfigError) as caught:
        make()

    assert text in str(caught.value)
    assert len(caught.value.problems) == 1
    assert all(problem.repair for problem in caught.value.problems)


def test_problems_of_size_and_shape_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="4 problems") as caught:
        declare(
            SafeHorovod(
                nodes=2,
                nproc_per_node=8,
                max_restarts=-1,
                cluster=Kubeflow(shared_memory="x", worker=kf.Worker(replicas=3)),
            ),
            requests=Resources(gpu="4"),
        )

    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"nproc_per_node", "max_restarts", "cluster.shared_memory", "cluster.worker.replicas"}


def test_values_of_variables_stay_out_of_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        declare(SafeTorch(), environment={"MASTER_ADDR": "hunter2"})

    assert "hunter2" not in str(caught.value)


ACCEPTED: dict[str, tuple[Callable[[], Any], int]] = {
    "no GPUs": (lambda: declare(SafeTorch()), 1),
    "requests": (lambda: declare(SafeTorch(), requests=Resources(gpu="8")), 8),
    "limits": (lambda: declare(SafeTorch(), limits=Resources(gpu=4)), 4),
    "resources": (lambda: declare(SafeTorch(), resources=Resources(gpu=("2", "2"))), 2),
    "template": (lambda: declare(SafeTorch(), pod_template=template(resources=gpus("4"))), 4),
    "explicit": (lambda: declare(SafeTorch(nproc_per_node=2), requests=Resources(gpu="8")), 2),
    "roles": (
        lambda: declare(
            SafeTorch(
                nodes=2,
                cluster=Kubeflow(
                    master=kf.Master(requests=Resources(gpu="2")), worker=kf.Worker(requests=Resources(gpu="2"))
                ),
            )
        ),
        2,
    ),
    "worker of an elastic job": (
        lambda: declare(SafeTorch(nodes="1:2", cluster=Kubeflow(worker=kf.Worker(requests=Resources(gpu="2"))))),
        2,
    ),
    "an elastic job has no master to differ": (
        lambda: declare(
            SafeTorch(nodes="1:2", cluster=Kubeflow(worker=kf.Worker(requests=Resources(gpu="2")))),
            requests=Resources(gpu="8"),
        ),
        2,
    ),
    "launcher's GPUs do not count": (
        lambda: declare(
            SafeTorch(nodes=2, cluster=Kubeflow(operator="mpi", launcher=kfmpi.Launcher(requests=Resources(gpu="1")))),
            requests=Resources(gpu="4"),
        ),
        4,
    ),
    "one slice": (lambda: declare(SafeTorch(), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="1")), 1),
    "explicit slices": (
        lambda: declare(SafeTorch(nproc_per_node=2), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="2")),
        2,
    ),
    "a sidecar's environment is its own": (
        lambda: declare(
            SafeTorch(nodes=2),
            pod_template=PodTemplate(
                pod_spec=V1PodSpec(
                    containers=[V1Container(name="side", image="i:1", env=[V1EnvVar(name="RANK", value="0")])]
                )
            ),
        ),
        1,
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_ranks_per_node_follow_the_gpus_of_a_pod(case: str) -> None:
    make, nproc = ACCEPTED[case]

    assert make().settings.nproc_per_node == nproc
