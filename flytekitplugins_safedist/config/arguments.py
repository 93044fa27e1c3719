"""What ``@task`` was given, as far as a job depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from .effective import of_container
from .options import SHARED_MEMORY_MOUNT
from .quantities import size_in_bytes
from .typed import RESOURCES, Must, instance, is_text


def _can_be_read(template: Any) -> bool:
    """Reads everything that is read of a pod template later."""
    spec, marks = template.pod_spec, (template.labels, template.annotations)
    texts = [text for mark in marks for pair in (mark or {}).items() for text in pair]
    for container in containers_of(template):
        texts += [container.name, *(variable.name for variable in container.env or ())]
        _ = (container.command, container.args, of_container(container))
        _ = [(port.name, port.container_port, (port.protocol or "").lower()) for port in container.ports or ()]
        _ = [PurePosixPath(mount.mount_path) for mount in container.volume_mounts or ()]
    if spec is not None:
        texts += [volume.name for volume in spec.volumes or ()]
        _ = [(toleration.key, toleration.effect) for toleration in spec.tolerations or ()]
    grace = spec and spec.termination_grace_period_seconds
    return (grace is None or type(grace) is int) and all(map(is_text, texts))


def _is_accelerator(value: Any) -> bool:
    return value.to_flyte_idl().device is not None


def _is_shared_memory(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and bool(size_in_bytes(value)))


def _are_labels(value: Any) -> bool:
    return all(is_text(text) for pair in value.items() for text in pair)


Template = Annotated[
    Any,
    instance("PodTemplate", "flytekit", "use PodTemplate(pod_spec=V1PodSpec(...))"),
    Must(_can_be_read, "cannot be read", "make it of kubernetes.client's classes", secret=True),
]
Accelerator = Annotated[Any, Must(_is_accelerator, "is not an accelerator", "use one of flytekit.extras.accelerators")]
SharedMemory = Annotated[bool | str, Must(_is_shared_memory, "is not True, False or a quantity", "write e.g. '64Gi'")]
Variables = Annotated[
    Mapping[str, str],
    Must(lambda value: isinstance(value, Mapping), "is not a mapping", 'use {"NAME": "value"}', secret=True),
]
Labels = Annotated[Mapping[str, str], Must(_are_labels, "are not names and values", 'use {"name": "value"}')]


@dataclass(frozen=True, kw_only=True)
class TaskArguments:
    """What the ``@task`` decorator was given, as far as the config of the job depends on it.

    Attributes:
        requests, limits, resources: flytekit ``Resources``.
        accelerator: flytekit ``BaseAccelerator``.
        pod_template: flytekit ``PodTemplate``.
        shared_memory: True or a quantity.
        environment: variables of the container.
        labels: of the job, or of the pod of a task of one node.
    """

    requests: Annotated[Any, RESOURCES[0], RESOURCES[1]] | None = None
    limits: Annotated[Any, RESOURCES[0], RESOURCES[1]] | None = None
    resources: Annotated[Any, RESOURCES[0]] | None = None
    accelerator: Accelerator | None = None
    pod_template: Template | None = None
    shared_memory: SharedMemory | None = None
    environment: Variables | None = None
    labels: Labels | None = None

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> TaskArguments:
        """Pick them from the keyword arguments of a flytekit task class."""
        return cls(**{name: kwargs[name] for name in cls.__dataclass_fields__ if name in kwargs})

    def primary_container(self) -> Any:
        """The ``V1Container`` of the pod template that runs the task, or None."""
        template: Any = self.pod_template
        containers = getattr(getattr(template, "pod_spec", None), "containers", None) or ()
        return next((each for each in containers if each.name == template.primary_container_name), None)

    def mounted_paths(self) -> frozenset[str]:
        """Where the pod template's primary container mounts something."""
        mounts = getattr(self.primary_container(), "volume_mounts", None) or ()
        return frozenset(str(PurePosixPath(mount.mount_path)) for mount in mounts)

    def dev_shm(self) -> bool | str:
        """What the task asks of the backend for ``/dev/shm``: what ``@task(shared_memory=...)`` says; by default as
        much as the container's memory allows, for the runtime's 64 MiB are too few for NCCL and data loaders. False
        where the pod template mounts something there.

        Not a volume of our own: ``with_overrides(shared_memory=...)`` replaces what was asked, and would meet a mount.
        """
        if self.shared_memory is not None:
            return self.shared_memory
        return SHARED_MEMORY_MOUNT not in self.mounted_paths()


def containers_of(template: Any) -> Iterable[Any]:
    """Containers and init containers of a flytekit ``PodTemplate``."""
    spec = template.pod_spec
    return () if spec is None else [*(spec.containers or ()), *(spec.init_containers or ())]
