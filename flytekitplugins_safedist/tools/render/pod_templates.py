"""The cluster's PodTemplates: read from files, and laid under a task's pod (``flytek8s/pod_helper.go`` of Flyte
v1.16.8, and ``imdario/mergo``).

Of a template's containers, those named ``default`` and ``primary`` (for init containers ``default-init`` and
``primary-init``) stand for all, and for the one that runs the task; others count where the pod has one of that name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RenderError

PodTemplates = Mapping[str, Mapping[str, Any]]
"""By name."""


def read_pod_templates(files: Sequence[Path]) -> PodTemplates:
    """The PodTemplates of these files.

    Raises:
        RenderError: a file cannot be read or holds no PodTemplate.
    """
    import yaml

    found = {}
    for file in files:
        try:
            document = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise RenderError("the file cannot be read", where={"file": file}, seen=error) from error
        if not isinstance(document, dict):
            raise RenderError("the file does not hold a YAML mapping", where={"file": file})
        name = (document.get("metadata") or {}).get("name")
        if document.get("kind", "PodTemplate") != "PodTemplate" or not name or "template" not in document:
            raise RenderError(
                "this is not a PodTemplate", where={"file": file}, expected="kind: PodTemplate with a name"
            )
        found[name] = document
    return found


def resources_under(template: Mapping[str, Any] | None, container: str, *, init: bool) -> Mapping[str, Any]:
    """What the template gives a container that names nothing itself (``ExtractContainerResourcesFromPodTemplate``)."""
    listed = _spec(template or {}).get("initContainers" if init else "containers", ())
    named = {entry["name"]: entry for entry in reversed(listed)}
    suffix = "-init" if init else ""
    names = (container, f"primary{suffix}", f"default{suffix}")
    found: Mapping[str, Any] = next((named[name] for name in names if name in named), {})
    return found.get("resources") or {}


def laid_over(
    template: Mapping[str, Any], metadata: Mapping[str, Any], spec: Mapping[str, Any], *, primary: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pod's metadata and spec over the template's (``MergeBasePodSpecOntoTemplate``)."""
    own, base = template["template"].get("metadata", {}), _spec(template)
    found = merged(base, spec)
    found["containers"] = list(_containers(base.get("containers", ()), spec["containers"], primary=primary))
    found.pop("initContainers", None)
    if spec.get("initContainers"):
        # No init container is Flyte's own here: none is the primary one.
        inits = _containers(base.get("initContainers", ()), spec["initContainers"], primary="", suffix="-init")
        found["initContainers"] = list(inits)
    return merged({name: own[name] for name in ("labels", "annotations") if name in own}, metadata), found


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """mergo with override and appended slices: what is empty overrides nothing."""
    found = copy.deepcopy(dict(under))
    for name, value in over.items():
        old = found.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            found[name] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            found[name] = [*old, *copy.deepcopy(value)]
        elif name not in found or value not in (None, "", 0, False, [], {}):
            found[name] = copy.deepcopy(value)
    return found


def _spec(template: Mapping[str, Any]) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = template.get("template", {}).get("spec") or {}
    return spec


def _containers(
    templates: Sequence[Mapping[str, Any]], containers: Sequence[Mapping[str, Any]], *, primary: str, suffix: str = ""
) -> Iterator[dict[str, Any]]:
    named = {container["name"]: container for container in templates}
    for container in containers:
        name = container["name"]
        own = f"primary{suffix}" if name == primary else name
        under = named.get(f"default{suffix}", {})
        if own != f"default{suffix}":
            under = merged(under, named.get(own, {}))
        yield merged(under, container)
