"""``with_overrides`` on a call of one of our tasks: what it changes, what it cannot, said when it is called.

The backend (Flyte v1.16.8, ``flytek8s/pod_helper.go``) replaces the task's whole pod by the pod template of an
override, lets a role's own resources and image win over the node's, and never hears of a ``task_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config.asked import TaskArguments, gpus_of, problems_of_amounts
from ..config.options import SHARED_MEMORY_MOUNT
from ..config.plan import Plan
from ..config.typed import well_typed
from ..config.validate import problems_of_template, warnings_of_template
from ..errors import ConfigError, Problem
from .pod_template import merged_template, shared_memory

_RESOURCES = ("requests", "limits", "resources")


def guard(node: Any, task: str, plan: Plan, asked: TaskArguments) -> None:
    """Have *node*, a fresh one of flytekit's that calls *task*, look at the arguments of ``with_overrides`` first.

    Args:
        node: flytekit's.
        task: its name.
        plan: of the task.
        asked: what the task was given, its pod template as it is now.
    """
    stock: Callable[..., Any] = node.with_overrides

    def with_overrides(*args: Any, **kwargs: Any) -> Any:
        problems: list[Problem] = []
        given = well_typed(TaskArguments.from_kwargs(kwargs), problems)
        problems += _problems(plan, asked, given, kwargs)
        if problems:
            raise ConfigError(problems, where={"with_overrides on": task})
        for warning in _warnings(plan, kwargs):
            _warn(f"with_overrides on {task}: {warning}")
        if given.pod_template is not None:
            kwargs["pod_template"] = merged_template(replace(asked, pod_template=kwargs["pod_template"]), plan)
        return stock(*args, **kwargs)

    node.with_overrides = with_overrides


def no_task_config(config: object) -> Problem:
    """Flyte has no place for it: a node's overrides hold no config (``core.TaskNodeOverrides``)."""
    reason = "never reaches the cluster, where the task would run with the config that it is registered with"
    repair = "define a second task, with that config, that calls the same code"
    return Problem("task_config", type(config).__name__, reason, repair)


def _problems(
    plan: Plan, asked: TaskArguments, given: TaskArguments, overrides: Mapping[str, Any]
) -> Iterator[Problem]:
    if overrides.get("task_config") is not None:
        yield no_task_config(overrides["task_config"])
    yield from problems_of_amounts(given.amounts(), {})
    yield from _resources(plan, given)
    if given.pod_template is not None:
        theirs = replace(asked, pod_template=given.pod_template)
        yield from problems_of_template(plan.config, theirs, max_nodes=plan.max_nodes)
        brings = given.shared_memory or shared_memory(asked)
        if brings and SHARED_MEMORY_MOUNT in theirs.mounted_paths():
            yield _mounted_twice("pod_template", "mounts /dev/shm")
    elif given.shared_memory and SHARED_MEMORY_MOUNT in asked.mounted_paths():
        yield _mounted_twice("shared_memory", given.shared_memory)


def _resources(plan: Plan, given: TaskArguments) -> Iterator[Problem]:
    name = next((name for name in _RESOURCES if getattr(given, name) is not None), None)
    if name is None:
        return
    value, fixed = getattr(given, name), [role for role in plan.roles if role.amounts()]
    if fixed and len(fixed) == len(plan.roles):
        reason = f"changes nothing: the job's {_listed(fixed)} names its own resources, which win"
        repair = "define a second task, with those resources, that calls the same code"
        yield Problem(name, value, reason, repair)
    elif fixed and gpus_of(given.amounts()) is not None:
        reason = f"changes the GPUs of some nodes only: {_listed(fixed)} names its own resources"
        yield Problem(name, value, reason, "every node needs the same number; drop the role's resources")


def _listed(roles: list[Any]) -> str:
    return " and ".join(role.name for role in roles)


def _mounted_twice(field: str, value: object) -> Problem:
    reason = f"and the task both bring {SHARED_MEMORY_MOUNT}, which the backend refuses"
    repair = "keep one: size it with shared_memory=, or @task(shared_memory=False)"
    return Problem(field, value, reason, repair)


def _warnings(plan: Plan, overrides: Mapping[str, Any]) -> Iterator[str]:
    for role in plan.roles:
        image = getattr(role.written, "image", None)
        if overrides.get("container_image") is not None and image:
            yield f"{role.name} keeps its own image {image}"
        if role.amounts() and any(overrides.get(name) is not None for name in _RESOURCES):
            yield f"{role.name} keeps its own resources"
    if overrides.get("pod_template") is not None:
        arguments = replace(plan.arguments, pod_template=overrides["pod_template"])
        yield from warnings_of_template(arguments, plan.timeouts)


def _warn(text: str) -> None:
    from flytekit.loggers import logger

    logger.warning(text)
