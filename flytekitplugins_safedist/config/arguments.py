"""What ``@task`` was given, as far as a job depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from ..errors import Problem
from .effective import of_container
from .quantities import size_in_bytes
from .typed import RESOURCES, Must, instance


class _Readable(Must):
    """A pod template from which everything can be read that is read of it later."""

    def problem(self, field: str, value: Any) -> Problem | None:
        try:
            if value.pod_spec is not None:
                _read(value.pod_spec)
        except (AttributeError, TypeError, ValueError) as error:
            reason = f"cannot be read: {type(error).__name__}: {error}"
            return Problem(f"{field}.pod_spec", type(value.pod_spec).__name__, reason, self.repair)
        return None


def _read(spec: Any) -> None:
    for container in [*(spec.containers or ()), *(spec.init_containers or ())]:
        listed = [container.name, container.command, container.args, container.ports, of_container(container)]
        listed += [variable.name + (variable.value or "") for variable in container.env or ()]
        listed += [PurePosixPath(mount.mount_path) for mount in container.volume_mounts or ()]
    listed = [volume.name for volume in spec.volumes or ()]
    listed += [(toleration.key, toleration.effect) for toleration in spec.tolerations or ()]
    grace = spec.termination_grace_period_seconds
    if grace is not None and not isinstance(grace, int):
        raise TypeError(f"termination_grace_period_seconds={grace!r} is not a number")


Asked = Annotated[Any, RESOURCES[0], RESOURCES[1]]
Accelerator = Annotated[
    Any,
    Must(
        lambda value: hasattr(value, "to_flyte_idl"),
        "is not an accelerator",
        "use one of flytekit.extras.accelerators",
    ),
]
Template = Annotated[
    Any,
    instance("PodTemplate", "use PodTemplate(pod_spec=V1PodSpec(...))"),
    _Readable(bool, "", "make it of kubernetes.client's classes"),
]
SharedMemory = Annotated[
    bool | str,
    Must(
        lambda value: isinstance(value, bool) or (isinstance(value, str) and size_in_bytes(value)),
        "is not True, False or a quantity",
        "write e.g. '64Gi'",
    ),
]
Variables = Annotated[
    Mapping[str, str],
    Must(lambda value: isinstance(value, Mapping), "is not a mapping", 'use {"NAME": "value"}', secret=True),
]


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

    requests: Asked | None = None
    limits: Asked | None = None
    resources: Annotated[Any, RESOURCES[0]] | None = None
    accelerator: Accelerator | None = None
    pod_template: Template | None = None
    shared_memory: SharedMemory | None = None
    environment: Variables | None = None
    labels: Variables | None = None

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> TaskArguments:
        """Pick them from the keyword arguments of a flytekit task class."""
        return cls(**{name: kwargs[name] for name in cls.__dataclass_fields__ if name in kwargs})

    def primary_container(self) -> Any:
        """The ``V1Container`` of the pod template that runs the task, or None."""
        if self.pod_template is None or self.pod_template.pod_spec is None:
            return None
        name = self.pod_template.primary_container_name
        return next(
            (container for container in self.pod_template.pod_spec.containers or () if container.name == name), None
        )

    def mounted_paths(self) -> frozenset[str]:
        """Where the pod template's primary container mounts something."""
        mounts = getattr(self.primary_container(), "volume_mounts", None) or ()
        return frozenset(str(PurePosixPath(mount.mount_path)) for mount in mounts)
