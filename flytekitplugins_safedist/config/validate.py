"""Everything about a job's config that cannot work, found when the ``@task`` decorator runs.

Yields :class:`~flytekitplugins_safedist.errors.Problem` values; what these functions are given is of its types
(:mod:`.typed`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MemberDescriptorType
from typing import Any

from .. import envvars
from ..errors import Problem
from . import effective
from .arguments import TaskArguments, containers_of
from .effective import POD, Amounts, Layers
from .options import DEFAULT_PORT, DEFAULT_REPLACEMENTS, SCRATCH_MOUNT, SHARED_MEMORY_MOUNT, SafeDistributed
from .roles import NAMES, Role
from .typed import is_text

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Where Kueue looks: on the job, and on the pod of a task that is one."""
SCRATCH_VOLUME = "safedist-scratch"
TRAINER = "pytorch"
"""What a PyTorchJob calls the container that runs the task."""


def problems_of_function(function: Callable[..., Any]) -> Iterator[Problem]:
    """A task's function returns its outputs. (flytekit itself lets plain tasks alone be coroutines.)"""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "is a generator: a call of it runs nothing, and what it yields is no output"
        yield Problem("function", function.__name__, reason, "return the outputs")


def problems_of_job(
    config: SafeDistributed, arguments: TaskArguments, roles: Sequence[Role], layers: Layers, nodes: tuple[int, int]
) -> Iterator[Problem]:
    """Check what must agree with what.

    Args:
        config, arguments: what the user wrote, every part of its type.
        roles: of the job.
        layers: what they and the task ask for, as :func:`.effective.effective` takes it.
        nodes: the least and the most; 0 where nobody can tell: what depends on it is left out.
    """
    low, high = nodes
    yield from _class(config)
    yield from _numbers(config, high)
    yield from _scratch(config, arguments)
    yield from _roles(config, roles, low, high)
    yield from _run_policy(config.run_policy, high)
    variables = {each.name: each.value for each in getattr(arguments.primary_container(), "env", None) or ()}
    yield from problems_of_variables(arguments.environment or {}, "@task environment", high)
    yield from problems_of_variables(variables, "pod_template env", high)
    yield from _template(arguments, high)
    label = (arguments.labels or {}).get(QUEUE_LABEL, config.queue)
    if config.queue is not None and label != config.queue:
        reason = f"is another than @task's label {QUEUE_LABEL}={label}"
        yield Problem("queue", config.queue, reason, "give one of the two")
    if arguments.resources is not None and (arguments.requests is not None or arguments.limits is not None):
        reason = "is given beside requests or limits, which say the same"
        yield Problem("resources", arguments.resources, reason, "keep resources, or requests and limits")
    yield from effective.problems_of_amounts(*layers)
    template, task, _, call = layers
    pods = effective.effective(*layers) if high else effective.effective(template, task, {POD: {}}, call)
    yield from effective.problems_of_gpus(pods, config.nproc_per_node)
    yield from _accelerator(arguments.accelerator, pods, config.nproc_per_node)


def _class(config: SafeDistributed) -> Iterator[Problem]:
    """Values that stand in a user's class, and in no field of it."""
    for field in fields(config):
        value = getattr(type(config), field.name, field.default)
        if value is not field.default and not isinstance(value, MemberDescriptorType):  # of a class with slots
            reason = f"stands in {type(config).__name__}, and is no default of a field there"
            repair = "write NAME: TYPE = VALUE below @dataclass(frozen=True, kw_only=True)"
            yield Problem(field.name, value, reason, repair)


def _numbers(config: SafeDistributed, nodes: int) -> Iterator[Problem]:
    replacements, limit = config.max_replacements, getattr(config.run_policy, "backoff_limit", None)
    if limit is not None and limit <= replacements != DEFAULT_REPLACEMENTS:
        reason = f"is spent after the operator's run_policy.backoff_limit={limit}, which fails the job without a cause"
        repair = f"lower it to {limit - 1}, or raise backoff_limit to {replacements + 1}"
        yield Problem("max_replacements", replacements, reason, repair)
    # Without nproc_per_node ranks follow the GPUs of a pod, which a call may change.
    world = nodes * (config.nproc_per_node or 0)
    named: dict[str, Any] = {"logs.show": config.logs.show, "profile.ranks": config.profile and config.profile.ranks}
    for field, ranks in named.items():
        if world and ranks and max((ranks[0], ranks[-1]) if isinstance(ranks, range) else ranks) >= world:
            yield Problem(field, ranks, f"names a rank that is not there: {world} in all", f"use 0 to {world - 1}")
    if config.hangs.floor is not None and config.hangs.floor > config.hangs.ceiling:
        repair = f"use at most {config.hangs.ceiling:g}"
        yield Problem("hangs.floor", config.hangs.floor, "is more than hangs.ceiling", repair)
    if nodes > 1 and config.metrics.prometheus == DEFAULT_PORT:
        yield Problem("metrics.prometheus", DEFAULT_PORT, "is the port at which nodes meet", "use another")


