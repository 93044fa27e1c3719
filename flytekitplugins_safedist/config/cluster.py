"""The shape of the job on the cluster, as the user writes it: which operator, roles, run policy, volumes.

:class:`Kubeflow` is what ``SafeHorovod(cluster=...)`` and ``SafeTorch(cluster=...)`` take. Where Flyte's own Kubeflow
plugins have a class for something (``RunPolicy``, ``Master``, ``Worker``, ``Launcher``, ``RestartPolicy``, ...) it is
theirs, from ``flytekitplugins.kfpytorch`` or ``flytekitplugins.kfmpi``, whichever the user already imports.

What cannot work is found by :mod:`~flytekitplugins_safedist.config.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from flytekitplugins import kfmpi, kfpytorch

    RunPolicy: TypeAlias = kfpytorch.RunPolicy | kfmpi.task.RunPolicy
    Master: TypeAlias = kfpytorch.Master
    Worker: TypeAlias = kfpytorch.Worker | kfmpi.Worker
    Launcher: TypeAlias = kfmpi.Launcher

Operator = Literal["pytorch", "mpi"]
Medium = Literal["disk", "memory"]

OPERATORS: tuple[Operator, ...] = ("pytorch", "mpi")
MEDIUMS: tuple[Medium, ...] = ("disk", "memory")

SCRATCH_MOUNT = "/var/run/safedist/scratch"
SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108  (the path itself is the interface: POSIX shared memory lives there)


@dataclass(frozen=True, kw_only=True)
class ScratchVolume:
    """The volume under the ranks' scratch directories.

    Attributes:
        medium: ``"disk"`` of the node, or ``"memory"``, which counts against the container's memory limit.
        size_limit: Kubernetes quantity (``"200Gi"``) beyond which the kubelet evicts the pod; None: the node's disk,
            and ``Scratch(size_limit=...)`` when that is set.
        claim: name of a PersistentVolumeClaim to use instead; all pods of the job mount the same one.
        mount_path: where it is mounted in the container.
    """

    medium: Medium = "disk"
    size_limit: str | None = None
    claim: str | None = None
    mount_path: str = SCRATCH_MOUNT


@dataclass(frozen=True, kw_only=True)
class Kubeflow:
    """How the job looks to Kubernetes: ``SafeTorch(nodes=2, cluster=Kubeflow(operator="mpi"))``.

    Attributes:
        operator: ``"pytorch"`` (PyTorchJob) or ``"mpi"`` (MPIJob), for clusters that only have that one.
        one_node_job: with ``nodes=1``, ask the operator for a job all the same, instead of an ordinary pod.
        master: image, resources and restart policy of node 0 of a PyTorchJob of fixed size. The restart policy of
            every role is OnFailure unless it names another: a pod that is lost comes back.
        worker: the same for the other nodes of a PyTorchJob; for every node of an elastic one or an MPIJob.
        launcher: the same for the launcher pod of an MPIJob, which runs no ranks and needs no GPU.
        run_policy: clean-up, deadline, time to live, backoff limit. Unset, running pods are cleaned up at the end, and
            the backoff limit is above the job's budget for lost nodes (``max_replacements``).
        shared_memory: True: a memory-backed ``/dev/shm`` as large as the container's memory allows; a quantity
            (``"64Gi"``) limits it; False: the container runtime's 64 MiB. Does nothing where the task itself asks
            for shared memory, or its pod template mounts ``/dev/shm``.
        scratch_volume: what is mounted for scratch; None: nothing, scratch lives in the container's file system.
    """

    operator: Operator = "pytorch"
    one_node_job: bool = False
    master: Master | None = None
    worker: Worker | None = None
    launcher: Launcher | None = None
    run_policy: RunPolicy | None = None
    shared_memory: bool | str = True
    scratch_volume: ScratchVolume | None = field(default_factory=ScratchVolume)
