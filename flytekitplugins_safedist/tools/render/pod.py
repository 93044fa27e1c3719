"""The pod that Flyte's backend makes for a role: ``flytek8s/{pod_helper,container_helper,k8s_resource_adds}.go`` of
Flyte v1.16.8.

Requests and limits are quantities as text; a name that is missing and one that is zero are told apart, as there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config.quantities import canonical, value_of
from ...errors import RenderError
from .execution import Execution, secret_annotations
from .pod_templates import PodTemplates, laid_over, resources_under

Amounts = Mapping[str, Mapping[str, str]]
"""Requests and limits, by these names; both are there."""

DEFAULTS = {"cpu": "1", "memory": "1Gi"}
"""What a container gets that asks for nothing: ``task_resources`` of Flyte's own charts. It has no limits."""
GPU = "nvidia.com/gpu"
"""What Flyte calls a GPU, where the platform names no other."""
_IDL_NAMES = {"CPU": "cpu", "MEMORY": "memory", "EPHEMERAL_STORAGE": "ephemeral-storage", "GPU": GPU}
_PARTS = ("requests", "limits")
_DEVICE = "k8s.amazonaws.com/accelerator"
_PARTITION = "k8s.amazonaws.com/gpu-partition-size"


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
    def pod_override(self) -> Mapping[str, Any]:
        """The pod template of ``with_overrides``, which replaces the task's; empty where there is none."""
        override: Mapping[str, Any] = self.execution.overrides.get("podTemplate", {})
        return override if override.get("podSpec") else {}

    @property
    def primary(self) -> str:
        """The container that runs the task, by its name in the pod template."""
        override = self.pod_override
        return str(override["primaryContainerName"] if override else self.task["config"]["primary_container_name"])

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
            raise self.refused(f"PodTemplate '{wanted}' does not exist")
        return self.pod_templates[wanted]

    def refused(self, why: str, hint: str = "") -> RenderError:
        """The error for a task of which the backend makes nothing."""
        return RenderError(
            f"the backend refuses the task: {why}", where={"task": self.task["id"].get("name")}, hint=hint
        )

    def of_execution(self) -> dict[str, dict[str, str]]:
        """Its labels and annotations, which win over all others, and what makes the webhook bring its secrets."""
        execution, secrets = self.execution, self.secrets
        return {
            "annotations": {**execution.annotations, **secret_annotations(secrets)},
            "labels": {**execution.labels, **({"inject-flyte-secrets": "true"} if secrets else {})},
        }


def build_pod(run: Run, override: Amounts | None = None) -> dict[str, Any]:
    """The pod of a role: ``metadata``, its labels and annotations, and ``spec``.

    Args:
        run: the task.
        override: the role's own resources, settled; None: the node's.

    Raises:
        RenderError: the backend would refuse the task.
    """
    source = run.pod_override or run.task["k8sPod"]
    spec: dict[str, Any] = tidy(copy.deepcopy(source["podSpec"]))
    own = idl_amounts(run.execution.overrides.get("resources", {})) if override is None else override
    for container in spec.get("initContainers", ()):
        _customise(run, container, own, init=True, fill=True)
    for container in spec["containers"]:
        _customise(run, container, own, init=False, fill=container["name"] == run.primary)
    _primary(run, spec)  # it is there
    spec.setdefault("restartPolicy", "Never")
    if run.execution.service_account:
        spec.setdefault("serviceAccountName", run.execution.service_account)
    sources = [each.get("metadata", {}) for each in (run.task["k8sPod"], run.pod_override)]
    metadata = {
        name: {key: value for each in sources for key, value in each.get(name, {}).items()}
        for name in ("annotations", "labels")
    }
    if run.base is not None:
        metadata, spec = laid_over(run.base, metadata, spec, primary=run.primary)
    if "gpuAccelerator" in run.extended:
        _add_accelerator(spec, run.extended["gpuAccelerator"])
    if "sharedMemory" in run.extended:
        _add_shared_memory(run, spec, run.extended["sharedMemory"])
    if run.execution.overrides.get("containerImage"):
        _primary(run, spec)["image"] = run.execution.overrides["containerImage"]
    return {"metadata": metadata, "spec": spec}


def _primary(run: Run, spec: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] | None = next((one for one in spec["containers"] if one["name"] == run.primary), None)
    if found is None:
        raise run.refused(f"primary container [{run.primary}] not defined")
    return found


def _customise(run: Run, container: dict[str, Any], own: Amounts, *, init: bool, fill: bool) -> None:
    for name in ("command", "args"):
        if container.get(name):
            container[name] = [run.execution.fill(text) for text in container[name]]
    container["env"] = [*container.get("env", ()), *_variables(run)]
    stated = _amounts(container.get("resources", {}))
    under = _amounts(resources_under(run.base, container["name"], init=init))
    asked = _over(_over(own, stated) if fill else stated, under)
    container["resources"] = {**container.get("resources", {}), **settled(asked, fill=fill)}


