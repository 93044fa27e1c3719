"""Which nodes a pod may run on: the accelerator that the task names (``flytek8s/pod_helper.go`` of Flyte v1.16.8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .resources import GPU

_DEVICE = "k8s.amazonaws.com/accelerator"
_PARTITION = "k8s.amazonaws.com/gpu-partition-size"


def add_accelerator(spec: dict[str, Any], accelerator: Mapping[str, Any]) -> None:
    """Nodes with that GPU, when the pod asks for a GPU at all (``ApplyGPUNodeSelectors``)."""
    if not any(GPU in container.get("resources", {}).get("limits", {}) for container in spec["containers"]):
        return
    if accelerator.get("device"):
        _require_value(spec, _DEVICE, accelerator["device"])
    if accelerator.get("unpartitioned"):
        _require(spec, {"key": _PARTITION, "operator": "DoesNotExist"})
    elif accelerator.get("partitionSize"):
        _require_value(spec, _PARTITION, accelerator["partitionSize"])


def _require_value(spec: dict[str, Any], label: str, value: str) -> None:
    _require(spec, {"key": label, "operator": "In", "values": [value]})
    toleration = {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
    spec["tolerations"] = [*spec.get("tolerations", ()), toleration]


def _require(spec: dict[str, Any], requirement: Mapping[str, Any]) -> None:
    """Into every term: terms are alternatives, of which one is enough (``AddRequiredNodeSelectorRequirements``)."""
    node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    if not required.get("nodeSelectorTerms"):
        required["nodeSelectorTerms"] = [{}]
    for term in required["nodeSelectorTerms"]:
        term["matchExpressions"] = [*term.get("matchExpressions", ()), dict(requirement)]
