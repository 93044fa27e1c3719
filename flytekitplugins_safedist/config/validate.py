"""Everything about a job's config that cannot work, found when the ``@task`` decorator runs.

Yields :class:`~flytekitplugins_safedist.errors.Problem` values, which the caller reports together with its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from .. import envvars
from ..errors import Problem
from . import grace_period
from .amounts import problems_of_amounts
from .classes import ROLES, has_class, of_their_classes
from .fields import SCRATCH_MOUNT, SHARED_MEMORY_MOUNT, Scratch, can_be_given, is_count, problem_of_variable
from .gpus import TaskArguments, problems_of_gpus
from .options import OPERATORS, SafeDistributed
from .reserved import problem_of

if TYPE_CHECKING:
    from .options import Timeouts

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Where Kueue looks: on the job, and on the pod of a task that is one."""

_POSITIVE = "must be a whole number, 1 or more"
SCRATCH_VOLUME = "safedist-scratch"
_SHARED_MEMORY_VOLUME = "flyte-shared-memory"  # flytekit.core.resources, construct_extended_resources
CONTAINER_NAMES = {"pytorch": "pytorch", "mpi": "mpi"}
"""What the operators call the container that trains; the backend renames the primary container to it."""


def problems_of_job(
    config: SafeDistributed, arguments: TaskArguments, *, min_nodes: int, max_nodes: int, nproc_per_node: object
) -> Iterator[Problem]:
    """Check *config* against the size of the job and what the task asks for.

    A size of 0 is one that could not be read: what depends on it is left out, and all else is looked at.
    """
    config, arguments, problems = of_their_classes(config, arguments)
    yield from problems
    if config.operator not in OPERATORS:
        repair = "use " + " or ".join(repr(name) for name in OPERATORS)
        yield Problem("operator", config.operator, "is not an operator that Flyte has a plugin for", repair)
        config, min_nodes, max_nodes = replace(config, operator=OPERATORS[0]), 0, 0
    yield from _size(config, min_nodes, max_nodes)
    yield from _roles(config, min_nodes, max_nodes)
    yield from _run_policy(config, max_nodes)
    yield from _queue(config.queue, arguments.labels)
    yield from _shared_memory(arguments)
    yield from _scratch(config.scratch, arguments)
    yield from _environment(config, arguments, max_nodes)
    yield from _pod_template(config, arguments, max_nodes)
    yield from problems_of_amounts(config, arguments)
    yield from problems_of_gpus(arguments, config, nproc_per_node=nproc_per_node, nodes=(min_nodes, max_nodes))


def _queue(queue: object, labels: object) -> Iterator[Problem]:
    if queue is None:
        return
    if not isinstance(queue, str) or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", queue):
        yield Problem("queue", queue, "is not the name of a LocalQueue", "use small letters, digits, '-' and '.'")
    elif (named := labels.get(QUEUE_LABEL, queue) if isinstance(labels, Mapping) else queue) != queue:
        yield Problem("queue", queue, f"is another than @task's label {QUEUE_LABEL}={named}", "give one of the two")


def warnings_of_job(config: SafeDistributed, arguments: TaskArguments, timeouts: Timeouts) -> Iterator[str]:
    """What works, and gives something up: one sentence each."""
    for name in ROLES:
        policy = getattr(getattr(config, name), "restart_policy", None)
        restart = getattr(policy, "name", None)
        if restart == "NEVER":
            yield (
                f"{name}.restart_policy is NEVER: when that pod is lost (drained, preempted, out of memory) the "
                "operator fails the whole job, a retry of the task's is spent, and Flyte shows no cause. Left out, the "
                "pod is replaced and the job goes on"
            )
        elif restart == "ALWAYS":
            yield (
                f"{name}.restart_policy is ALWAYS: a pod that is done is started again, for ever, and the operator "
                "never sees it succeed. Left out, a pod comes back only where it failed"
            )
    yield from warnings_of_template(arguments, timeouts)


