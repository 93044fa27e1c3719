"""What the Flyte backend makes of a task template: a PyTorchJob, an MPIJob or a Pod, as Kubernetes sees it.

Follows ``flyteplugins/go/tasks/plugins/k8s/kfoperators`` and ``pluginmachinery/flytek8s`` of Flyte v1.16.8 and v2.0.9,
with the backend's default configuration. What a platform adds by its own configuration (default labels, tolerations,
service accounts, cluster pod templates) cannot be known here and is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import RenderError

Backend = Literal["v1.16", "v2"]
BACKENDS: tuple[Backend, ...] = ("v1.16", "v2")

_PRIMARY = "primary_container_name"
_RESOURCE_NAMES = {"CPU": "cpu", "MEMORY": "memory", "GPU": "gpu", "EPHEMERAL_STORAGE": "ephemeral-storage"}
_RESTART = {
    None: "Never",
    "RESTART_POLICY_NEVER": "Never",
    "RESTART_POLICY_ON_FAILURE": "OnFailure",
    "RESTART_POLICY_ALWAYS": "Always",
}
_CLEAN = {
    None: "None",
    "CLEANPOD_POLICY_NONE": "None",
    "CLEANPOD_POLICY_RUNNING": "Running",
    "CLEANPOD_POLICY_ALL": "All",
}


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of the task: what the backend fills into the command and the environment.

    Attributes:
        name: of the execution; the job's name is ``<name>-n0-<attempt>``.
        files: the backend's template variables (``{{.input}}``, ...) and what they become; empty: left as they are.
    """

    name: str = "f0123456789abcdef"
    project: str = "flytesnacks"
    domain: str = "development"
    attempt: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def job_name(self) -> str:
        """The name of the job or pod (``TaskExecutionID.GetGeneratedName``)."""
        return f"{self.name}-n0-{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The parts of the backend's configuration that change what is created; the defaults are the backend's own."""

    backend: Backend = "v1.16"
    gpu_resource_name: str = "nvidia.com/gpu"
    gpu_device_label: str = "k8s.amazonaws.com/accelerator"
    gpu_partition_label: str = "k8s.amazonaws.com/gpu-partition-size"
    default_cpu: str = "1000m"
    default_memory: str = "1024Mi"
    error_aggregation: bool = False
    namespace: str = "flytesnacks-development"


def job_manifest(template: Any, execution: Execution | None = None, cluster: Cluster | None = None) -> dict[str, Any]:
    """The object that the backend creates for *template* (``flyteidl.core.TaskTemplate``).

    Raises:
        RenderError: the backend would refuse the task, or this module does not know its type.
    """
    from google.protobuf.json_format import MessageToDict

    task = MessageToDict(template)
    run = _Run(task, execution or Execution(), cluster or Cluster())
    kind = task.get("type")
    if kind == "pytorch":
        return _pytorchjob(run)
    if kind == "mpi":
        return _mpijob(run)
    if kind == "python-task" and "k8sPod" in task:
        return _pod(run)
    raise RenderError("this task cannot be shown", where={"task type": kind}, expected="a task of this package")


@dataclass(frozen=True)
class _Run:
    task: Mapping[str, Any]
    execution: Execution
    cluster: Cluster

    @property
    def primary(self) -> str:
        return str(self.task["config"][_PRIMARY])

    @property
    def custom(self) -> Mapping[str, Any]:
        custom: Mapping[str, Any] = self.task.get("custom", {})
        return custom


def _pod(run: _Run) -> dict[str, Any]:
    spec = _pod_spec(run, {})
    metadata = _metadata(run)
    if len(spec["containers"]) == 1:
        metadata.setdefault("annotations", {})[_PRIMARY] = run.primary
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _named(run, metadata), "spec": spec}


def _pytorchjob(run: _Run) -> dict[str, Any]:
    custom = run.custom
    worker = custom.get("workerReplicas", {})
    workers = int(worker.get("replicas", 0))
    elastic = custom.get("elasticConfig")
    if workers == 0 and run.cluster.backend == "v2":
        raise RenderError(
            "Flyte 2 refuses a PyTorchJob without workers",
            where={"task": run.task["id"]["name"]},
            hint="drop one_node_job=True (nodes=1 is an ordinary pod then)",
        )
    replicas: dict[str, Any] = {}
    if elastic is None:
        replicas["Master"] = _replica(run, custom.get("masterReplicas", {}), "pytorch", 1)
    if workers:
        replicas["Worker"] = _replica(run, worker, "pytorch", workers)
        if run.cluster.backend == "v1.16":
            _add_worker_name(run, replicas["Worker"])
    spec: dict[str, Any] = {"pytorchReplicaSpecs": replicas, "runPolicy": _run_policy(custom)}
    if elastic is not None:
        spec["elasticPolicy"] = {
            "minReplicas": int(elastic.get("minReplicas", 0)),
            "maxReplicas": int(elastic.get("maxReplicas", 0)),
            "rdzvBackend": elastic.get("rdzvBackend", ""),
            "nProcPerNode": int(elastic.get("nprocPerNode", 0)),
            "maxRestarts": int(elastic.get("maxRestarts", 0)),
        }
    metadata = _metadata(run) if run.cluster.backend == "v2" else {}
    return _job("PyTorchJob", run, metadata, spec)


