"""What a task, a role or a container asks for: amounts that Kubernetes can read, and none above its own limit.

A count of GPUs has more rules (:mod:`.gpus`). The backend lowers a request that is above its limit without a word
(``flytek8s/container_helper.go`` of v1.16.8, ``ApplyResourceOverrides``); for a container that it leaves alone, the API
server refuses the pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Problem, RenderError
from .gpus import TaskArguments, amounts_of
from .options import SafeDistributed
from .quantities import value_of

_Amounts = Mapping[str, tuple[str, object]]
"""Resource -> the field that asks for it, and the amount."""


def problems_of_amounts(config: SafeDistributed, arguments: TaskArguments) -> Iterator[Problem]:
    """Check the task's own resources, those of each role over them, and those of the pod template's containers."""
    requests, limits = _of_task(arguments)
    yield from _problems({}, requests, {}, limits)
    for role in ("master", "worker", "launcher"):
        own = [_of(f"{role}.{part}", _named(getattr(getattr(config, role), part, None))) for part in _PARTS]
        # The launcher has what it names, and nothing of the task's (see jobspec).
        below = ({}, {}) if role == "launcher" else (requests, limits)
        yield from _problems(below[0], own[0], below[1], own[1])
    spec = getattr(arguments.pod_template, "pod_spec", None)
    for container in [*(getattr(spec, "containers", None) or ()), *(getattr(spec, "init_containers", None) or ())]:
        found = [_of(f"pod_template {container.name} {part}", amounts_of(container, part)) for part in _PARTS]
        yield from _problems({}, found[0], {}, found[1])


_PARTS = ("requests", "limits")


def _of(field: str, amounts: Mapping[str, object]) -> _Amounts:
    return {name: (f"{field}.{name}", value) for name, value in amounts.items() if value is not None and name != "gpu"}


def _named(resources: Any) -> Mapping[str, object]:
    """flytekit's ``Resources`` as a mapping."""
    return {} if resources is None else vars(resources)


def _of_task(arguments: TaskArguments) -> tuple[_Amounts, _Amounts]:
    """Requests and limits, ``resources=`` taken apart."""
    requests, limits = dict(_of("requests", _named(arguments.requests))), dict(_of("limits", _named(arguments.limits)))
    for name, (field, value) in _of("resources", _named(arguments.resources)).items():
        if isinstance(value, (list, tuple)):
            requests[name], limits[name] = (f"{field}[0]", value[0]), (f"{field}[1]", value[1])
        else:
            requests[name] = field, value
    return requests, limits


def _problems(
    under_requests: _Amounts, requests: _Amounts, under_limits: _Amounts, limits: _Amounts
) -> Iterator[Problem]:
    """What is wrong with *requests* and *limits*, which lie over others that have been checked."""
    for field, value in (*requests.values(), *limits.values()):
        if _number(value) is None:
            yield Problem(field, value, "is not an amount that Kubernetes can read", "write e.g. '2', '500m' or '64Gi'")
    asked, allowed = {**under_requests, **requests}, {**under_limits, **limits}
    for name in [name for name in asked if name in allowed and (name in requests or name in limits)]:
        (field, value), (limit_field, limit) = asked[name], allowed[name]
        low, high = _number(value), _number(limit)
        if low is not None and high is not None and high and low > high:
            repair = "raise the limit, or lower the request"
            yield Problem(field, value, f"is above {limit_field}={limit!r}", repair)


def _number(value: object) -> Any:
    try:
        number = value_of(value)
    except RenderError:
        return None
    return number if number >= 0 else None
