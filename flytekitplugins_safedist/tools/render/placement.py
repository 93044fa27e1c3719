"""Which nodes a pod may run on: the platform's settings, and the accelerator that the task names."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from .platform import Cluster


def add_platform_placement(spec: dict[str, Any], cluster: Cluster, *, service_account: str | None, spot: bool) -> None:
    """``UpdatePod``: what the platform's configuration adds; *spot*: the task is interruptible."""
    spec.setdefault("restartPolicy", "Never")
    tolerations = [
        *_for_resources(spec, cluster),
        *((cluster.setting("interruptible-tolerations") or ()) if spot else ()),
    ]
    tolerations += [*(cluster.setting("default-tolerations") or ()), *spec.get("tolerations", ())]
    if tolerations:
        spec["tolerations"] = copy.deepcopy(tolerations)
    if service_account:
        spec.setdefault("serviceAccountName", service_account)
    if cluster.setting("scheduler-name"):
        spec.setdefault("schedulerName", cluster.setting("scheduler-name"))
    selector = {**(cluster.setting("default-node-selector") or {}), **spec.get("nodeSelector", {})}
    if spot:
        selector |= cluster.setting("interruptible-node-selector") or {}
    if selector:
        spec["nodeSelector"] = selector
    for name, setting in (
        ("affinity", "default-affinity"),
        ("securityContext", "default-pod-security-context"),
        ("dnsConfig", "default-pod-dns-config"),
    ):
        if cluster.setting(setting) is not None:
            spec.setdefault(name, copy.deepcopy(cluster.setting(setting)))
    if cluster.setting("enable-host-networking-pod") is not None:
        spec["hostNetwork"] = cluster.setting("enable-host-networking-pod")
        if not spec["hostNetwork"]:
            del spec["hostNetwork"]
    kind = "interruptible" if spot else "non-interruptible"
    requirement = cluster.setting(f"{kind}-node-selector-requirement")
    if requirement:
        _require(spec, requirement)


def add_accelerator(spec: dict[str, Any], cluster: Cluster, accelerator: Mapping[str, Any]) -> None:
    """Nodes with that GPU, when the pod asks for a GPU at all (``ApplyGPUNodeSelectors``)."""
    if not any(cluster.gpu in container.get("resources", {}).get("limits", {}) for container in spec["containers"]):
        return
    device, partition = cluster.setting("gpu-device-node-label"), cluster.setting("gpu-partition-size-node-label")
    if accelerator.get("device"):
        _require_value(spec, device, accelerator["device"])
    if accelerator.get("unpartitioned"):
        without = {"key": partition, "operator": "DoesNotExist"}
        _require(spec, cluster.setting("gpu-unpartitioned-node-selector-requirement") or without)
        if cluster.setting("gpu-unpartitioned-toleration"):
            spec["tolerations"] = [*spec.get("tolerations", ()), dict(cluster.setting("gpu-unpartitioned-toleration"))]
    elif accelerator.get("partitionSize"):
        _require_value(spec, partition, accelerator["partitionSize"])


def label_of_slices(accelerator: Mapping[str, Any]) -> dict[str, str]:
    """How much of a GPU a partition is, of seven slices, by which Flyte 2 bills (``parseMigSlices``)."""
    found = re.fullmatch(r"(\d+)g\.\d+gb", accelerator.get("partitionSize", ""))
    return {"platform.union.ai/gpu-partition-slices": found[1]} if found else {}


def add_tolerations_for_resources(spec: dict[str, Any], cluster: Cluster) -> None:
    """``AddTolerationsForExtendedResources``: only in an operator's job, not in a pod of Flyte's own."""
    wanted = cluster.setting("add-tolerations-for-extended-resources") or ()
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    requested = {name for container in containers for name in container.get("resources", {}).get("requests", {})}
    for name in sorted(requested.intersection(wanted)):
        toleration = {"key": name, "operator": "Exists", "effect": "NoSchedule"}
        if toleration not in spec.get("tolerations", ()):
            spec["tolerations"] = [*spec.get("tolerations", ()), toleration]


def _for_resources(spec: Mapping[str, Any], cluster: Cluster) -> list[Any]:
    configured: Mapping[str, Any] = cluster.setting("resource-tolerations") or {}
    named = {
        name for container in spec["containers"] for part in ("requests", "limits") for name in _part(container, part)
    }
    return [toleration for name in sorted(named) for toleration in configured.get(name, ())]


def _part(container: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = container.get("resources", {}).get(part, {})
    return found


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
        term["matchExpressions"] = [*term.get("matchExpressions", ()), copy.deepcopy(dict(requirement))]
