"""How the backend settles requests and limits of a container (``flytek8s/container_helper.go`` of Flyte v1.16.8).

Values are quantities as text; a name that is missing and one that is zero are told apart, as they are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config.quantities import canonical, canonical_list, value_of

DEFAULTS = {"cpu": "1", "memory": "1Gi"}
"""What a container gets that asks for nothing: ``task_resources`` of Flyte's own charts. It has no limits."""
GPU = "nvidia.com/gpu"
"""What Flyte calls a GPU, where the platform names no other."""
_IDL_NAMES = {"CPU": "cpu", "MEMORY": "memory", "EPHEMERAL_STORAGE": "ephemeral-storage", "GPU": GPU}


@dataclass(frozen=True)
class Requirements:
    """``ResourceRequirements`` without claims."""

    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: Mapping[str, Any] | None) -> Requirements:
        """Those of a container in a manifest, ``gpu`` under its full name (``SanitizeGPUResourceRequirements``)."""
        parts = (canonical_list((resources or {}).get(part)) for part in ("requests", "limits"))
        return cls(*({GPU if name == "gpu" else name: amount for name, amount in part.items()} for part in parts))

    @classmethod
    def of_idl(cls, resources: Mapping[str, Any] | None) -> Requirements:
        """Those of a role or a node, as flyteidl has them; zeros are dropped (``ToK8sResourceList``)."""
        return cls(*(_idl_list((resources or {}).get(part, ())) for part in ("requests", "limits")))

    def as_manifest(self) -> dict[str, dict[str, str]]:
        """Without empty parts."""
        return {name: dict(part) for name, part in (("requests", self.requests), ("limits", self.limits)) if part}

    def over(self, other: Requirements) -> Requirements:
        """These, and those of *other* that are not named here."""
        return Requirements({**other.requests, **self.requests}, {**other.limits, **self.limits})


def settle(requirements: Requirements, *, fill: bool) -> Requirements:
    """Requests and limits stand in for each other, and the defaults for both; a limit bounds its request
    (``ApplyResourceOverrides``).

    Args:
        requirements: what the container has.
        fill: False: nothing is filled in, only bounded; but cpu and memory are named all the same, as zero.
    """
    requests, limits = dict(requirements.requests), dict(requirements.limits)
    names = ["cpu", "memory"] + [name for name in ("ephemeral-storage", GPU) if name in requests or name in limits]
    for name in names:
        request, limit = requests.get(name, "0"), limits.get(name, "0")
        if fill:
            request = _first(request, limit, DEFAULTS.get(name, "0"))
            limit = _first(limit, request)
        is_above = value_of(limit) and value_of(request) > value_of(limit)
        requests[name], limits[name] = limit if is_above else request, limit
    return Requirements(requests, limits)


def _first(*values: str) -> str:
    return next((amount for amount in values if value_of(amount)), "0")


def _idl_list(entries: Any) -> dict[str, str]:
    named = {
        _IDL_NAMES[entry["name"]]: canonical(entry["value"]) for entry in entries if entry.get("name") in _IDL_NAMES
    }
    return {name: value for name, value in named.items() if value_of(value)}
