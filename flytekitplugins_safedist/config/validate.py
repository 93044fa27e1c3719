"""Everything about a job's config that cannot work, found when the ``@task`` decorator runs.

Yields :class:`~flytekitplugins_safedist.errors.Problem` values; what these functions are given is of its types
(:mod:`.typed`).
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import envvars
from ..errors import Problem
from . import grace_period
from .arguments import TaskArguments
from .effective import (
    MIG,
    NOTHING,
    POD,
    Amounts,
    Layers,
    effective,
    fewest_gpus,
    problems_of_amounts,
    problems_of_container,
    problems_of_gpus,
)
from .options import (
    DEFAULT_REPLACEMENTS,
    SCRATCH_MOUNT,
    SHARED_MEMORY_MOUNT,
    Hangs,
    SafeDistributed,
    Scratch,
    parse_nodes,
)
from .reserved import problem_of
from .roles import NAMES, Role
from .typed import MOST_COUNTED, can_be_given

if TYPE_CHECKING:
    from .options import Timeouts

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Where Kueue looks: on the job, and on the pod of a task that is one."""
SCRATCH_VOLUME = "safedist-scratch"
TRAINER = "pytorch"
"""What a PyTorchJob calls the container that runs the task."""
_SHARED_MEMORY_VOLUME = "flyte-shared-memory"  # flytekit.core.resources, construct_extended_resources


def problems_of_function(function: Callable[..., Any]) -> Iterator[Problem]:
    """A task's function returns its outputs. (flytekit itself lets plain tasks alone be coroutines.)"""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "is a generator: a call of it runs nothing, and what it yields is no output"
        yield Problem("function", function.__name__, reason, "return the outputs")


def problems_of_job(
    config: SafeDistributed, arguments: TaskArguments, roles: Sequence[Role], layers: Layers, *, is_sized: bool
) -> Iterator[Problem]:
    """Check what must agree with what.

    Args:
        config, arguments: what the user wrote, every part of its type.
        roles: of the job.
        layers: what they and the task ask for, as :func:`.effective.effective` takes it.
        is_sized: False where the number of nodes could not be read: what depends on it is left out, and all else is
            looked at.
    """
    low, high = (parse_nodes(config.nnodes) or (0, 0)) if is_sized else (0, 0)
    if type(config) is SafeDistributed:
        repair = "use SafeHorovod(...) or SafeTorch(...)"
        yield Problem("task_config", "SafeDistributed", "does not name a backend", repair)
    yield from _replacements(config, high)
    yield from _named_ranks(config, high)
    yield from _hangs(config.hangs)
    yield from _scratch(config.scratch)
    yield from _roles(config, roles, low, high)
    yield from _run_policy(config.run_policy, high)
    yield from _queue(config.queue, arguments.labels or {})
    yield from _environment(arguments, high)
    yield from _resources(arguments, layers)
    yield from problems_of_template(config, arguments, max_nodes=high)
    if arguments.shared_memory and SHARED_MEMORY_MOUNT in arguments.mounted_paths():
        reason = "and the pod template both mount /dev/shm, which the backend refuses"
        yield Problem("shared_memory", arguments.shared_memory, reason, "keep one of them")
    template, task, _, call = layers
    pods = effective(*layers) if is_sized else effective(template, task, {POD: NOTHING}, call)
    yield from problems_of_gpus(pods, config.nproc_per_node)
    yield from _accelerator(arguments.accelerator, pods, config.nproc_per_node)


def problems_of_template(config: SafeDistributed, arguments: TaskArguments, *, max_nodes: int) -> Iterator[Problem]:
    """Check a pod template alone."""
    template = arguments.pod_template
    if template is None or template.pod_spec is None:
        return
    scratch = config.scratch
    if scratch.path is None and scratch.volume is not None and SCRATCH_MOUNT in arguments.mounted_paths():
        reason = "mounts something where the scratch volume goes"
        yield Problem("pod_template", SCRATCH_MOUNT, reason, f"set Scratch(path={SCRATCH_MOUNT!r}) to use that mount")
    yield from problems_of_environment(_template_environment(arguments), "pod_template env")
    containers, init = template.pod_spec.containers or (), template.pod_spec.init_containers or ()
    names = Counter(container.name for container in [*containers, *init])
    for name in [name for name, count in names.items() if count > 1]:
        yield Problem("pod_template container", name, f"is the name of {names[name]} containers", "give each its own")
    for container in containers:
        is_primary = container.name == template.primary_container_name
        if max_nodes > 1 and container.name == TRAINER and not is_primary:
            reason = f"is the name that the backend gives to the primary container {template.primary_container_name!r}"
            yield Problem("pod_template container", container.name, reason, "name the sidecar differently")
        if is_primary and (container.command or container.args):
            reason = "is replaced by the task's command"
            yield Problem("pod_template command", container.command or container.args, reason, "use an init container")
    for container in [*containers, *init]:
        variables = Counter(variable.name for variable in container.env or ())
        for name in (name for name, count in variables.items() if count > 1):
            reason = f"is there twice in the container {container.name}"
            yield Problem("pod_template env", name, reason, "keep one: the API server refuses a job with two")
    for container in [*(one for one in containers if one.name != template.primary_container_name), *init]:
        yield from problems_of_container(container)
    for volume in template.pod_spec.volumes or ():
        if volume.name in (SCRATCH_VOLUME, _SHARED_MEMORY_VOLUME):
            reason = "is the name of a volume that safedist adds"
            yield Problem("pod_template volume", volume.name, reason, "name it differently")


