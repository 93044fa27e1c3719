"""From what the user wrote to one :class:`Plan`: every default decided, and all that is wrong found at once.

Pure, and when the ``@task`` decorator runs: not at serialization, not in the pod. Everything that is registered or
shown is made of the plan, and so is what agents and ranks of the job go by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import Problem
from .arguments import TaskArguments
from .effective import (
    NOTHING,
    POD,
    Amounts,
    Layers,
    effective,
    fewest_gpus,
    names_any,
    of_container,
    of_resources,
    sendable,
)
from .options import Hangs, Logs, Metrics, Preflight, Profile, SafeDistributed, SafeHorovod, Scratch, parse_nodes
from .quantities import size_in_bytes
from .registered import Registered
from .roles import Role, roles
from .typed import well_typed
from .validate import problems_of_job


@dataclass(frozen=True, kw_only=True)
class Plan(Registered):
    """A job that can run: what is registered of it, and what its agents and ranks go by besides.

    Attributes:
        config, arguments: what the user wrote.
        roles: of the job's pods; none for one node.
        resources: what the container that trains asks for, by role (``POD`` for one node).
        resources: what the container that trains asks for, by role; ``POD`` for one node.
        max_restarts, scratch, logs, hangs, metrics, preflight, profile: as configured.
        size_limit: scratch limit in bytes, or None.
        environment: the task's variables; they win over safedist's own defaults (``OMP_NUM_THREADS``).
    """

    config: SafeDistributed
    arguments: TaskArguments
    roles: tuple[Role, ...]
    resources: Mapping[str, Amounts] = field(hash=False)
    max_restarts: int
    scratch: Scratch
    size_limit: int | None
    logs: Logs
    hangs: Hangs
    metrics: Metrics
    preflight: Preflight | None
    profile: Profile | None
    environment: tuple[tuple[str, str], ...]

    @property
    def is_elastic(self) -> bool:
        """The number of nodes is a range."""
        return self.min_nodes != self.max_nodes


@dataclass(frozen=True)
class Call:
    """A call with ``with_overrides``.

    Attributes:
        task: the plan of the task, as it is registered.
        resources: what the call says of requests, limits and resources, which lies over the task's.
    """

    task: Plan
    resources: TaskArguments


def plan(
    config: SafeDistributed, arguments: TaskArguments, call: Call | None = None
) -> tuple[Plan | None, list[Problem]]:
    """Decide the job; or say everything that is wrong, and decide nothing.

    Args:
        config: the task's.
        arguments: of ``@task``; in a call with ``with_overrides`` also what it says of anything but resources.
        call: None: the task itself.
    """
    problems: list[Problem] = []
    readable, typed = well_typed(config, problems), well_typed(arguments, problems)
    called = call and replace(call, resources=well_typed(call.resources, problems))
    is_sized = "nnodes" not in {problem.field for problem in problems}
    layers = _layers(typed, members := roles(readable, is_sized=is_sized), called)
    problems += problems_of_job(readable, typed, members, layers, is_sized=is_sized)
    if problems:
        return None, problems
    (low, high), resources = parse_nodes(config.nnodes) or (1, 1), effective(*layers)
    gpus, _ = fewest_gpus(resources)
    planned = Plan(
        config=config,
        arguments=arguments,
        roles=members,
        resources=resources,
        backend="horovod" if isinstance(config, SafeHorovod) else "torch",
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=config.nproc_per_node or gpus or 1,
        nproc_is_open=config.nproc_per_node is None,
        gpus=gpus,
        max_restarts=config.max_restarts,
        max_replacements=_replacements(config),
        start_method=config.start_method,
        shared_caches=tuple(config.scratch.shared_caches),
        scratch=config.scratch,
        size_limit=size_in_bytes(config.scratch.size_limit),
        timeouts=config.timeouts,
        logs=config.logs,
        hangs=config.hangs,
        metrics=config.metrics,
        preflight=config.preflight,
        profile=config.profile,
        environment=tuple(sorted((arguments.environment or {}).items())),
    )
    return planned, []


def _layers(arguments: TaskArguments, members: tuple[Role, ...], call: Call | None) -> Layers:
    own = {role.name: of_resources(f"{role.name}.", role.written) for role in members} or {POD: NOTHING}
    task = of_resources("" if call is None else "@task's ", arguments)
    if call is not None:
        # A role that names anything is registered with all of its resources, those of the task's own template too.
        own = {name: sendable(call.task.resources[name]) if names_any(role) else role for name, role in own.items()}
    return of_container(arguments.primary_container()), task, own, of_resources("", call and call.resources)


def _replacements(config: SafeDistributed) -> int:
    """The budget for lost nodes. The operator fails a job in which containers were restarted ``backoff_limit`` times
    (training-operator v1.9.0, core/job.go, PastBackoffLimit): our own budget ends it before, with its cause."""
    limit = getattr(config.run_policy, "backoff_limit", None)
    return config.max_replacements if limit is None else max(0, min(config.max_replacements, limit - 1))
