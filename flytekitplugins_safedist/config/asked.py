"""What ``@task`` was given, and what a task, a role or a container asks for: one form for all of them.

Sources of amounts are ``requests``, ``limits`` or ``resources`` of ``@task``, the containers of its pod template, and
the roles of the job. A role's are merged over those of the container (``flytek8s/container_helper.go`` of v1.16.8,
``MergeResources``). The backend lowers a request that is above its limit without a word (``ApplyResourceOverrides``);
for a container that it leaves alone, the API server refuses the pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

from ..errors import Problem, RenderError
from .quantities import size_in_bytes, value_of
from .typed import RESOURCES, Must, instance

GENERIC_GPU = "gpu"
"""flytekit's name for one; the platform has the other."""
_VENDORS = ("nvidia.com/gpu", "amd.com/gpu", GENERIC_GPU)
MIG = "nvidia.com/mig-"


class Amount(NamedTuple):
    """One that is asked for.

    Attributes:
        field: which says so, for messages.
        value: as it was written.
    """

    field: str
    value: object


Amounts = Mapping[tuple[str, str], Amount]
"""By ``"requests"`` or ``"limits"``, and the resource."""


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

    def amounts(self) -> Amounts:
        """What the task itself asks for, by flytekit's names, ``resources=`` taken apart."""
        found = {**of_role("", self)}
        for name, value in _named(self.resources).items():
            if isinstance(value, (list, tuple)):
                for at, part in enumerate(_PARTS):
                    found[part, name] = Amount(f"resources.{name}[{at}]", value[at])
            else:
                found["requests", name] = Amount(f"resources.{name}", value)
        return found

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


_PARTS = ("requests", "limits")


def of_role(name: str, role: Any) -> Amounts:
    """What a role asks for itself; nothing for one that is None."""
    prefix = f"{name}." if name else ""
    return {
        (part, resource): Amount(f"{prefix}{part}.{resource}", value)
        for part in _PARTS
        for resource, value in _named(getattr(role, part, None)).items()
    }


def of_container(container: Any) -> Amounts:
    """What a container of a pod template asks for, by Kubernetes' names; its client takes a dict of them as well
    (before version 37)."""
    resources: Any = getattr(container, "resources", None)
    found = resources if isinstance(resources, Mapping) else {part: getattr(resources, part, None) for part in _PARTS}
    return {
        (part, name): Amount(f"pod_template {container.name} {part}.{name}", value)
        for part in _PARTS
        for name, value in {**(found.get(part) or {})}.items()
        if value is not None
    }


def part_of(amounts: Amounts, part: str) -> dict[str, object]:
    """Requests or limits alone, as they were written."""
    return {name: amount.value for (which, name), amount in amounts.items() if which == part}


def gpus_of(amounts: Amounts) -> Amount | None:
    """GPUs that are asked for under flytekit's name."""
    return amounts.get(("limits", GENERIC_GPU)) or amounts.get(("requests", GENERIC_GPU))


def is_gpu(name: str) -> bool:
    """Whether Kubernetes' resource of that name is GPUs, or slices of them, on which ranks can be counted."""
    return name in _VENDORS or name.startswith(MIG)


def problems_of_amounts(amounts: Amounts, below: Amounts) -> Iterator[Problem]:
    """What is wrong with *amounts*, which lie over others that have been looked at; GPUs apart, which have rules of
    their own (:mod:`.gpus`)."""
    for (_, name), (field, value) in amounts.items():
        if name != GENERIC_GPU and _number(value) is None:
            yield Problem(field, value, "is not an amount that Kubernetes can read", "write e.g. '2', '500m' or '64Gi'")
    united, own = {**below, **amounts}, {name for _, name in amounts if name != GENERIC_GPU}
    for (part, name), (field, value) in united.items():
        limit = united.get(("limits", name))
        if part == "limits" or limit is None or name not in own:
            continue
        low, high = _number(value), _number(limit.value)
        if low is not None and high and low > high:
            repair = "raise the limit, or lower the request"
            yield Problem(field, value, f"is above {limit.field}={limit.value!r}", repair)


def _named(resources: Any) -> dict[str, object]:
    """flytekit's ``Resources``, without what is not asked for."""
    return {} if resources is None else {name: value for name, value in vars(resources).items() if value is not None}


def _number(value: object) -> Any:
    try:
        number = value_of(value)
    except RenderError:
        return None
    return number if number >= 0 else None
