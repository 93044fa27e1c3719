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

from ..config.arguments import TaskArguments
from ..config.effective import names_any, of_container, of_resources, sendable
from ..config.options import SHARED_MEMORY_MOUNT
from ..config.plan import Call, Plan, plan
from ..config.validate import warnings_of_template
from ..errors import ConfigError, Problem
from .jobspec import as_flytekits
from .pod_template import merged_template, shared_memory
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
        said = {**dict(zip(names[1:], args, strict=False)), **kwargs}
        call = _together(vars(node).get(_CALL, {}), said)
        overrides = _checked(task, call, said, names)
        stock(node, **{**{name: value for name, value in said.items() if name not in _RESOURCES}, **overrides})
        vars(node)[_CALL] = call
        return node

    return with_overrides


def _together(before: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What this call and those before it say of pods; ``resources=`` is another way to say requests and limits."""
    new = {name: said[name] for name in (*_RESOURCES, *_PODS) if said.get(name) is not None}
    other = {"resources"} if {"requests", "limits"} & new.keys() else set(_RESOURCES) if "resources" in new else set()
    return {**{name: value for name, value in before.items() if name not in other}, **new}


def _checked(task: SerializesToKubeflow, call: Mapping[str, Any], said: Mapping[str, Any], names: list[str]) -> Any:
    """What flytekit is to be told of a call's pods.

    Args:
        task: that is called.
        call: what this call and those before it say of pods.
        said: all that this one says.
        names: of the arguments that ``with_overrides`` has.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    resources = TaskArguments(**{name: call[name] for name in _RESOURCES if name in call})
    pods = {name: call[name] for name in _PODS if name in call}
    arguments = replace(task.arguments, **pods)
    planned, problems = plan(task.plan.config, arguments, Call(task.plan, resources))
    problems += _without_effect(said, names)
    if planned is not None:
        problems += [*_of_shared_memory(task.arguments, arguments, pods), *_of_template(task.plan, arguments, pods)]
    if planned is None or problems:
        raise ConfigError(problems, where={"with_overrides on": task.name})
    for warning in _warnings(task.plan, said):
        _warn(f"with_overrides on {task.name}: {warning}")
    if "pod_template" in pods:
        pods["pod_template"] = merged_template(arguments, planned)
        if shared_memory(arguments) and not shared_memory(task.arguments):
            pods["shared_memory"] = shared_memory(arguments)  # the task's template mounts it, and this one does not
    amounts = of_resources("", resources)
    return {**pods, **(as_flytekits(amounts) if names_any(amounts) else {})}


def _without_effect(said: Mapping[str, Any], names: list[str]) -> Iterator[Problem]:
    """Flyte has no place for a config: a node's overrides hold none (``core.TaskNodeOverrides``)."""
    if said.get("task_config") is not None:
        reason = "never reaches the cluster, where the task would run with the config that it is registered with"
        repair = "define a second task, with that config, that calls the same code"
        yield Problem("task_config", type(said["task_config"]).__name__, reason, repair)
    for name in said:
        if name not in names and not name.startswith("cache_"):
            yield Problem(name, "set", "is no argument of with_overrides, which drops it", "leave it out")


def _of_shared_memory(task: TaskArguments, call: TaskArguments, pods: Mapping[str, Any]) -> Iterator[Problem]:
    if not shared_memory(task):
        return
    if "shared_memory" not in pods and SHARED_MEMORY_MOUNT in call.mounted_paths():
        reason = f"and the task both bring {SHARED_MEMORY_MOUNT}, which the backend refuses"
        repair = "keep one: size it with shared_memory=, or @task(shared_memory=False)"
        yield Problem("pod_template", f"mounts {SHARED_MEMORY_MOUNT}", reason, repair)
    elif pods.get("shared_memory") is False:
        reason = f"does not take away the task's {SHARED_MEMORY_MOUNT}: flytekit sends nothing of it"
        yield Problem("shared_memory", "False", reason, "give a size, or define a second task")


def _of_template(plan: Plan, call: TaskArguments, pods: Mapping[str, Any]) -> Iterator[Problem]:
    amounts = sendable(of_container(call.primary_container() if "pod_template" in pods else None))
    fixed = " and ".join(role.name for role in plan.roles if names_any(of_resources("", role.written)))
    if fixed and names_any(amounts):
        field, value = next(amount for listed in amounts.values() for amount in listed.values())
        reason = f"does not reach {fixed}, whose own resources win"
        yield Problem(field, value, reason, "leave cpu, memory, GPUs and storage out of the template")


def _warnings(plan: Plan, said: Mapping[str, Any]) -> Iterator[str]:
    for role in plan.roles:
        image = getattr(role.written, "image", None)
        if said.get("container_image") is not None and image:
            yield f"{role.name} keeps its own image {image}"
        if names_any(of_resources("", role.written)) and any(said.get(name) is not None for name in _RESOURCES):
            yield f"{role.name} keeps its own resources"
    if said.get("pod_template") is not None:
        yield from warnings_of_template(replace(plan.arguments, pod_template=said["pod_template"]), plan.timeouts)


def _warn(text: str) -> None:
    from flytekit.loggers import logger

    logger.warning(text)
