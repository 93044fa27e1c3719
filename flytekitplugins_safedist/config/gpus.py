"""GPUs per pod, from everything that can ask for them, and what of it contradicts itself.

Sources: ``requests``, ``limits`` or ``resources`` of ``@task``, the primary container of its pod template, the roles of
the job, and ``accelerator``, which names a kind of GPU but never a number. How the Flyte backend combines them
(v1.16.8): a role's are merged over those of the container
(``flytek8s/container_helper.go``, ``MergeResources``), and a GPU count of zero is dropped (``flytek8s/utils.go``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Problem
from .options import Requested, SafeDistributed

GENERIC_GPU = "gpu"
"""flytekit's name for one; the platform has the other."""
VENDORS = ("nvidia.com/gpu", "amd.com/gpu", GENERIC_GPU)
_MIG = "nvidia.com/mig-"
_COMMON = ("cpu", "memory", "ephemeral-storage")


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

    requests: Any = None
    limits: Any = None
    resources: Any = None
    accelerator: Any = None
    pod_template: Any = None
    shared_memory: bool | str | None = None
    environment: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> TaskArguments:
        """Pick them from the keyword arguments of a flytekit task class."""
        return cls(**{name: kwargs[name] for name in cls.__dataclass_fields__ if name in kwargs})

    def has_resources(self) -> bool:
        """The task itself asks for something."""
        return any(
            any(vars(amounts).values())
            for amounts in (self.requests, self.limits, self.resources)
            if amounts is not None
        )

    def resource_names(self) -> frozenset[str]:
        """What the task itself asks for, by Kubernetes' names; a GPU is ``gpu``."""
        kubernetes = {"mem": "memory", "ephemeral_storage": "ephemeral-storage"}
        listed = [vars(amounts) for amounts in (self.requests, self.limits, self.resources) if amounts is not None]
        return frozenset(kubernetes.get(name, name) for amounts in listed for name, value in amounts.items() if value)

    def primary_container(self) -> Any:
        """The ``V1Container`` of the pod template that runs the task, or None."""
        if self.pod_template is None or self.pod_template.pod_spec is None:
            return None
        name = self.pod_template.primary_container_name
        return next(
            (container for container in self.pod_template.pod_spec.containers or () if container.name == name), None
        )


@dataclass(frozen=True)
class _Count:
    value: object
    field: str


def gpus_requested(arguments: TaskArguments, config: SafeDistributed, *, nodes: tuple[int, int] = (1, 1)) -> Requested:
    """GPUs in each pod that runs ranks, and which field says so; ``gpus=None`` where nothing asks for any.

    *nodes* are the fewest and the most. Where roles ask for different numbers, the smallest: every node runs the same
    number of ranks.
    """
    counts = [(_number(count.value), count.field) for count in _per_role(arguments, config, nodes)]
    known = [(number, name) for number, name in counts if number is not None]
    if not known:
        return Requested()
    number, name = min(known)
    return Requested(gpus=number, gpus_source=name)


def problems_of_gpus(
    arguments: TaskArguments, config: SafeDistributed, *, nproc_per_node: object, nodes: tuple[int, int] = (1, 1)
) -> Iterator[Problem]:
    """Everything about GPUs that contradicts itself, ranks against GPUs apart (that is the config's own check)."""
    yield from _unreadable(arguments, config)
    yield from _request_against_limit(arguments)
    yield from _beside_template(arguments)
    yield from _roles(arguments, config, nproc_per_node, nodes)
    yield from _accelerator(arguments, config, nproc_per_node, nodes)


def is_gpu(name: str) -> bool:
    """Whether Kubernetes' resource of that name is GPUs, or slices of them, on which ranks can be counted."""
    return name in VENDORS or name.startswith(_MIG)


def is_partitioned(arguments: TaskArguments) -> bool:
    """The GPUs are slices of a GPU (NVIDIA MIG)."""
    if _of_accelerator(arguments.accelerator)[1]:
        return True
    return any(name.startswith(_MIG) for name in _template_resources(arguments))


def _per_role(arguments: TaskArguments, config: SafeDistributed, nodes: tuple[int, int]) -> Iterator[_Count]:
    """What each role that runs ranks gets: its own count, else the task's."""
    task = _of_task(arguments)
    for name in _training_roles(config, nodes):
        own = _of_role(getattr(config, name, None), name)
        count = own or task
        if count is not None:
            yield count


def _training_roles(config: SafeDistributed, nodes: tuple[int, int]) -> tuple[str, ...]:
    fewest, most = nodes
    if most == 1:
        return ("",)
    if config.operator == "mpi" or fewest != most:
        return ("worker",)
    return "master", "worker"


def _of_role(role: Any, name: str) -> _Count | None:
    for field in ("limits", "requests"):
        gpu = getattr(getattr(role, field, None), "gpu", None)
        if gpu is not None:
            return _Count(gpu, f"{name}.{field}.gpu")
    return None


def _of_task(arguments: TaskArguments) -> _Count | None:
    for field in ("limits", "requests"):
        gpu = getattr(getattr(arguments, field), "gpu", None)
        if gpu is not None:
            return _Count(gpu, f"{field}.gpu")
    gpu = getattr(arguments.resources, "gpu", None)
    if gpu is not None:
        return _Count(gpu[-1] if isinstance(gpu, (list, tuple)) else gpu, "resources.gpu")
    for name, value in _template_resources(arguments).items():
        if is_gpu(name):
            return _Count(value, f"pod_template {name}")
    return None