def _mpijob(run: _Run) -> dict[str, Any]:
    custom = run.custom
    worker = custom.get("workerReplicas", {})
    replicas = {
        "Launcher": _replica(run, custom.get("launcherReplicas", {}), "mpi", 1),
        "Worker": _replica(run, worker, "mpi", int(worker.get("replicas", 0))),
    }
    # The message's "slots" is not read for task type version 1 (mpi.go): always 1.
    spec = {"slotsPerWorker": 1, "mpiReplicaSpecs": replicas, "runPolicy": _run_policy(custom)}
    return _job("MPIJob", run, {}, spec)


def _job(kind: str, run: _Run, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "kubeflow.org/v1", "kind": kind, "metadata": _named(run, metadata), "spec": spec}


def _replica(run: _Run, role: Mapping[str, Any], container_name: str, replicas: int) -> dict[str, Any]:
    spec = _pod_spec(run, _resources_of_role(role, run.cluster))
    for container in spec["containers"]:
        if container["name"] == run.primary:
            container["name"] = container_name
            if role.get("image"):
                container["image"] = role["image"]
            if role.get("command"):
                container["args"] = list(role["command"])
            break
    template: dict[str, Any] = {"spec": spec}
    metadata = _metadata(run)
    if metadata:
        template = {"metadata": metadata, **template}
    return {"replicas": replicas, "restartPolicy": _RESTART[role.get("restartPolicy")], "template": template}