def _scratch(config: SafeDistributed, arguments: TaskArguments) -> Iterator[Problem]:
    scratch, mounts = config.scratch, arguments.mounted_paths()
    places = {"path": scratch.path, "claim": scratch.claim, "volume": scratch.volume == "memory" or None}
    named = [name for name, place in places.items() if place is not None]
    if len(named) > 1:
        reason = "name more than one place for it"
        yield Problem("scratch", " and ".join(named), reason, "keep one")
    if scratch.path is None and (scratch.claim or scratch.volume) and SCRATCH_MOUNT in mounts:
        reason = "mounts something where the scratch volume goes"
        yield Problem("pod_template", SCRATCH_MOUNT, reason, f"set Scratch(path={SCRATCH_MOUNT!r}) to use that mount")
    if arguments.shared_memory and SHARED_MEMORY_MOUNT in mounts:
        reason = "and the pod template both mount /dev/shm, which the backend refuses"
        yield Problem("shared_memory", arguments.shared_memory, reason, "keep one of them")


def _roles(config: SafeDistributed, roles: Sequence[Role], low: int, high: int) -> Iterator[Problem]:
    counts = {role.name: role.replicas for role in roles}
    for name in NAMES:
        role: Any = getattr(config, name)
        replicas = getattr(role, "replicas", None)
        if role is not None and name not in counts:
            are = " and ".join(counts) or "no roles: it is an ordinary pod"
            reason = f"has no effect: this {'elastic' if low != high else f'{high}-node'} job has {are}"
            yield Problem(name, "set", reason, f"drop {name}" + (f" or use {next(iter(counts))}" if counts else ""))
        elif None not in (replicas, counts.get(name)) and replicas != counts[name]:
            reason = f"contradicts nnodes, which makes {counts[name]}"
            yield Problem(f"{name}.replicas", replicas, reason, "leave replicas out; nnodes decides")


def _run_policy(policy: Any, nodes: int) -> Iterator[Problem]:
    if policy is not None and nodes == 1:
        reason = "has no effect: nnodes=1 is an ordinary pod, not a job"
        yield Problem("run_policy", "set", reason, "use timeout= and retries= of @task")
    for name in ("ttl_seconds_after_finished", "active_deadline_seconds", "backoff_limit"):
        value = getattr(policy, name, None)
        if value is not None and value < 1:
            # The backend treats 0 as "not set" (kfoperators/common, ParseRunPolicy), so 0 would mean "no limit".
            keep = "to keep the job" if name == "ttl_seconds_after_finished" else "for no limit"
            reason = "must be a whole number, 1 or more (the backend drops 0)"
            yield Problem(f"run_policy.{name}", value, reason, f"leave it out {keep}")


def _template(arguments: TaskArguments, nodes: int) -> Iterator[Problem]:
    template, primary = arguments.pod_template, arguments.primary_container()
    if template is None:
        return
    if primary is not None and (primary.command or primary.args):
        reason = "is replaced by the task's command"
        yield Problem("pod_template command", primary.command or primary.args, reason, "use an init container")
    for container in containers_of(template):
        if container is not primary:
            yield from effective.problems_of_container(container)
            if nodes > 1 and container.name == TRAINER:
                reason = (
                    f"is the name that the backend gives to the primary container {template.primary_container_name!r}"
                )
                yield Problem("pod_template container", container.name, reason, "name the sidecar differently")
        names = [variable.name for variable in container.env or ()]
        for name in sorted({name for name in names if names.count(name) > 1}):
            reason = f"is there twice in the container {container.name}"
            yield Problem("pod_template env", name, reason, "keep one: the API server refuses a job with two")
    if nodes == 1 and getattr(template.pod_spec, "restart_policy", None) == "Always":  # a role's own wins in a job
        reason = "has a pod that is done started again, for ever: Flyte would never see it succeed"
        yield Problem("pod_template restartPolicy", "Always", reason, "leave it out")
    for container in getattr(template.pod_spec, "init_containers", None) or ():
        if container.image is not None and not is_text(container.image):
            reason = "has an image that is no text: flytekit builds an ImageSpec for containers alone"
            yield Problem("pod_template init container", container.name, reason, "write the image's name")
    for volume in getattr(template.pod_spec, "volumes", None) or ():
        if volume.name == SCRATCH_VOLUME:
            reason = "is the name of a volume that safedist adds"
            yield Problem("pod_template volume", volume.name, reason, "name it differently")