def problems_of_environment(environment: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Variables that say who a rank or node is, or what was decided at registration, are not the user's to set."""
    return filter(None, (problem_of(name, where, value) for name, value in environment.items()))


def warnings_of_job(roles: Sequence[Role], arguments: TaskArguments, timeouts: Timeouts) -> Iterator[str]:
    """What works, and gives something up: one sentence each."""
    for role in roles:
        if role.restart_policy == "NEVER":
            yield (
                f"{role.name}.restart_policy is NEVER: when that pod is lost (drained, preempted, out of memory) the "
                "operator fails the whole job, a retry of the task's is spent, and Flyte shows no cause. Left out, the "
                "pod is replaced and the job goes on"
            )
        elif role.restart_policy == "ALWAYS":
            yield (
                f"{role.name}.restart_policy is ALWAYS: a pod that is done is started again, for ever, and the "
                "operator never sees it succeed. Left out, a pod comes back only where it failed"
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


def _replacements(config: SafeDistributed, nodes: int) -> Iterator[Problem]:
    replacements, limit = config.max_replacements, getattr(config.run_policy, "backoff_limit", None)
    if limit is not None and limit <= replacements != DEFAULT_REPLACEMENTS:
        reason = f"is spent after the operator's run_policy.backoff_limit={limit}, which fails the job without a cause"
        repair = f"lower it to {limit - 1}, or raise backoff_limit to {replacements + 1}"
        yield Problem("max_replacements", replacements, reason, repair)
    if limit is None and replacements * nodes >= MOST_COUNTED:
        # The job's own backoff limit is made of them.
        reason = f"with {nodes} nodes is more restarts of pods than an operator can count"
        yield Problem("max_replacements", replacements, reason, f"lower it to {MOST_COUNTED // nodes - 1}")


def _named_ranks(config: SafeDistributed, nodes: int) -> Iterator[Problem]:
    """Ranks that the job will not have. Without ``nproc_per_node`` they follow the GPUs of a pod, which a call may
    change."""
    world = nodes * (config.nproc_per_node or 0)
    named: dict[str, Any] = {"logs.show": config.logs.show, "profile.ranks": config.profile and config.profile.ranks}
    for field, ranks in named.items():
        if world and ranks and max((ranks[0], ranks[-1]) if isinstance(ranks, range) else ranks) >= world:
            yield Problem(field, ranks, f"names a rank that is not there: {world} in all", f"use 0 to {world - 1}")


def _hangs(hangs: Hangs) -> Iterator[Problem]:
    if hangs.floor is not None and hangs.floor > hangs.ceiling:
        yield Problem("hangs.floor", hangs.floor, "is more than hangs.ceiling", f"use at most {hangs.ceiling:g}")


def _scratch(scratch: Scratch) -> Iterator[Problem]:
    if scratch.claim is not None and scratch.volume != "disk":
        reason = "is mounted in the place of a volume"
        yield Problem("scratch.claim", scratch.claim, reason, f"drop it, or volume={scratch.volume!r}")
    elif scratch.path is not None and (scratch.claim is not None or scratch.volume == "memory"):
        reason = "is where scratch goes, so that no volume is mounted for it"
        repair = "drop it, or " + ("volume" if scratch.claim is None else "claim")
        yield Problem("scratch.path", scratch.path, reason, repair)


def _roles(config: SafeDistributed, roles: Sequence[Role], low: int, high: int) -> Iterator[Problem]:
    have = {role.name: role for role in roles}
    for name in NAMES:
        written: Any = getattr(config, name)
        if written is None:
            continue
        if name not in have:
            are = " and ".join(have) or "no roles: it is an ordinary pod"
            job = "elastic" if low != high else f"{high}-node"
            reason = f"has no effect: this {job} job has {are}"
            yield Problem(name, "set", reason, f"drop {name}" + (f" or use {next(iter(have))}" if have else ""))
            continue
        count, makes = getattr(written, "replicas", None), have[name].replicas
        if None not in (count, makes) and count != makes:
            reason = f"contradicts nnodes, which makes {makes}"
            yield Problem(f"{name}.replicas", count, reason, "leave replicas out; nnodes decides")


def _run_policy(policy: Any, max_nodes: int) -> Iterator[Problem]:
    if policy is None:
        return
    if max_nodes == 1:
        reason = "has no effect: nnodes=1 is an ordinary pod, not a job"
        yield Problem("run_policy", "set", reason, "use timeout= and retries= of @task")
    for name in ("ttl_seconds_after_finished", "active_deadline_seconds", "backoff_limit"):
        value = getattr(policy, name)
        if value is not None and value < 1:
            # The backend treats 0 as "not set" (kfoperators/common, ParseRunPolicy), so 0 would mean "no limit".
            kept = "to keep the job" if name == "ttl_seconds_after_finished" else "for no limit"
            reason = "must be a whole number, 1 or more (the backend drops 0)"
            yield Problem(f"run_policy.{name}", value, reason, f"leave it out {kept}")


def _queue(queue: str | None, labels: Mapping[str, str]) -> Iterator[Problem]:
    if queue is not None and (named := labels.get(QUEUE_LABEL, queue)) != queue:
        yield Problem("queue", queue, f"is another than @task's label {QUEUE_LABEL}={named}", "give one of the two")


def _environment(arguments: TaskArguments, max_nodes: int) -> Iterator[Problem]:
    given = arguments.environment or {}
    unusable = {name: _unusable(name, text) for name, text in given.items()}
    yield from filter(None, unusable.values())
    usable = {name: text for name, text in given.items() if unusable[name] is None}
    yield from problems_of_environment(usable, "@task environment")
    if max_nodes == 1 and envvars.ENDPOINT in {*usable, *_template_environment(arguments)}:
        reason = "says where nodes meet, and one node meets none"
        yield Problem("@task environment", envvars.ENDPOINT, reason, "remove it")


def _unusable(name: object, text: object) -> Problem | None:
    """Why this cannot be a variable. Values may be secrets: they are never shown, only their type is."""
    where = "@task environment"
    # Kubernetes takes more names than a shell does.
    if not isinstance(name, str) or not re.fullmatch(r"[-.A-Za-z_][-.A-Za-z0-9_]*", name):
        return Problem(where, name, "is not a name of a variable", "use letters, digits and _")
    if not isinstance(text, str):
        return Problem(f"{where}[{name!r}]", type(text).__name__, "is not text", "use a str")
    if not can_be_given(text):
        reason = "cannot be the value of a variable"
        return Problem(f"{where}[{name!r}]", "str", reason, "remove NUL and lone surrogates")
    return None


def _template_environment(arguments: TaskArguments) -> dict[str, object]:
    listed = getattr(arguments.primary_container(), "env", None) or ()
    return {variable.name: variable.value for variable in listed}


def _resources(arguments: TaskArguments, layers: Layers) -> Iterator[Problem]:
    if arguments.resources is not None and (arguments.requests is not None or arguments.limits is not None):
        reason = "is given beside requests or limits, which say the same"
        yield Problem("resources", arguments.resources, reason, "keep resources, or requests and limits")
    yield from problems_of_amounts(*layers)


def _accelerator(accelerator: Any, pods: Mapping[str, Amounts], nproc: int | None) -> Iterator[Problem]:
    device, size = _of_accelerator(accelerator)
    named, (gpus, _) = f"{device} ({size})" if size else device, fewest_gpus(pods)
    if device.lower().startswith("tpu"):
        yield Problem("accelerator", named, "is a TPU, which neither Horovod nor torch ranks here can use", "use GPUs")
    if device and gpus is None:
        reason = "names a kind of GPU, but no GPU is requested, so pods would land on nodes without one"
        yield Problem("accelerator", named, reason, "add Resources(gpu=...), or drop accelerator")
    slices = size or any(name.startswith(MIG) for amounts in pods.values() for name in amounts["limits"])
    if slices and nproc is None and gpus is not None and gpus > 1:
        reason = f"cannot be derived from {gpus} slices: a process sees one MIG slice, and NCCL joins no two of a GPU"
        repair = "set nproc_per_node=1 and use nnodes=, or whole GPUs; set a higher number only for Gloo on the CPU"
        yield Problem("nproc_per_node", nproc, reason, repair)


def _of_accelerator(accelerator: Any) -> tuple[str, str]:
    """Device and size of a slice ("": whole devices), as flytekit sends them; a kind of GPU is no number of them."""
    if accelerator is None:
        return "", ""
    message = accelerator.to_flyte_idl()
    return message.device or type(accelerator).__name__, message.partition_size
