"""The pod that Flyte's backend makes for a role (``flytek8s/{pod_helper,container_helper,k8s_resource_adds}.go``)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...config.quantities import canonical
from ...errors import RenderError
from .basetemplate import merge_metadata, merge_pod, resources_for
from .execution import Execution, secret_annotations
from .placement import add_accelerator
from .pod_templates import PodTemplates
from .resources import Requirements, settle


@dataclass(frozen=True)
class Run:
    """A task in an execution on a cluster: everything that decides what is created.

    ``pod_templates`` are the cluster's; None: it may have others than are known here.
    """

    task: Mapping[str, Any]
    secrets: tuple[Any, ...]
    execution: Execution
    pod_templates: PodTemplates | None = None

    @property
    def name(self) -> str:
        """Of the task, for messages."""
        return str(self.task["id"].get("name"))

    @property
    def custom(self) -> Mapping[str, Any]:
        """The backend plugin's message."""
        custom: Mapping[str, Any] = self.task.get("custom", {})
        return custom

    @property
    def pod_override(self) -> Mapping[str, Any] | None:
        """The pod template of ``with_overrides``, which replaces the task's."""
        override: Mapping[str, Any] | None = self.execution.overrides.get("podTemplate")
        return override if override is not None and override.get("podSpec") else None

    @property
    def primary(self) -> str:
        """The container that runs the task, by its name in the pod template."""
        source = self.task["config"] if self.pod_override is None else self.pod_override
        return str(source["primary_container_name" if self.pod_override is None else "primaryContainerName"])

    @property
    def extended(self) -> Mapping[str, Any]:
        """Accelerator and shared memory; the node's word replaces the task's, one by one."""
        return {**self.task.get("extendedResources", {}), **self.execution.overrides.get("extendedResources", {})}

    @property
    def base(self) -> Mapping[str, Any] | None:
        """The cluster's PodTemplate under this task's pods.

        Raises:
            RenderError: the task names one that the cluster does not have.
        """
        wanted = self.task.get("metadata", {}).get("podTemplateName")
        if not wanted or self.pod_templates is None:
            return None
        if wanted not in self.pod_templates:
            raise RenderError(f"the backend refuses the task: PodTemplate '{wanted}' does not exist")
        return self.pod_templates[wanted]

    def labels(self) -> dict[str, str]:
        """Of the execution; they win over all others."""
        return {**self.execution.labels, **({"inject-flyte-secrets": "true"} if self.secrets else {})}

    def annotations(self) -> dict[str, str]:
        """Of the execution, and its secrets."""
        return {**self.execution.annotations, **secret_annotations(list(self.secrets))}


@dataclass(frozen=True)
class PodSpec:
    """A pod as the backend makes it.

    Attributes:
        metadata: labels and annotations.
        spec: the pod's.
    """

    metadata: dict[str, dict[str, str]]
    spec: dict[str, Any]


def build_pod(run: Run, override: Requirements | None = None) -> PodSpec:
    """The pod of a role.

    Args:
        run: the task.
        override: the role's own resources, settled; None: the node's.

    Raises:
        RenderError: the backend would refuse the task.
    """
    source = run.task["k8sPod"] if run.pod_override is None else run.pod_override
    spec: dict[str, Any] = tidy(copy.deepcopy(source["podSpec"]))
    own = Requirements.of_idl(run.execution.overrides.get("resources")) if override is None else override
    for container in spec.get("initContainers", ()):
        _customise(run, container, own, init=True, fill=True)
    for container in spec["containers"]:
        is_primary = container["name"] == run.primary
        _customise(run, container, own if is_primary else Requirements(), init=False, fill=is_primary)
    _primary(run, spec)  # it is there
    spec.setdefault("restartPolicy", "Never")
    if run.execution.service_account:
        spec.setdefault("serviceAccountName", run.execution.service_account)
    metadata = _metadata(run)
    if run.base is not None:
        spec = merge_pod(run.base, spec, primary=run.primary)
        metadata = merge_metadata(run.base, metadata)
    if "gpuAccelerator" in run.extended:
        add_accelerator(spec, run.extended["gpuAccelerator"])
    if "sharedMemory" in run.extended:
        _add_shared_memory(run, spec, run.extended["sharedMemory"])
    if run.execution.overrides.get("containerImage"):
        _primary(run, spec)["image"] = run.execution.overrides["containerImage"]
    return PodSpec(metadata, spec)