def _accelerator(accelerator: Any, pods: Mapping[str, Amounts], nproc: int | None) -> Iterator[Problem]:
    gpus, _ = effective.fewest_gpus(pods)
    if accelerator is not None:
        message = accelerator.to_flyte_idl()
        device, size = message.device or type(accelerator).__name__, message.partition_size
        named = f"{device} ({size})" if size else device
        if device.lower().startswith("tpu"):
            reason = "is a TPU, which neither Horovod nor torch ranks here can use"
            yield Problem("accelerator", named, reason, "use GPUs")
        if gpus is None:
            reason = "names a kind of GPU, but no GPU is requested, so pods would land on nodes without one"
            yield Problem("accelerator", named, reason, "add Resources(gpu=...), or drop accelerator")
    if has_slices(pods, accelerator) and nproc is None and gpus is not None and gpus > 1:
        reason = f"cannot be derived from {gpus} slices: a process sees one MIG slice, and NCCL joins no two of a GPU"
        repair = "set nproc_per_node=1 and use nnodes=, or whole GPUs; set a higher number only for Gloo on the CPU"
        yield Problem("nproc_per_node", nproc, reason, repair)


def has_slices(pods: Mapping[str, Amounts], accelerator: Any) -> bool:
    """Whether what pods get of GPUs are slices of them."""
    is_slice = accelerator is not None and bool(accelerator.to_flyte_idl().partition_size)
    return is_slice or any(name.startswith(effective.MIG) for amounts in pods.values() for _, name in amounts)


# --- variables of a task's container: those that are not the user's to set, and what is none --------------------------
_IDENTITY = envvars.IDENTITY | {"GROUP_LOCAL_RANK"}
"""Those by which torch, Horovod and the operators tell a node or rank who it is."""
_IDENTITY_PREFIXES = ("PET_", "OMPI_COMM_WORLD_", "HOROVOD_GLOO_RENDEZVOUS_")
"""Families of such variables."""
_OURS = {
    envvars.JOB: ("is decided by the task config", "set what you want in the task config"),
    envvars.GRACE: ("only says what the pod has", "set terminationGracePeriodSeconds in the pod template"),
    **dict.fromkeys(
        (envvars.MEETING, envvars.STORE_PORT, envvars.ROUND, envvars.EPHEMERAL_STORAGE, envvars.KUBERNETES_NODE),
        ("is set by safedist for its own ranks and agents", "remove it"),
    ),
}
_NAME = re.compile(r"[-.A-Za-z_][-.A-Za-z0-9_]*")  # Kubernetes takes more names than a shell does
_LABEL = r"[^\s:/.]{1,63}"
_ENDPOINT = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*\.?|\[[0-9A-Fa-f:.%]+\]):(?!0+$)([0-9]{{1,5}})")


def problems_of_variables(variables: Mapping[Any, object], where: str, nodes: int) -> Iterator[Problem]:
    """What is wrong with each. Values may be secrets: they are never shown, only their type is.

    Args:
        variables: with their values; None: filled in by Kubernetes.
        where: the argument that sets them, for the message.
        nodes: of the job, at most; 0 where nobody can tell.
    """
    for name, value in variables.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield Problem(where, name, "is not a name of a variable", "use letters, digits and _")
        elif value is not None and not is_text(value):
            repair = "use a str without NUL and lone surrogates"
            yield Problem(f"{where}[{name!r}]", type(value).__name__, "is not text", repair)
        elif name in _OURS:
            yield Problem(where, name, *_OURS[name])
        elif name in _IDENTITY or name.startswith(_IDENTITY_PREFIXES):
            to_move = f"@task(environment={{{envvars.ENDPOINT!r}: 'HOST:PORT'}})"
            repair = f"remove it; to move the meeting point of the nodes: {to_move}"
            yield Problem(where, name, "says who a node or rank is, which differs in each", repair)
        elif name == envvars.ENDPOINT and nodes == 1:
            yield Problem(where, name, "says where nodes meet, and one node meets none", "remove it")
        elif name == envvars.ENDPOINT and value is not None:
            match = _ENDPOINT.fullmatch(str(value))
            if match is None or int(match[1]) > 65535:
                yield Problem(where, name, "is not where nodes can meet", "write HOST:PORT")
