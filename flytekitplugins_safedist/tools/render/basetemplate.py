"""A cluster's PodTemplate under a task's pod (``flytek8s/pod_helper.go`` of Flyte v1.16.8, and ``imdario/mergo``).

Of the template's containers, those named ``default`` and ``primary`` (for init containers ``default-init`` and
``primary-init``) stand for all, and for the one that runs the task; others count where the pod has one of that name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .resources import Requirements


def resources_for(template: Mapping[str, Any] | None, container: str, *, init: bool) -> Requirements:
    """What the template gives a container that names nothing itself (``ExtractContainerResourcesFromPodTemplate``)."""
    spec = _spec(template)
    listed = spec.get("initContainers" if init else "containers", ())
    named = {entry["name"]: entry for entry in reversed(listed)}
    for name in (container, "primary-init" if init else "primary", "default-init" if init else "default"):
        if name in named:
            return Requirements.of(named[name].get("resources"))
    return Requirements()


def merge_pod(template: Mapping[str, Any], pod: Mapping[str, Any], *, primary: str) -> dict[str, Any]:
    """The pod's spec over the template's (``MergeBasePodSpecOntoTemplate``)."""
    spec = _spec(template)
    merged = _merge(spec, pod)
    merged["containers"] = _containers(spec.get("containers", ()), pod["containers"], primary=primary, suffix="")
    merged.pop("initContainers", None)
    if pod.get("initContainers"):
        # No init container is Flyte's own here: none is the primary one.
        merged["initContainers"] = _containers(
            spec.get("initContainers", ()), pod["initContainers"], primary="", suffix="-init"
        )
    return merged


def merge_metadata(template: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The pod's labels and annotations over the template's."""
    own = template["template"].get("metadata", {})
    return _merge({name: own[name] for name in ("labels", "annotations") if name in own}, metadata)


def _spec(template: Mapping[str, Any] | None) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = (template or {}).get("template", {}).get("spec") or {}
    return spec


def _containers(
    templates: Sequence[Mapping[str, Any]], containers: Sequence[Mapping[str, Any]], *, primary: str, suffix: str
) -> list[dict[str, Any]]:
    named = {container["name"]: container for container in templates}
    merged = []
    for container in containers:
        found: dict[str, Any] = dict(named.get(f"default{suffix}", {}))
        if container["name"] == primary:
            found = _merge(found, named.get(f"primary{suffix}", {}))
        elif container["name"] != f"default{suffix}":
            found = _merge(found, named.get(container["name"], {}))
        merged.append(_merge(found, container))
    return merged


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """mergo with override and appended slices: what is empty overrides nothing."""
    merged = copy.deepcopy(dict(under))
    for name, value in over.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            merged[name] = [*old, *copy.deepcopy(value)]
        elif name not in merged or value not in (None, "", 0, False, [], {}):
            merged[name] = copy.deepcopy(value)
    return merged