def _variables(run: Run) -> list[dict[str, str]]:
    execution, task = run.execution, run.task["id"]
    found = {
        "FLYTE_INTERNAL_EXECUTION_ID": execution.name,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": execution.project,
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": execution.domain,
        "FLYTE_ATTEMPT_NUMBER": str(execution.attempt),
        **{f"FLYTE_INTERNAL_TASK_{key}": task.get(key.lower(), "") for key in ("PROJECT", "DOMAIN", "NAME", "VERSION")},
    }
    # Go walks the execution's map in any order; its names are sorted here.
    pairs = [*found.items(), *sorted(execution.variables().items())]
    return [{"name": name, "value": str(value)} for name, value in pairs]


# --- requests and limits ----------------------------------------------------------------------------------------------
def _amounts(resources: Mapping[str, Any]) -> Amounts:
    """Those of a container in a manifest, ``gpu`` under its full name (``SanitizeGPUResourceRequirements``)."""
    return {
        part: {GPU if name == "gpu" else name: canonical(value) for name, value in (resources.get(part) or {}).items()}
        for part in _PARTS
    }


def idl_amounts(resources: Mapping[str, Any]) -> Amounts:
    """Those of a role or a node, as flyteidl has them; zeros are dropped (``ToK8sResourceList``)."""
    return {
        part: {
            _IDL_NAMES[entry["name"]]: canonical(entry["value"])
            for entry in resources.get(part, ())
            if entry.get("name") in _IDL_NAMES and value_of(entry["value"])
        }
        for part in _PARTS
    }


def _over(amounts: Amounts, others: Amounts) -> Amounts:
    """These, and those of *others* that are not named here."""
    return {part: {**others[part], **amounts[part]} for part in _PARTS}


def settled(amounts: Amounts, *, fill: bool) -> Amounts:
    """Requests and limits stand in for each other, and the defaults for both; a limit bounds its request
    (``ApplyResourceOverrides``).

    Args:
        amounts: what the container has.
        fill: False: nothing is filled in, only bounded; but cpu and memory are named all the same, as zero.
    """
    requests, limits = (dict(amounts[part]) for part in _PARTS)
    further = [name for name in ("ephemeral-storage", GPU) if name in requests or name in limits]
    for name in ("cpu", "memory", *further):
        request, limit = requests.get(name, "0"), limits.get(name, "0")
        if fill:
            request = _first(request, limit, DEFAULTS.get(name, "0"))
            limit = _first(limit, request)
        is_above = value_of(limit) and (value_of(request) or 0) > (value_of(limit) or 0)
        requests[name], limits[name] = limit if is_above else request, limit
    return {"requests": requests, "limits": limits}


def _first(*values: str) -> str:
    return next((amount for amount in values if value_of(amount)), "0")


# --- extended resources -----------------------------------------------------------------------------------------------
def _add_accelerator(spec: dict[str, Any], accelerator: Mapping[str, Any]) -> None:
    """Nodes with that GPU, when the pod asks for a GPU at all (``ApplyGPUNodeSelectors``)."""
    if not any(GPU in container.get("resources", {}).get("limits", {}) for container in spec["containers"]):
        return
    is_whole = accelerator.get("unpartitioned")
    asked = {_DEVICE: accelerator.get("device"), _PARTITION: None if is_whole else accelerator.get("partitionSize")}
    named = {label: value for label, value in asked.items() if value}
    required: list[Any] = [{"key": label, "operator": "In", "values": [value]} for label, value in named.items()]
    if is_whole:
        required.append({"key": _PARTITION, "operator": "DoesNotExist"})
    for label, value in named.items():
        toleration = {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        spec["tolerations"] = [*spec.get("tolerations", ()), toleration]
    node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    selector = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # Into every term: terms are alternatives, of which one is enough (AddRequiredNodeSelectorRequirements).
    selector["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*term.get("matchExpressions", ()), *required]}
        for term in selector.get("nodeSelectorTerms") or [{}]
    ]


def _add_shared_memory(run: Run, spec: dict[str, Any], memory: Mapping[str, Any]) -> None:
    """``ApplySharedMemory``: never a second mount of one path or name."""
    name, path = memory["mountName"], memory["mountPath"]
    primary = _primary(run, spec)
    volumes, mounts = spec.get("volumes", []), primary.get("volumeMounts", [])
    if any(entry["name"] == name for entry in [*volumes, *mounts]):
        raise run.refused(f"a volume is already named {name}")
    if any(mount["mountPath"] == path for mount in mounts):
        hint = "mount it in the pod template, or let the task ask for shared memory; not both"
        raise run.refused(f"{path} is already mounted in container {run.primary}", hint)
    volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": canonical(memory.get("sizeLimit") or "0")}}
    spec["volumes"] = [*volumes, volume]
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