def _metadata(run: Run) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"annotations": {}, "labels": {}}
    for source in (run.task["k8sPod"], run.pod_override or {}):
        for name, into in found.items():
            into.update(source.get("metadata", {}).get(name, {}))
    return found


def _primary(run: Run, spec: Mapping[str, Any]) -> dict[str, Any]:
    for entry in spec["containers"]:
        if entry["name"] == run.primary:
            found: dict[str, Any] = entry
            return found
    raise RenderError(
        f"the backend refuses the task: primary container [{run.primary}] not defined", where={"task": run.name}
    )


def _customise(run: Run, container: dict[str, Any], own: Requirements, *, init: bool, fill: bool) -> None:
    for name in ("command", "args"):
        if container.get(name):
            container[name] = [run.execution.fill(text) for text in container[name]]
    container["env"] = [*container.get("env", ()), *_variables(run)]
    stated = Requirements.of(container.get("resources"))
    asked = (own.over(stated) if fill else stated).over(resources_for(run.base, container["name"], init=init))
    settled = settle(asked, fill=fill)
    container["resources"] = {**container.get("resources", {}), **settled.as_manifest()}


def _variables(run: Run) -> list[dict[str, Any]]:
    task = run.task["id"]
    found = {
        "FLYTE_INTERNAL_EXECUTION_ID": run.execution.name,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": run.execution.project,
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": run.execution.domain,
        "FLYTE_ATTEMPT_NUMBER": str(run.execution.attempt),
    }
    for name in ("PROJECT", "DOMAIN", "NAME", "VERSION"):
        found[f"FLYTE_INTERNAL_TASK_{name}"] = task.get(name.lower(), "")
    # Go walks the execution's map in any order; its names are sorted here.
    return _listed([*found.items(), *sorted(run.execution.variables().items())])


def _listed(pairs: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, "value": str(value)} for name, value in pairs]


def _add_shared_memory(run: Run, spec: dict[str, Any], memory: Mapping[str, Any]) -> None:
    """``ApplySharedMemory``: never a second mount of one path or name."""
    name, path = memory["mountName"], memory["mountPath"]
    primary = _primary(run, spec)
    mounts = primary.get("volumeMounts", [])
    if any(entry["name"] == name for entry in [*spec.get("volumes", ()), *mounts]):
        raise RenderError(f"the backend refuses the task: a volume is already named {name}", where={"task": run.name})
    if any(mount["mountPath"] == path for mount in mounts):
        where = {"task": run.name, "container": run.primary}
        hint = "mount it in the pod template, or let the task ask for shared memory; not both"
        raise RenderError(
            f"the backend refuses the task: {path} is already mounted in container", where=where, hint=hint
        )
    volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": canonical(memory.get("sizeLimit") or "0")}}
    spec["volumes"] = [*spec.get("volumes", ()), volume]
    primary["volumeMounts"] = [*mounts, {"name": name, "mountPath": path}]


def tidy(value: Any) -> Any:
    """As Go's types read a protobuf Struct: numbers in it are doubles, quantities have one form, and what is empty is
    left out."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, item in value.items():
        if name in ("requests", "limits") and isinstance(item, dict):
            kept: Any = {key: canonical(amount) for key, amount in item.items()}
        else:
            kept = canonical(item) if name == "sizeLimit" else tidy(item)
        if kept not in ([], None, "") and not (kept == {} and name in ("requests", "limits", "resources")):
            found[name] = kept
    return found