def warnings_of_template(arguments: TaskArguments, timeouts: Timeouts) -> Iterator[str]:
    """The same, of the pod template alone."""
    spec = getattr(arguments.pod_template, "pod_spec", None)
    grace = getattr(spec, "termination_grace_period_seconds", None)
    needed = grace_period.needed(timeouts)
    if grace is not None and grace < needed:
        yield (
            f"the pod template's terminationGracePeriodSeconds={grace} is less than the {needed} s that "
            f"timeouts.preemption={timeouts.preemption:g}, timeouts.stop={timeouts.stop:g}, leaving and an upload "
            "take: what is not done by then is lost. Raise it, lower those, or leave it out"
        )


def problems_of_environment(environment: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Variables that say who a rank or node is, or what was decided at registration, are not the user's to set."""
    for name, value in environment.items():
        problem = problem_of(name, where, value)
        if problem is not None:
            yield problem


def _size(config: SafeDistributed, min_nodes: int, max_nodes: int) -> Iterator[Problem]:
    elastic = min_nodes != max_nodes
    if elastic and config.operator == "mpi":
        reason = "is a range, which an MPIJob cannot have: its launcher starts a fixed list of workers"
        yield Problem(
            "nnodes", f"{min_nodes}:{max_nodes}", reason, "use the operator 'pytorch', or a fixed number of nodes"
        )


def _roles(config: SafeDistributed, min_nodes: int, max_nodes: int) -> Iterator[Problem]:
    allowed = _allowed_roles(config, min_nodes, max_nodes)
    for name in ROLES:
        role = getattr(config, name)
        if role is None:
            continue
        if name not in allowed:
            have = " and ".join(allowed) or "no roles: it is an ordinary pod"
            job = "elastic" if min_nodes != max_nodes else f"{max_nodes}-node"
            reason = f"has no effect: this {job} {config.operator} job has {have}"
            yield Problem(f"{name}", "set", reason, f"drop {name}" + (f" or use {allowed[0]}" if allowed else ""))
        else:
            yield from _role(name, role, _replicas(name, config, min_nodes, max_nodes))


def _allowed_roles(config: SafeDistributed, min_nodes: int, max_nodes: int) -> tuple[str, ...]:
    if not max_nodes:
        return tuple(ROLES)
    if max_nodes == 1:
        return ()
    if config.operator == "mpi":
        return ("launcher", "worker")
    if min_nodes != max_nodes:
        return ("worker",)
    return "master", "worker"


def _replicas(name: str, config: SafeDistributed, min_nodes: int, max_nodes: int) -> int | None:
    if not max_nodes:
        return None
    if name != "worker":
        return 1
    return max_nodes if config.operator == "mpi" or min_nodes != max_nodes else max_nodes - 1


def _role(name: str, role: Any, replicas: int | None) -> Iterator[Problem]:
    count = getattr(role, "replicas", None)
    if None not in (count, replicas) and count != replicas:
        reason = f"contradicts nnodes, which makes {replicas}"
        yield Problem(f"{name}.replicas", count, reason, "leave replicas out; nnodes decides")
    if role.image is not None and not can_be_given(role.image):
        yield Problem(f"{name}.image", role.image, "is not the name of an image", "use a str")
    command = getattr(role, "command", None)
    if command:
        reason = "would replace the command that stages the code and starts the agent"
        yield Problem(
            f"{name}.command", command, reason, "drop it; put preparations into the image or an init container"
        )
    policy = role.restart_policy
    if policy is not None and not has_class(policy, "RestartPolicy"):
        repair = "use RestartPolicy of kfpytorch or kfmpi"
        yield Problem(f"{name}.restart_policy", policy, "is not a RestartPolicy", repair)


def _run_policy(config: SafeDistributed, max_nodes: int) -> Iterator[Problem]:
    policy = config.run_policy
    if policy is None:
        return
    if max_nodes == 1:
        reason = "has no effect: nnodes=1 is an ordinary pod, not a job"
        yield Problem("run_policy", "set", reason, "use timeout= and retries= of @task")
    clean = policy.clean_pod_policy
    if clean is not None and not has_class(clean, "CleanPodPolicy"):
        yield Problem("run_policy.clean_pod_policy", clean, "is not a CleanPodPolicy", "use that class")
    for name in ("ttl_seconds_after_finished", "active_deadline_seconds", "backoff_limit"):
        value = getattr(policy, name)
        if value is not None and not is_count(value, least=1):
            # The backend treats 0 as "not set" (kfoperators/common, ParseRunPolicy), so 0 would mean "no limit".
            repair = (
                "leave it out for no limit" if name != "ttl_seconds_after_finished" else "leave it out to keep the job"
            )
            yield Problem(f"run_policy.{name}", value, f"{_POSITIVE} (the backend drops 0)", repair)


def _shared_memory(arguments: TaskArguments) -> Iterator[Problem]:
    if arguments.shared_memory and SHARED_MEMORY_MOUNT in mounted_paths(arguments):
        reason = "and the pod template both mount /dev/shm, which the backend refuses"
        yield Problem("@task shared_memory", arguments.shared_memory, reason, "keep one of them")


def _scratch(scratch: object, arguments: TaskArguments) -> Iterator[Problem]:
    if not isinstance(scratch, Scratch) or scratch.path is not None or scratch.volume is None:
        return
    if SCRATCH_MOUNT in mounted_paths(arguments):
        reason = "mounts something where the scratch volume goes"
        yield Problem("pod_template", SCRATCH_MOUNT, reason, f"set Scratch(path={SCRATCH_MOUNT!r}) to use that mount")


def _environment(config: SafeDistributed, arguments: TaskArguments, max_nodes: int) -> Iterator[Problem]:
    given = arguments.environment or {}
    # Kubernetes takes more names than a shell does.
    unusable = {
        name: problem_of_variable("@task environment", name, text, further="-.") for name, text in given.items()
    }
    yield from filter(None, unusable.values())
    usable = {name: text for name, text in given.items() if unusable[name] is None}
    yield from problems_of_environment(usable, "@task environment")
    yield from problems_of_environment(_template_environment(arguments), "pod_template env")
    if max_nodes == 1 and envvars.ENDPOINT in {*usable, *_template_environment(arguments)}:
        reason = "says where nodes meet, and one node meets none"
        yield Problem("@task environment", envvars.ENDPOINT, reason, "remove it")


def _template_environment(arguments: TaskArguments) -> dict[str, object]:
    listed = getattr(arguments.primary_container(), "env", None) or ()
    return {variable.name: variable.value for variable in listed}


def _pod_template(config: SafeDistributed, arguments: TaskArguments, max_nodes: int) -> Iterator[Problem]:
    template = arguments.pod_template
    if template is None or template.pod_spec is None:
        return
    containers = template.pod_spec.containers or ()
    names = Counter(container.name for container in [*containers, *(template.pod_spec.init_containers or ())])
    for name in [name for name, count in names.items() if count > 1]:
        yield Problem("pod_template container", name, f"is the name of {names[name]} containers", "give each its own")
    taken = CONTAINER_NAMES[config.operator]
    for container in containers:
        if max_nodes > 1 and container.name == taken and container.name != template.primary_container_name:
            reason = f"is the name that the backend gives to the primary container {template.primary_container_name!r}"
            yield Problem("pod_template container", container.name, reason, "name the sidecar differently")
        if container.name == template.primary_container_name and (container.command or container.args):
            reason = "is replaced by the task's command"
            yield Problem("pod_template command", container.command or container.args, reason, "use an init container")
    for volume in template.pod_spec.volumes or ():
        if volume.name in (SCRATCH_VOLUME, _SHARED_MEMORY_VOLUME):
            reason = "is the name of a volume that safedist adds"
            yield Problem("pod_template volume", volume.name, reason, "name it differently")


def problems_of_template(config: SafeDistributed, arguments: TaskArguments, *, max_nodes: int) -> Iterator[Problem]:
    """Check a pod template alone, from which all that is needed can be read."""
    yield from _scratch(config.scratch, arguments)
    yield from problems_of_environment(_template_environment(arguments), "pod_template env")
    yield from _pod_template(config, arguments, max_nodes)
    yield from problems_of_amounts(config, TaskArguments(pod_template=arguments.pod_template))


def mounted_paths(arguments: TaskArguments) -> frozenset[str]:
    """Where the pod template's primary container mounts something."""
    mounts = getattr(arguments.primary_container(), "volume_mounts", None) or ()
    return frozenset(str(PurePosixPath(mount.mount_path)) for mount in mounts)
