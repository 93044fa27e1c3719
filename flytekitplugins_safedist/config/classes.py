"""What is not of the class that its field takes: a problem of its own, and left out of what the other checks look at.

So every check after these may rely on classes, and all that is wrong is found at once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ..errors import Problem
from .gpus import TaskArguments, amounts_of
from .options import SafeDistributed
from .quantities import size_in_bytes

ROLES = {"master": "Master", "worker": "Worker", "launcher": "Launcher"}
_Found = tuple[str, object, Problem]
"""A field, what the other checks are to take it for, and the problem."""


def of_their_classes(
    config: SafeDistributed, arguments: TaskArguments
) -> tuple[SafeDistributed, TaskArguments, list[Problem]]:
    """*config* and *arguments* without what no check could look at, and a problem for each part that was."""
    in_config, in_arguments = list(_in_config(config)), list(_in_arguments(arguments))
    kept: Any = ({name: value for name, value, _ in found} for found in (in_config, in_arguments))
    problems = [problem for *_, problem in (*in_config, *in_arguments)]
    return replace(config, **next(kept)), replace(arguments, **next(kept)), problems


def has_class(value: object, name: str) -> bool:
    """Whether a class of that name is among those of *value*; two of Flyte's plugins have some of one name."""
    return any(cls.__name__ == name for cls in type(value).__mro__)


def problems_of_function(function: Callable[..., Any]) -> Iterator[Problem]:
    """A task's function returns its outputs."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "is a generator: a call of it runs nothing, and what it yields is no output"
        yield Problem("function", function.__name__, reason, "return the outputs")
    elif inspect.iscoroutinefunction(function):
        yield Problem("function", function.__name__, "is a coroutine, which no rank awaits", "write def, not async def")


def problem_of_template(template: object) -> Problem | None:
    """Why nothing can be read from a pod template, or None: everything that is read of it later, read once."""
    if not has_class(template, "PodTemplate"):
        return Problem("pod_template", template, "is not a PodTemplate", "use PodTemplate(pod_spec=V1PodSpec(...))")
    spec: Any = getattr(template, "pod_spec", None)
    try:
        if spec is not None:
            _read(spec)
    except (AttributeError, TypeError, ValueError) as error:
        reason = f"cannot be read: {type(error).__name__}: {error}"
        return Problem("pod_template.pod_spec", type(spec).__name__, reason, "make it of kubernetes.client's classes")
    return None


def _read(spec: Any) -> None:
    for container in [*(spec.containers or ()), *(spec.init_containers or ())]:
        listed = [container.name, container.command, container.args, container.ports]
        listed += [variable.name + (variable.value or "") for variable in container.env or ()]
        listed += [PurePosixPath(mount.mount_path) for mount in container.volume_mounts or ()]
        listed += [amounts_of(container, "requests"), amounts_of(container, "limits")]
    listed = [volume.name for volume in spec.volumes or ()]
    listed += [(toleration.key, toleration.effect) for toleration in spec.tolerations or ()]
    grace = spec.termination_grace_period_seconds
    if grace is not None and not isinstance(grace, int):
        raise TypeError(f"termination_grace_period_seconds={grace!r} is not a number")


def _in_config(config: SafeDistributed) -> Iterator[_Found]:
    for name, class_name in ROLES.items():
        role = getattr(config, name)
        if role is None:
            continue
        if not has_class(role, class_name):
            repair = f"import {class_name} from kfpytorch or kfmpi"
            yield name, None, Problem(f"{name}", role, f"is not a {class_name}", repair)
            continue
        kept = copy.copy(role)
        for field in ("requests", "limits"):
            unreadable = _problem_of_amounts(f"{name}.{field}", getattr(role, field))
            if unreadable is not None:
                setattr(kept, field, None)
                yield name, kept, unreadable
    policy = config.run_policy
    if policy is not None and not has_class(policy, "RunPolicy"):
        repair = "import RunPolicy from kfpytorch or kfmpi"
        yield "run_policy", None, Problem("run_policy", policy, "is not a RunPolicy", repair)


def _in_arguments(arguments: TaskArguments) -> Iterator[_Found]:
    for name in ("requests", "limits", "resources"):
        problem = _problem_of_amounts(name, getattr(arguments, name), pairs=name == "resources")
        if problem is not None:
            yield name, None, problem
    if arguments.resources is not None and (arguments.requests is not None or arguments.limits is not None):
        reason = "is given beside requests or limits, which say the same"
        problem = Problem("resources", arguments.resources, reason, "keep resources, or requests and limits")
        yield "resources", None, problem
    accelerator, template = arguments.accelerator, arguments.pod_template
    if accelerator is not None and not hasattr(accelerator, "to_flyte_idl"):
        repair = "use one of flytekit.extras.accelerators"
        yield "accelerator", None, Problem("accelerator", accelerator, "is not an accelerator", repair)
    if template is not None and (problem := problem_of_template(template)) is not None:
        yield "pod_template", None, problem
    memory: object = arguments.shared_memory
    environment: object = arguments.environment
    if memory is not None and not isinstance(memory, bool) and not is_size(memory):
        reason = "is not True, False or a quantity"
        yield "shared_memory", None, Problem("@task shared_memory", memory, reason, "write e.g. '64Gi'")
    if environment is not None and not isinstance(environment, Mapping):
        problem = Problem("@task environment", type(environment).__name__, "is not a mapping", 'use {"NAME": "value"}')
        yield "environment", None, problem


def is_size(value: object) -> bool:
    """*value* is text for Kubernetes, such as ``"200Gi"``, and at least one byte."""
    return isinstance(value, str) and bool(size_in_bytes(value))


def _problem_of_amounts(field: str, value: object, *, pairs: bool = False) -> Problem | None:
    if value is None:
        return None
    if not has_class(value, "Resources"):
        return Problem(field, value, "is not a Resources", 'use Resources(cpu="8", mem="32Gi")')
    if not pairs and any(isinstance(amount, (list, tuple)) for amount in vars(value).values()):
        repair = "give one amount for each, or use resources="
        return Problem(field, value, "holds a pair of request and limit, which only resources= takes", repair)
    return None