def _add_worker_name(run: _Run, replica: dict[str, Any]) -> None:
    # Into the first container, whichever that is (pytorch.go, updateEnvVars).
    env = replica["template"]["spec"]["containers"][0].setdefault("env", [])
    env.append({"name": "_F_WN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    if run.cluster.error_aggregation:
        env.append({"name": "_F_DES", "value": "Earliest"})


def _run_policy(custom: Mapping[str, Any]) -> dict[str, Any]:
    said = custom.get("runPolicy")
    if said is None:
        return {}
    policy: dict[str, Any] = {"cleanPodPolicy": _CLEAN[said.get("cleanPodPolicy")]}
    for name in ("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if said.get(name):
            policy[name] = int(said[name])
    return policy


def _pod_spec(run: _Run, role_resources: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    spec: dict[str, Any] = _whole_numbers(copy.deepcopy(run.task["k8sPod"]["podSpec"]))
    for container in spec.get("initContainers", ()):
        _customise(run, container, {}, fill=True)
    for container in spec["containers"]:
        is_primary = container["name"] == run.primary
        _customise(run, container, role_resources if is_primary else {}, fill=is_primary)
    spec.setdefault("restartPolicy", "Never")
    extended = run.task.get("extendedResources", {})
    if "gpuAccelerator" in extended:
        _accelerator(run, spec, extended["gpuAccelerator"])
    if "sharedMemory" in extended:
        _shared_memory(run, spec, extended["sharedMemory"])
    return spec


def _customise(run: _Run, container: dict[str, Any], role: Mapping[str, Mapping[str, str]], *, fill: bool) -> None:
    container["args"] = [_filled(run, one) for one in container.get("args", ())]
    if not container["args"]:
        del container["args"]
    container["env"] = [*container.get("env", ()), *_execution_env(run)]
    resources = container.setdefault("resources", {})
    for part in ("requests", "limits"):
        named = {_gpu_name(run, name): value for name, value in resources.get(part, {}).items()}
        resources[part] = {**named, **{_gpu_name(run, name): one for name, one in role.get(part, {}).items()}}
    _complete(resources, run.cluster, fill=fill)
    for part in ("requests", "limits"):
        if not resources[part]:
            del resources[part]
    if not resources:
        del container["resources"]


def _complete(resources: dict[str, dict[str, str]], cluster: Cluster, *, fill: bool) -> None:
    """Requests and limits stand in for each other, and neither cpu nor memory stays open (ApplyResourceOverrides)."""
    from kubernetes.utils.quantity import parse_quantity

    requests, limits = resources["requests"], resources["limits"]
    if fill:
        for name in ("cpu", "memory", "ephemeral-storage", cluster.gpu_resource_name):
            default = {"cpu": cluster.default_cpu, "memory": cluster.default_memory}.get(name)
            found = requests.get(name) or limits.get(name) or default
            if found is not None:
                requests[name] = found
                limits.setdefault(name, found)
    for name in requests:
        if name in limits and parse_quantity(requests[name]) > parse_quantity(limits[name]):
            requests[name] = limits[name]


def _resources_of_role(role: Mapping[str, Any], cluster: Cluster) -> dict[str, dict[str, str]]:
    said = role.get("resources", {})
    parts = {
        part: {_RESOURCE_NAMES[one["name"]]: one["value"] for one in said.get(part, ()) if one["value"] != "0"}
        for part in ("requests", "limits")
    }
    if not any(parts.values()):
        return {}
    # ToReplicaSpecWithOverrides completes the role's resources, cpu and memory by the platform's defaults, before it
    # merges them over the task's.
    defaults = {"cpu": cluster.default_cpu, "memory": cluster.default_memory}
    for name in {**defaults, **parts["requests"], **parts["limits"]}:
        found = parts["requests"].get(name) or parts["limits"].get(name) or defaults[name]
        parts["requests"][name] = found
        parts["limits"].setdefault(name, found)
    return parts


def _gpu_name(run: _Run, name: str) -> str:
    return run.cluster.gpu_resource_name if name == "gpu" else name


def _execution_env(run: _Run) -> list[dict[str, str]]:
    task_id = run.task["id"]
    pairs = {
        "FLYTE_INTERNAL_EXECUTION_ID": run.execution.name,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": run.execution.project,
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": run.execution.domain,
        "FLYTE_ATTEMPT_NUMBER": str(run.execution.attempt),
        "FLYTE_INTERNAL_TASK_PROJECT": task_id.get("project", ""),
        "FLYTE_INTERNAL_TASK_DOMAIN": task_id.get("domain", ""),
        "FLYTE_INTERNAL_TASK_NAME": task_id.get("name", ""),
        "FLYTE_INTERNAL_TASK_VERSION": task_id.get("version", ""),
    }
    return [{"name": name, "value": value} for name, value in pairs.items()]


def _filled(run: _Run, text: str) -> str:
    for name, value in run.execution.files.items():
        text = text.replace(name, value)
    return text


def _accelerator(run: _Run, spec: dict[str, Any], said: Mapping[str, Any]) -> None:
    """Nodes with that GPU, when the pod asks for a GPU at all (ApplyGPUNodeSelectors)."""
    gpu = run.cluster.gpu_resource_name
    if not any(gpu in one.get("resources", {}).get("limits", {}) for one in spec["containers"]):
        return
    partition = run.cluster.gpu_partition_label
    if said.get("device"):
        _require(spec, run.cluster.gpu_device_label, said["device"])
    if said.get("unpartitioned"):
        _expressions(spec).append({"key": partition, "operator": "DoesNotExist"})
    elif said.get("partitionSize"):
        _require(spec, partition, said["partitionSize"])


def _require(spec: dict[str, Any], label: str, value: str) -> None:
    _expressions(spec).append({"key": label, "operator": "In", "values": [value]})
    toleration = {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
    spec["tolerations"] = [*spec.get("tolerations", ()), toleration]


def _expressions(spec: dict[str, Any]) -> list[dict[str, Any]]:
    node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.setdefault("nodeSelectorTerms", [{}])
    found: list[dict[str, Any]] = terms[0].setdefault("matchExpressions", [])
    return found


def _shared_memory(run: _Run, spec: dict[str, Any], said: Mapping[str, Any]) -> None:
    name, path = said["mountName"], said["mountPath"]
    primary = next(one for one in spec["containers"] if one["name"] == run.primary)
    if any(one["mountPath"] == path for one in primary.get("volumeMounts", ())):
        raise RenderError(f"the backend refuses the task: {path} is mounted twice", where={"container": run.primary})
    volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": said.get("sizeLimit") or "0"}}
    spec["volumes"] = [*spec.get("volumes", ()), volume]
    primary["volumeMounts"] = [*primary.get("volumeMounts", ()), {"name": name, "mountPath": path}]


def _metadata(run: _Run) -> dict[str, Any]:
    said = run.task["k8sPod"].get("metadata", {})
    return {name: dict(said[name]) for name in ("annotations", "labels") if said.get(name)}


def _named(run: _Run, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": run.execution.job_name, "namespace": run.cluster.namespace, **metadata}


def _whole_numbers(value: Any) -> Any:
    """Numbers in a protobuf Struct are doubles; Kubernetes wants its integers back."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(one) for one in value]
    return value