def _template_resources(arguments: TaskArguments) -> dict[str, object]:
    container = arguments.primary_container()
    return {**amounts_of(container, "requests"), **amounts_of(container, "limits")}


def amounts_of(container: Any, part: str) -> Mapping[str, object]:
    """Requests or limits of a container; Kubernetes' client takes a dict of them as well (before version 37)."""
    resources = getattr(container, "resources", None)
    found = resources.get(part) if isinstance(resources, Mapping) else getattr(resources, part, None)
    return {**(found or {})}


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() else None


def _unreadable(arguments: TaskArguments, config: SafeDistributed) -> Iterator[Problem]:
    roles = [_of_role(getattr(config, name), name) for name in ("master", "worker", "launcher")]
    for count in (_of_task(arguments), *roles):
        if count is not None and _number(count.value) is None:
            reason = "is not a whole number of GPUs"
            yield Problem(count.field, count.value, reason, "Kubernetes hands out whole GPUs; write e.g. '4'")


def _request_against_limit(arguments: TaskArguments) -> Iterator[Problem]:
    pairs = [
        (getattr(arguments.requests, "gpu", None), getattr(arguments.limits, "gpu", None), "requests.gpu", "limits.gpu")
    ]
    gpu = getattr(arguments.resources, "gpu", None)
    if isinstance(gpu, (list, tuple)):
        pairs.append((gpu[0], gpu[-1], "resources.gpu[0]", "resources.gpu[1]"))
    for request, limit, field, other in pairs:
        if request is not None and limit is not None and str(request) != str(limit):
            reason = f"differs from {other}={limit!r}"
            yield Problem(field, request, reason, "Kubernetes wants the same number in both; give one of them")


def _beside_template(arguments: TaskArguments) -> Iterator[Problem]:
    """The template's GPUs are kept where the task names none (``plugin/serialization.py``); else two kinds are."""
    if GENERIC_GPU not in arguments.resource_names():
        return
    for name, value in _template_resources(arguments).items():
        if is_gpu(name) and name not in ("nvidia.com/gpu", GENERIC_GPU):
            reason = "is another kind of GPU than the task's own gpu=, which would take its place"
            yield Problem(f"pod_template {name}", value, reason, "keep one of them")


def _roles(
    arguments: TaskArguments, config: SafeDistributed, nproc: object, nodes: tuple[int, int]
) -> Iterator[Problem]:
    counts = list(_per_role(arguments, config, nodes))
    numbers = {_number(count.value) for count in counts}
    if nproc is None and len(numbers) > 1:
        listed = " and ".join(f"{count.field}={count.value}" for count in counts)
        reason = f"is not decided by {listed}: every node runs the same number of ranks"
        yield Problem("nproc_per_node", nproc, reason, "set nproc_per_node, or give the roles the same number of GPUs")
    task = _of_task(arguments)
    for name in ("master", "worker"):
        own = _of_role(getattr(config, name, None), name)
        if own is not None and _number(own.value) == 0 and task is not None and _number(task.value) != 0:
            reason = f"does not take away {task.field}={task.value}: the backend drops a count of zero"
            yield Problem(own.field, own.value, reason, "request GPUs per role only, not on the task")
    if config.operator == "mpi" and nodes[1] > 1:
        for name, value in _template_resources(arguments).items():
            if name not in _COMMON:
                yield _of_launcher_too(name, value)


def _of_launcher_too(name: str, value: object) -> Problem:
    """Roles of their own name cpu, memory, disk and GPUs only (``core.Resources``)."""
    repair = "use the operator 'pytorch', which has no launcher"
    if is_gpu(name):
        repair = "request GPUs in the task's resources, or in worker=Worker(...)"
    return Problem(f"pod_template {name}", value, "goes to the launcher too, which runs no ranks", repair)


def _accelerator(
    arguments: TaskArguments, config: SafeDistributed, nproc: object, nodes: tuple[int, int]
) -> Iterator[Problem]:
    if arguments.accelerator is None and not is_partitioned(arguments):
        return
    name = _accelerator_name(arguments.accelerator)
    if name.lower().startswith("tpu"):
        yield Problem("accelerator", name, "is a TPU, which neither Horovod nor torch ranks here can use", "use GPUs")
    gpus = gpus_requested(arguments, config, nodes=nodes).gpus
    if arguments.accelerator is not None and not gpus:
        reason = "names a kind of GPU, but no GPU is requested, so pods would land on nodes without one"
        yield Problem("accelerator", name, reason, "add Resources(gpu=...), or drop accelerator")
    if is_partitioned(arguments) and nproc is None and gpus is not None and gpus > 1:
        reason = f"cannot be derived from {gpus} slices: a process sees one MIG slice, and NCCL joins no two of a GPU"
        repair = "set nproc_per_node=1 and use nnodes=, or whole GPUs; set a higher number only for Gloo on the CPU"
        yield Problem("nproc_per_node", nproc, reason, repair)


def _accelerator_name(accelerator: Any) -> str:
    device, size = _of_accelerator(accelerator)
    return f"{device} ({size})" if size else device


def _of_accelerator(accelerator: Any) -> tuple[str, str]:
    """Device and size of a slice ("": whole devices), as flytekit sends them."""
    if accelerator is None:
        return "", ""
    message = accelerator.to_flyte_idl()
    return message.device or type(accelerator).__name__, message.partition_size
