"""``with_overrides`` on a call of one of our tasks: what it changes, what it cannot, said when it is called.

The call is planned as the task was, with its arguments laid over the task's: what a task may not have, a call may not
make of it. The backend (Flyte v1.16.8, ``flytek8s/pod_helper.go``) replaces the task's whole pod by the pod template of
an override, lets a role's own resources and image win over the node's, and never hears of a ``task_config``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flytekit.loggers import logger

from ..compat import flytekit as flytekit_inside
from ..config.arguments import TaskArguments
from ..config.effective import countable, of_container, of_resources, sendable
from ..config.hints import hints_of_template
from ..config.options import SHARED_MEMORY_MOUNT
from ..config.plan import Plan, plan
from ..config.typed import is_text
from ..errors import ConfigError, Problem
from .jobspec import as_flytekits
from .serialization import SerializesToKubeflow

_RESOURCES = ("requests", "limits", "resources")
_PODS = ("accelerator", "pod_template", "shared_memory")
_CALL = "_safedist_call"
"""Of a node: what its calls of ``with_overrides`` have said so far."""


def guarded(stock: Callable[..., Any]) -> Callable[..., Any]:
    """flytekit's ``Node.with_overrides``, which looks at its arguments first where the node calls, or maps, a task of
    ours.

    Whatever has made the node (a call, ``map_task``, ``conditional``, ``create_node``, an imperative workflow) hands
    out this method. flytekit forgets the accelerator and the shared memory of an earlier call, and of its requests and
    limits what a later one does not say: they stay.
    """
    names = [name for name, one in inspect.signature(stock).parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(stock)
    def with_overrides(node: Any, *args: Any, **kwargs: Any) -> Any:
        task = node.run_entity
        if not isinstance(task, SerializesToKubeflow):
            return stock(node, *args, **kwargs)
        overrides = {**dict(zip(names[1:], args, strict=False)), **kwargs}
        call = _together(vars(node).get(_CALL, {}), overrides)
        dropped = list(_dropped(node, overrides, names))
        pods = _pods(task, call, overrides, dropped)
        stock(node, **{**{name: value for name, value in overrides.items() if name not in _RESOURCES}, **pods})
        vars(node)[_CALL] = call
        return node

    return with_overrides


def _together(before: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What this call and those before it say of pods; ``resources=`` is another way to say requests and limits."""
    new = {name: overrides[name] for name in (*_RESOURCES, *_PODS) if overrides.get(name) is not None}
    other = {"resources"} if {"requests", "limits"} & new.keys() else set(_RESOURCES) if "resources" in new else set()
    return {**{name: value for name, value in before.items() if name not in other}, **new}


def _pods(
    task: SerializesToKubeflow, call: Mapping[str, Any], overrides: Mapping[str, Any], dropped: list[Problem]
) -> Any:
    """What flytekit is to be told of a call's pods.

    Args:
        task: that is called.
        call: what this call and those before it say of pods.
        overrides: all that this one says.
        dropped: what flytekit would drop of that.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    resources = TaskArguments(**{name: call[name] for name in _RESOURCES if name in call})
    pods = {name: call[name] for name in _PODS if name in call}
    arguments = replace(task.arguments, **{"shared_memory": task.arguments.dev_shm() or None, **pods})
    planned, problems = plan(task.plan.config, arguments, task.plan, resources)
    problems += [*_without_effect(task, overrides), *dropped]
    fixed = [role.name for role in task.plan.roles if countable(of_resources("", role.written))]
    if planned is not None and fixed and "pod_template" in pods:
        for field, value in list(sendable(countable(of_container(arguments.primary_container()))).values())[:1]:
            reason = f"does not reach {' and '.join(fixed)}, whose own resources win"
            repair = "leave cpu, memory, GPUs and storage out of the template"
            problems.append(Problem(field, value, reason, repair))
    if planned is None or problems:
        raise ConfigError(problems, where={"with_overrides on": task.name})
    for hint in _hints(task.plan, overrides, fixed):
        logger.warning("with_overrides on %s: %s", task.name, hint)
    if "pod_template" in pods:
        from .pod import merged_template

        pods["pod_template"] = merged_template(arguments, planned)
        if arguments.dev_shm() and not task.arguments.dev_shm():
            pods["shared_memory"] = arguments.dev_shm()  # the task's template mounts it, and this one does not
    amounts = of_resources("", resources)
    return {**pods, **(as_flytekits(amounts) if countable(amounts) else {})}


def _dropped(node: Any, overrides: Mapping[str, Any], names: list[str]) -> Iterator[Problem]:
    """What flytekit drops without a word, or sends as nobody can read it; ``names`` are those of the arguments that
    ``with_overrides`` has."""
    for name in overrides:
        if name not in names and not name.startswith("cache_"):
            yield Problem(name, "set", "is no argument of with_overrides, which drops it", "leave it out")
    image = overrides.get("container_image")
    if image is not None and (not is_text(image) or "{{" in image):
        reason = "is sent as it is: flytekit builds no ImageSpec there, and fills in no {{.image...}}"
        yield Problem("container_image", image if is_text(image) else type(image).__name__, reason, "write the name")
    is_mapped = node.flyte_entity is not node.run_entity
    if is_mapped and overrides.get("pod_template") and not flytekit_inside.sends_pod_templates_of_mapped_tasks():
        reason = "of a mapped task is not sent by this flytekit"
        yield Problem("pod_template", "set", reason, "upgrade flytekit to 1.16.22 or later, or set it in @task")


def _without_effect(task: SerializesToKubeflow, overrides: Mapping[str, Any]) -> Iterator[Problem]:
    if overrides.get("task_config") is not None:  # a node's overrides hold none (core.TaskNodeOverrides)
        reason = "never reaches the cluster, where the task would run with the config that it is registered with"
        repair = "define a second task, with that config, that calls the same code"
        yield Problem("task_config", type(overrides["task_config"]).__name__, reason, repair)
    if overrides.get("shared_memory") is False and task.arguments.dev_shm():
        reason = f"does not take away the task's {SHARED_MEMORY_MOUNT}: flytekit sends nothing of it"
        yield Problem("shared_memory", "False", reason, "give a size, or define a second task")


def _hints(plan: Plan, overrides: Mapping[str, Any], fixed: list[str]) -> Iterator[str]:
    for role in plan.roles:
        image = getattr(role.written, "image", None)
        if overrides.get("container_image") is not None and image:
            yield f"{role.name} keeps its own image {image}"
        if role.name in fixed and any(overrides.get(name) is not None for name in _RESOURCES):
            yield f"{role.name} keeps its own resources"
    if overrides.get("pod_template") is not None:
        yield from hints_of_template(plan, replace(plan.arguments, pod_template=overrides["pod_template"]))
