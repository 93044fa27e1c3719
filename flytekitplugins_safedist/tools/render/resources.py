"""How the backend settles requests and limits of a container (``flytek8s/container_helper.go`` of Flyte v1.16.8).

Values are quantities as text; a name that is missing and one that is zero are told apart, as they are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config.quantities import canonical, canonical_list, value_of

NVIDIA_GPU = "nvidia.com/gpu"
_IDL_NAMES = {"CPU": "cpu", "MEMORY": "memory", "EPHEMERAL_STORAGE": "ephemeral-storage", "GPU": NVIDIA_GPU}
"""The names in a role's or a node's ``Resources``."""
_DEFAULTS = {"cpu": "1", "memory": "1Gi"}
"""Requests of a container that names none, where the platform does not say otherwise; there are no limits then."""
_GENERIC_GPU = "gpu"


@dataclass(frozen=True)
class Requirements:
    """``ResourceRequirements`` without claims."""

    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: Mapping[str, Any] | None) -> Requirements:
        """Those of a container in a manifest."""
        resources = resources or {}
        return cls(canonical_list(resources.get("requests")), canonical_list(resources.get("limits")))

    @classmethod
    def of_idl(cls, resources: Mapping[str, Any] | None) -> Requirements:
        """Those of a role or a node, as flyteidl has them; zeros are dropped (``ToK8sResourceList``)."""
        return cls(*(_idl_list((resources or {}).get(part, ())) for part in ("requests", "limits")))

    def __bool__(self) -> bool:
        return bool(self.requests or self.limits)

    def as_manifest(self) -> dict[str, dict[str, str]]:
        """Without empty parts."""
        return {name: dict(part) for name, part in (("requests", self.requests), ("limits", self.limits)) if part}

    def named(self) -> Requirements:
        """With Flyte's default name for ``gpu`` (``SanitizeGPUResourceRequirements``)."""
        return Requirements(_rename(self.requests), _rename(self.limits))

    def over(self, other: Requirements) -> Requirements:
        """These, and those of *other* that are not named here."""
        return Requirements({**other.requests, **self.requests}, {**other.limits, **self.limits})


@dataclass(frozen=True)
class Clamp:
    """A value that a container's own limit has made smaller without an error."""

    container: str
    name: str
    asked: str
    got: str


def settle(requirements: Requirements, *, fill: bool) -> Requirements:
    """Requests and limits stand in for each other, the defaults for both (``ApplyResourceOverrides``).

    Args:
        requirements: what the container has.
        fill: False: nothing is filled in, only bounded; but cpu and memory are named all the same, as zero.
    """
    requests, limits = dict(requirements.requests), dict(requirements.limits)
    names = ["cpu", "memory"] + [
        name for name in ("ephemeral-storage", NVIDIA_GPU) if name in requests or name in limits
    ]
    for name in names:
        request, limit = requests.get(name, "0"), limits.get(name, "0")
        if fill:
            request = _first(request, limit, _DEFAULTS.get(name, "0"))
            limit = _first(limit, request)
        requests[name], limits[name] = _at_most(request, limit), limit
    return Requirements(requests, limits)


def clamps(container: str, asked: Requirements, got: Requirements) -> list[Clamp]:
    """What became smaller than it was asked for."""
    found = []
    for before, after in ((asked.requests, got.requests), (asked.limits, got.limits)):
        for name, value in before.items():
            if name in after and value_of(after[name]) < value_of(value):
                found.append(Clamp(container, name, value, after[name]))
    return list(dict.fromkeys(found))


def _first(*values: str) -> str:
    return next((amount for amount in values if value_of(amount)), "0")


def _at_most(value: str, bound: str) -> str:
    return bound if value_of(bound) and value_of(value) > value_of(bound) else value


def _idl_list(entries: Any) -> dict[str, str]:
    known = [entry for entry in entries if entry.get("name") in _IDL_NAMES]
    named = {_IDL_NAMES[entry["name"]]: canonical(entry["value"]) for entry in known}
    return {name: value for name, value in named.items() if value_of(value)}


def _rename(resources: Mapping[str, str]) -> dict[str, str]:
    if _GENERIC_GPU not in resources:
        return dict(resources)
    return {name: amount for name, amount in resources.items() if name != _GENERIC_GPU} | {
        NVIDIA_GPU: resources[_GENERIC_GPU]
    }
