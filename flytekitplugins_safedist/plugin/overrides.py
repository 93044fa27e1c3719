"""``with_overrides`` on a call of one of our tasks: what it changes, what it cannot, said when it is called.

The backend (Flyte v1.16.8, ``flytek8s/pod_helper.go``) replaces the task's whole pod by the pod template of an
override, lets a role's own resources and image win over the node's, and never hears of a ``task_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config.amounts import problems_of_amounts
from ..config.classes import of_their_classes, problem_of_template
from ..config.fields import SHARED_MEMORY_MOUNT
from ..config.gpus import TaskArguments
from ..config.options import SafeDistributed
from ..config.validate import mounted_paths, problems_of_template, warnings_of_template
from ..errors import ConfigError, Problem
from .pod_template import merged_template, shared_memory

if TYPE_CHECKING:
    from .serialization import Serialized

_ROLES = ("master", "worker", "launcher")


def guard(node: Any, task: str, serialized: Serialized, users_template: Any) -> None:
    """Have *node*, a fresh one of flytekit's that calls *task*, look at the arguments of ``with_overrides`` first."""
    stock: Callable[..., Any] = node.with_overrides

    def with_overrides(*args: Any, **kwargs: Any) -> Any:
        arguments = replace(serialized.arguments, pod_template=users_template)
        problems = list(problems_of_overrides(serialized, arguments, kwargs))
        if problems:
            raise ConfigError(problems, where={"with_overrides on": task})
        for warning in _warnings(serialized, kwargs):
            _warn(f"with_overrides on {task}: {warning}")
        if kwargs.get("pod_template") is not None:
            arguments = replace(arguments, pod_template=kwargs["pod_template"])
            kwargs["pod_template"] = merged_template(serialized.resolved, arguments)
        return stock(*args, **kwargs)

    node.with_overrides = with_overrides


def problems_of_overrides(
    serialized: Serialized, arguments: TaskArguments, overrides: Mapping[str, Any]
) -> Iterator[Problem]:
    """What these arguments of ``with_overrides`` cannot do for a task that asks for *asks*."""
    if overrides.get("task_config") is not None:
        yield no_task_config(overrides["task_config"])
    yield from _resources(serialized, overrides)
    if overrides.get("pod_template") is not None:
        yield from _pod_template(serialized, arguments, overrides)
    elif overrides.get("shared_memory") and SHARED_MEMORY_MOUNT in mounted_paths(arguments):
        yield _mounted_twice("shared_memory", overrides["shared_memory"])


def no_task_config(config: object) -> Problem:
    """Flyte has no place for it: a node's overrides hold no config (``core.TaskNodeOverrides``)."""
    reason = "never reaches the cluster, where the task would run with the config that it is registered with"
    repair = "define a second task, with that config, that calls the same code"
    return Problem("task_config", type(config).__name__, reason, repair)


def _resources(serialized: Serialized, overrides: Mapping[str, Any]) -> Iterator[Problem]:
    given = [name for name in ("requests", "limits", "resources") if overrides.get(name) is not None]
    if not given:
        return
    asked: Any = {name: overrides[name] for name in given}
    _, readable, problems = of_their_classes(SafeDistributed(), TaskArguments(**asked))
    yield from problems
    yield from problems_of_amounts(SafeDistributed(), readable)
    ranks, fixed = _ranks_and_fixed(serialized)
    if ranks and ranks == fixed:
        field = "worker" if ranks == ["worker"] else " and ".join(ranks)
        reason = f"changes nothing: the job's {field} names its own resources, which win"
        if serialized.job.workers_of_mpi is not None and not _own(serialized, "worker"):
            reason = "changes nothing: GPUs stand in the worker role of an MPIJob, or its launcher would hold some too"
        repair = "define a second task, with those resources, that calls the same code"
        yield Problem(given[0], overrides[given[0]], reason, repair)
    elif fixed and any(_names_gpu(overrides[name]) for name in given):
        reason = f"changes the GPUs of some nodes only: {' and '.join(fixed)} names its own resources"
        yield Problem(
            given[0], overrides[given[0]], reason, "every node needs the same number; drop the role's resources"
        )


def _ranks_and_fixed(serialized: Serialized) -> tuple[list[str], list[str]]:
    """The roles that run ranks, and those of them with resources of their own, by what is sent."""
    custom = serialized.job.custom or {}
    names = [name for name in ("master", "worker") if f"{name}Replicas" in custom]
    names = [name for name in names if name == "master" or custom["workerReplicas"].get("replicas")]
    return names, [name for name in names if custom[f"{name}Replicas"].get("resources")]


def _own(serialized: Serialized, role: str) -> bool:
    own = getattr(serialized.config, role, None)
    return any(getattr(own, name, None) for name in ("requests", "limits"))


def _names_gpu(resources: Any) -> bool:
    return getattr(resources, "gpu", None) is not None


def _pod_template(serialized: Serialized, arguments: TaskArguments, overrides: Mapping[str, Any]) -> Iterator[Problem]:
    template = overrides["pod_template"]
    if (unreadable := problem_of_template(template)) is not None:
        yield unreadable
        return
    theirs = replace(arguments, pod_template=template)
    yield from problems_of_template(serialized.config, theirs, max_nodes=serialized.resolved.max_nodes)
    brings = overrides.get("shared_memory") or shared_memory(arguments)
    if brings and SHARED_MEMORY_MOUNT in mounted_paths(theirs):
        yield _mounted_twice("pod_template", "mounts /dev/shm")


def _mounted_twice(field: str, value: object) -> Problem:
    reason = f"and the task both bring {SHARED_MEMORY_MOUNT}, which the backend refuses"
    repair = "keep one: size it with shared_memory=, or @task(shared_memory=False)"
    return Problem(field, value, reason, repair)


def _warnings(serialized: Serialized, overrides: Mapping[str, Any]) -> Iterator[str]:
    for role in _ROLES:
        own: Any = getattr(serialized.config, role, None)
        if overrides.get("container_image") is not None and getattr(own, "image", None):
            yield f"{role} keeps its own image {own.image}"
        if any(overrides.get(name) is not None for name in ("requests", "limits", "resources")) and _own(
            serialized, role
        ):
            yield f"{role} keeps its own resources"
    if overrides.get("pod_template") is not None:
        arguments = replace(serialized.arguments, pod_template=overrides["pod_template"])
        yield from warnings_of_template(arguments, serialized.resolved.timeouts)


def _warn(text: str) -> None:
    from flytekit.loggers import logger

    logger.warning(text)
