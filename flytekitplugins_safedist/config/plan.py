"""From what the user wrote to one :class:`Plan`: every default decided, and all that is wrong found at once.

Pure, and when the ``@task`` decorator runs: not at serialization, not in the pod. Everything that is registered or
shown is made of the plan, and so is what agents and ranks of the job go by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import Problem
from .arguments import TaskArguments
from .effective import POD, Amounts, Layers, countable, effective, fewest_gpus, of_container, of_resources, sendable
from .options import SafeDistributed, SafeHorovod, parse_nodes
from .registered import Registered
from .roles import Role, roles
from .typed import well_typed
from .validate import has_slices, problems_of_job


@dataclass(frozen=True, kw_only=True)
class Plan(Registered):
    """A job that can run: what is registered of it, and what its agents and ranks go by besides.

    Attributes:
        config, arguments: what the user wrote.
        roles: of the job's pods; none for one node.
        resources: what the container that trains asks for, by role; ``POD`` for one node.
    """

    config: SafeDistributed
    arguments: TaskArguments
    roles: tuple[Role, ...]
    resources: Mapping[str, Amounts] = field(hash=False)


def plan(
    config: SafeDistributed,
    arguments: TaskArguments,
    task: Plan | None = None,
    call: TaskArguments | None = None,
    *,
    decks: tuple[str, ...] | None = None,
) -> tuple[Plan | None, list[Problem]]:
    """Decide the job; or say everything that is wrong, and decide nothing.

    Args:
        config: the task's.
        arguments: of ``@task``; in a call with ``with_overrides`` also what it says of anything but resources.
        task: that is called, as it is registered; None: this is the task itself.
        call: the resources of the call.
        decks: that the task shows of flytekit's own, by name; None: no deck at all.
    """
    problems: list[Problem] = []
    readable, typed = well_typed(config, problems), well_typed(arguments, problems)
    low, high = parse_nodes(config.nnodes) or (0, 0)
    members = roles(readable, low, high)
    layers = _layers(typed, members, task, call and well_typed(call, problems))
    problems += problems_of_job(readable, typed, members, layers, (low, high))
    if problems:
        return None, problems
    resources = effective(*layers)
    gpus, _ = fewest_gpus(resources)
    copied = {name: getattr(config, name) for name in Plan.__dataclass_fields__ if hasattr(config, name)}
    decided = {
        "config": config,
        "arguments": arguments,
        "min_nodes": low,
        "max_nodes": high,
        "nproc_per_node": config.nproc_per_node or gpus or 1,
        "nproc_is_open": config.nproc_per_node is None,
        "gpus": 1 if gpus and has_slices(resources, arguments.accelerator) else gpus,
        "max_replacements": _replacements(config),
        "backend": "horovod" if isinstance(config, SafeHorovod) else "torch",
        "roles": members,
        "resources": resources,
        "variables": tuple(sorted(arguments.environment or ())),
        "decks": decks,
    }
    return Plan(**{**copied, **decided}), []


def _layers(
    arguments: TaskArguments, members: tuple[Role, ...], task: Plan | None, call: TaskArguments | None
) -> Layers:
    own = {role.name: of_resources(f"{role.name}.", role.written) for role in members} or {POD: {}}
    if task is not None:
        # A role that names anything is registered with all of its resources, those of the task's own template too.
        own = {name: sendable(task.resources[name]) if countable(role) else role for name, role in own.items()}
    of_task = of_resources("" if task is None else "@task's ", arguments)
    return of_container(arguments.primary_container()), of_task, own, of_resources("", call)


def _replacements(config: SafeDistributed) -> int:
    """The budget for lost nodes. The operator fails a job in which containers were restarted ``backoff_limit`` times
    (training-operator v1.9.0, core/job.go, PastBackoffLimit): our own budget ends it before, with its cause."""
    limit = getattr(config.run_policy, "backoff_limit", None)
    return config.max_replacements if limit is None else max(0, min(config.max_replacements, limit - 1))
