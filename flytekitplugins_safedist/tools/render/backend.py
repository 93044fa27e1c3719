"""What the Flyte backend makes of a task template: a PyTorchJob, an MPIJob or a Pod, as Kubernetes sees it.

Follows ``flyteplugins/go/tasks/plugins/k8s/{kfoperators,pod}`` and ``flytepropeller/.../task/k8s/plugin_manager.go`` of
Flyte v1.16.8 with its default configuration. Left out is what every object of Flyte's has: its eight labels, the
annotation ``safe-to-evict``, owner references, an empty ``affinity``, ``FLYTE_INTERNAL_EXECUTION_WORKFLOW``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import RenderError
from .execution import Execution
from .pod_templates import PodTemplates
from .podspec import PodSpec, Run, build_pod
from .resources import Requirements, settle

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


def job_manifest(
    template: Any, execution: Execution | None = None, pod_templates: PodTemplates | None = None
) -> dict[str, Any]:
    """The object that the backend creates for *template* (``flyteidl.core.TaskTemplate``).

    Args:
        template: the ``TaskTemplate``.
        execution: of the task.
        pod_templates: the cluster's; None: it may have others than are known here.

    Raises:
        RenderError: the backend would refuse the task, or this module does not know its type.
    """
    from google.protobuf.json_format import MessageToDict

    task = MessageToDict(template)
    run = Run(task, tuple(template.security_context.secrets), execution or Execution(), pod_templates)
    kind = task.get("type")
    if kind == "pytorch":
        return _pytorchjob(run)
    if kind == "mpi":
        return _mpijob(run)
    if kind == "python-task" and "k8sPod" in task:
        return _pod(run)
    raise RenderError("this task cannot be shown", where={"task type": kind}, expected="a task of this package")


def _pod(run: Run) -> dict[str, Any]:
    made = build_pod(run)
    metadata = made.metadata
    if len(made.spec["containers"]) == 1:
        metadata["annotations"] = {**metadata.get("annotations", {}), "primary_container_name": run.primary}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _of_object(run, metadata), "spec": made.spec}


def _pytorchjob(run: Run) -> dict[str, Any]:
    custom = run.custom
    worker = custom.get("workerReplicas", {})
    workers = int(worker.get("replicas", 0))
    elastic = custom.get("elasticConfig")
    replicas = {}
    if elastic is None:
        replicas["Master"] = _replica(run, custom.get("masterReplicas", {}), "pytorch", 1)
    if workers:
        replicas["Worker"] = _replica(run, worker, "pytorch", workers)
        # Into the first container, whichever that is (pytorch.go, updateEnvVars).
        env = replicas["Worker"]["template"]["spec"]["containers"][0].setdefault("env", [])
        env.append({"name": "_F_WN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    spec: dict[str, Any] = {"pytorchReplicaSpecs": replicas, "runPolicy": _run_policy(custom)}
    if elastic is not None:
        spec["elasticPolicy"] = {
            "minReplicas": int(elastic.get("minReplicas", 0)),
            "maxReplicas": int(elastic.get("maxReplicas", 0)),
            "rdzvBackend": elastic.get("rdzvBackend", ""),
            "nProcPerNode": int(elastic.get("nprocPerNode", 0)),
            "maxRestarts": int(elastic.get("maxRestarts", 0)),
        }
    return _job("PyTorchJob", run, spec)


def _mpijob(run: Run) -> dict[str, Any]:
    custom = run.custom
    worker = custom.get("workerReplicas", {})
    workers = int(worker.get("replicas", 0))
    if workers == 0:
        raise RenderError("the backend refuses the task: number of workers must be greater than 0")
    replicas = {
        "Launcher": _replica(run, custom.get("launcherReplicas", {}), "mpi", 1),
        "Worker": _replica(run, worker, "mpi", workers),
    }
    # The message's "slots" is not read for task type version 1 (mpi.go): always 1.
    spec = {"slotsPerWorker": 1, "mpiReplicaSpecs": replicas, "runPolicy": _run_policy(custom)}
    return _job("MPIJob", run, spec)


def _job(kind: str, run: Run, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "kubeflow.org/v1", "kind": kind, "metadata": _of_object(run, {}), "spec": spec}


def _replica(run: Run, role: Mapping[str, Any], container: str, count: int) -> dict[str, Any]:
    made = build_pod(run, _of_role(role))
    for entry in made.spec["containers"]:
        if entry["name"] == run.primary:
            entry["name"] = container
            break
    for entry in made.spec["containers"]:
        if entry["name"] == container:
            if role.get("image"):
                entry["image"] = role["image"]
            if role.get("command"):
                entry["args"] = list(role["command"])
    return {"replicas": count, "restartPolicy": _RESTART[role.get("restartPolicy")], "template": _template(run, made)}


def _of_role(role: Mapping[str, Any]) -> Requirements | None:
    """A role's own resources, completed by the defaults before they are merged over the task's; they replace what the
    node says (``ToReplicaSpecWithOverrides``)."""
    resources = role.get("resources", {})
    if not resources.get("requests") and not resources.get("limits"):
        return None
    return settle(Requirements.of_idl(resources), fill=True)


def _template(run: Run, made: PodSpec) -> dict[str, Any]:
    metadata = _united(run, made.metadata, {})
    return {"metadata": metadata, "spec": made.spec} if metadata else {"spec": made.spec}


def _run_policy(custom: Mapping[str, Any]) -> dict[str, Any]:
    given = custom.get("runPolicy")
    if given is None:
        return {}
    policy: dict[str, Any] = {"cleanPodPolicy": _CLEAN[given.get("cleanPodPolicy")]}
    for name in ("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if given.get(name):
            policy[name] = int(given[name])
    return policy


def _of_object(run: Run, metadata: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """``addObjectMetadata``: the task's own labels and annotations reach the job, and no pod of it."""
    of_task = run.task.get("metadata", {}).get("metadata", {})
    named: dict[str, Any] = {"name": run.execution.job_name, "namespace": run.execution.in_namespace}
    return named | _united(run, metadata, of_task)


def _united(run: Run, metadata: Mapping[str, Any], of_task: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The pod template's, the task's and the execution's labels and annotations; later ones win."""
    last = {"annotations": run.annotations(), "labels": run.labels()}
    united = {name: {**metadata.get(name, {}), **of_task.get(name, {}), **last[name]} for name in last}
    return {name: found for name, found in united.items() if found}
