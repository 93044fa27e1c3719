"""What a platform's configuration adds to a task: given as a file, or Flyte's own defaults.

The names are those of Flyte's configuration, so that a platform team can hand out the sections that it has::

    task_resources:            # flyteadmin
      defaults: {cpu: "1", memory: 1Gi}
      limits: {cpu: "96", memory: 1Ti, gpu: "8"}
    plugins:
      k8s:                     # flytepropeller
        default-tolerations: [{key: train, operator: Exists}]
        gpu-resource-name: amd.com/gpu
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...config.quantities import canonical_list
from ...errors import RenderError
from .resources import Requirements

Backend = Literal["v1.16", "v2"]
BACKENDS: tuple[Backend, ...] = ("v1.16", "v2")
ASSUMED = Requirements({"cpu": "1", "memory": "1Gi"}, {})
"""flyteadmin's ``task_resources`` when nobody says what they are: no limits."""

_KNOWN = frozenset(
    {
        *("inject-finalizer", "default-annotations", "default-labels", "default-env-vars", "default-env-vars-from-env"),
        *("default-env-from-configmaps", "default-env-from-secrets", "default-cpus", "default-memory"),
        *("default-tolerations", "default-node-selector", "default-affinity", "scheduler-name"),
        *("interruptible-tolerations", "interruptible-node-selector", "interruptible-node-selector-requirement"),
        *("non-interruptible-node-selector-requirement", "resource-tolerations", "co-pilot", "image-pull-policy"),
        *("delete-resource-on-finalize", "create-container-error-grace-period"),
        *("create-container-config-error-grace-period", "image-pull-backoff-grace-period", "pod-pending-timeout"),
        *("gpu-device-node-label", "gpu-partition-size-node-label", "gpu-unpartitioned-node-selector-requirement"),
        *("gpu-unpartitioned-toleration", "gpu-resource-name", "default-pod-security-context"),
        *("default-security-context", "enable-host-networking-pod", "default-pod-dns-config"),
        *("default-pod-template-name", "default-pod-template-resync", "send-object-events"),
        *("update-base-backoff-duration", "update-backoff-retries", "add-tolerations-for-extended-resources"),
        *("enable-distributed-error-aggregation",),
    }
)
"""``flyteplugins/go/tasks/pluginmachinery/flytek8s/config/config.go`` of Flyte v1.16.8."""
_DEFAULTS: Mapping[str, Any] = {
    "gpu-device-node-label": "k8s.amazonaws.com/accelerator",
    "gpu-partition-size-node-label": "k8s.amazonaws.com/gpu-partition-size",
    "gpu-resource-name": "nvidia.com/gpu",
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The backend's version and configuration, as far as they change what is created.

    Attributes:
        backend: which Flyte.
        resources: flyteadmin's ``task_resources``; its defaults are the requests.
        k8s: flytepropeller's ``plugins.k8s`` section; what is left out is Flyte's default.
        pod_templates: the cluster's PodTemplates, by name.
        pod_templates_known: False: the cluster may have others; a task that names one is shown without it.
    """

    backend: Backend = "v1.16"
    resources: Requirements = ASSUMED
    k8s: Mapping[str, Any] = field(default_factory=dict)
    pod_templates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pod_templates_known: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.k8s) - _KNOWN)
        if unknown:
            raise RenderError(
                "the platform's configuration has settings that Flyte does not know",
                where={"section": "plugins.k8s"},
                seen=", ".join(unknown),
                hint="write them as flytepropeller's configuration does, e.g. default-tolerations",
            )

    @property
    def is_flyte_2(self) -> bool:
        """Flyte 2's backend."""
        return self.backend == "v2"

    def setting(self, name: str) -> Any:
        """A setting of ``plugins.k8s``, None where neither the platform nor Flyte sets it."""
        return self.k8s.get(name, _DEFAULTS.get(name))

    @property
    def gpu(self) -> str:
        """The name of a GPU on this platform."""
        return str(self.setting("gpu-resource-name"))


def read_platform(file: Path, *, backend: Backend = "v1.16", pod_templates: Sequence[Path] = ()) -> Cluster:
    """The platform that *file* describes; see the module's text for its form.

    Raises:
        RenderError: the file cannot be read, or says something that Flyte does not know.
    """
    document = read_yaml(file)
    unknown = sorted(set(document) - {"task_resources", "plugins"})
    if unknown:
        raise RenderError(
            "the platform file has sections that are not known here",
            where={"file": file},
            seen=", ".join(unknown),
            expected="task_resources (flyteadmin) and plugins.k8s (flytepropeller)",
        )
    admin = document.get("task_resources") or {}
    resources = Requirements(_admin_list(admin.get("defaults")), _admin_list(admin.get("limits")))
    k8s = (document.get("plugins") or {}).get("k8s") or {}
    return with_pod_templates(Cluster(backend=backend, resources=resources, k8s=k8s), pod_templates)


def with_pod_templates(cluster: Cluster, files: Sequence[Path]) -> Cluster:
    """*cluster* with the PodTemplates of these files.

    Raises:
        RenderError: a file cannot be read or holds no PodTemplate.
    """
    found = dict(cluster.pod_templates)
    for file in files:
        document = read_yaml(file)
        name = (document.get("metadata") or {}).get("name")
        if document.get("kind", "PodTemplate") != "PodTemplate" or not name or "template" not in document:
            raise RenderError(
                "this is not a PodTemplate", where={"file": file}, expected="kind: PodTemplate with a name"
            )
        found[name] = document
    return replace(cluster, pod_templates=found)


def _admin_list(amounts: Mapping[str, Any] | None) -> dict[str, str]:
    # flyteadmin's names (runtime/interfaces/task_resource_configuration.go) are those of Kubernetes but for these.
    names = {"gpu": "nvidia.com/gpu", "ephemeralStorage": "ephemeral-storage", "mem": "memory"}
    return canonical_list({names.get(name, name): value for name, value in (amounts or {}).items()})


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a file of YAML, or JSON.

    Raises:
        RenderError: it cannot be read, or holds something else.
    """
    import yaml

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RenderError("the file cannot be read", where={"file": file}, seen=error) from error
    if not isinstance(document, dict):
        raise RenderError("the file does not hold a YAML mapping", where={"file": file})
    return document
