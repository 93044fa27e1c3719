"""What the Flyte backend makes of a task template: a PyTorchJob, an MPIJob or a Pod, as Kubernetes sees it.

Follows ``flyteplugins/go/tasks/plugins/k8s/{kfoperators,pod}`` and ``flytepropeller/.../task/k8s/plugin_manager.go`` of
Flyte v1.16.8 with its default configuration. Left out is what every object of Flyte's has: its eight labels, the
annotation ``safe-to-evict``, owner references, an empty ``affinity``, ``FLYTE_INTERNAL_EXECUTION_WORKFLOW``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import RenderError
from .execution import Execution
from .pod_templates import PodTemplates
from .podspec import PodSpec, Run, build_pod
from .resources import Clamp, Requirements, clamps, settle

_PRIMARY = "primary_container_name"
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


@dataclass(frozen=True)
class Built:
    """What the backend submits.

    Attributes:
        manifest: the PyTorchJob, MPIJob or Pod.
        clamps: per role, what a container's own limits made smaller without an error.
    """

    manifest: dict[str, Any]
    clamps: tuple[tuple[str, Clamp], ...] = ()


def job_manifest(
    template: Any, execution: Execution | None = None, pod_templates: PodTemplates | None = None
) -> dict[str, Any]:
    """The object that the backend creates for *template* (``flyteidl.core.TaskTemplate``).

    Raises:
        RenderError: the backend would refuse the task, or this module does not know its type.
    """
    return build(template, execution, pod_templates).manifest


def build(template: Any, execution: Execution | None = None, pod_templates: PodTemplates | None = None) -> Built:
    """As :func:`job_manifest`, with what one should know of it.

    Args:
        template: the ``TaskTemplate``.
        execution: of the task.
        pod_templates: the cluster's; None: it may have others than are known here.

    Raises:
        RenderError: the backend would refuse the task, or this module does not know its type.
    """
    from google.protobuf.json_format import MessageToDict

    task = MessageToDict(template)
    secrets = tuple(template.security_context.secrets)
    run = Run(task, secrets, execution or Execution(), pod_templates)
    kind = task.get("type")
    if kind == "pytorch":
        return _pytorchjob(run)
    if kind == "mpi":
        return _mpijob(run)
    if kind == "python-task" and "k8sPod" in task:
        return _pod(run)
    raise RenderError("this task cannot be shown", where={"task type": kind}, expected="a task of this package")


def _pod(run: Run) -> Built:
    made = build_pod(run)
    metadata = made.metadata
    if len(made.spec["containers"]) == 1:
        metadata["annotations"] = {**metadata.get("annotations", {}), _PRIMARY: run.primary}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": _of_object(run, metadata), "spec": made.spec}
    return Built(manifest, tuple(("Pod", clamp) for clamp in made.clamps))


def _pytorchjob(run: Run) -> Built:
    custom = run.custom
    worker = custom.get("workerReplicas", {})
    workers = int(worker.get("replicas", 0))
    elastic = custom.get("elasticConfig")
    roles = {} if elastic is not None else {"Master": (custom.get("masterReplicas", {}), 1)}
    if workers:
        roles["Worker"] = (worker, workers)
    replicas, lost = _replicas(run, roles, "pytorch")
    if workers:
        _add_worker_name(replicas["Worker"])
    spec: dict[str, Any] = {"pytorchReplicaSpecs": replicas, "runPolicy": _run_policy(custom)}
    if elastic is not None:
        spec["elasticPolicy"] = {
            "minReplicas": int(elastic.get("minReplicas", 0)),
            "maxReplicas": int(elastic.get("maxReplicas", 0)),
            "rdzvBackend": elastic.get("rdzvBackend", ""),
            "nProcPerNode": int(elastic.get("nprocPerNode", 0)),
            "maxRestarts": int(elastic.get("maxRestarts", 0)),
        }
    return _job("PyTorchJob", run, spec, lost)


def _mpijob(run: Run) -> Built:
    custom = run.custom
    worker = custom.get("workerReplicas", {})
    workers = int(worker.get("replicas", 0))
    if workers == 0:
        raise RenderError("the backend refuses the task: number of workers must be greater than 0")
    roles = {"Launcher": (custom.get("launcherReplicas", {}), 1), "Worker": (worker, workers)}
    replicas, lost = _replicas(run, roles, "mpi")
    # The message's "slots" is not read for task type version 1 (mpi.go): always 1.
    spec = {"slotsPerWorker": 1, "mpiReplicaSpecs": replicas, "runPolicy": _run_policy(custom)}
    return _job("MPIJob", run, spec, lost)


def _job(kind: str, run: Run, spec: dict[str, Any], lost: list[tuple[str, Clamp]]) -> Built:
    return Built(
        {"apiVersion": "kubeflow.org/v1", "kind": kind, "metadata": _of_object(run, {}), "spec": spec},
        tuple(dict.fromkeys(lost)),
    )


def _replicas(
    run: Run, roles: Mapping[str, tuple[Mapping[str, Any], int]], container: str
) -> tuple[dict[str, Any], list[tuple[str, Clamp]]]:
    found, lost = {}, []
    for name, (role, count) in roles.items():
        own, clamped = _of_role(run, role)
        made = build_pod(run, own)
        found[name] = _replica(run, role, made, container, count)
        lost += [(name, clamp) for clamp in (*clamped, *made.clamps)]
    return found, lost


def _of_role(run: Run, role: Mapping[str, Any]) -> tuple[Requirements | None, list[Clamp]]:
    """A role's own resources, completed by the defaults before they are merged over the task's; they replace
    what the node says (``ToReplicaSpecWithOverrides``)."""
    resources = role.get("resources", {})
    if not resources.get("requests") and not resources.get("limits"):
        return None, []
    asked = Requirements.of_idl(resources)
    settled = settle(asked, fill=True)
    return settled, clamps(run.primary, asked, settled)


def _replica(run: Run, role: Mapping[str, Any], made: PodSpec, container: str, count: int) -> dict[str, Any]:
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
    template: dict[str, Any] = {"spec": made.spec}
    metadata = _united(run, made.metadata, {})
    if metadata:
        template = {"metadata": metadata, **template}
    return {"replicas": count, "restartPolicy": _RESTART[role.get("restartPolicy")], "template": template}


def _add_worker_name(replica: dict[str, Any]) -> None:
    # Into the first container, whichever that is (pytorch.go, updateEnvVars).
    env = replica["template"]["spec"]["containers"][0].setdefault("env", [])
    env.append({"name": "_F_WN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})


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
    found: dict[str, Any] = {"name": run.execution.job_name, "namespace": run.execution.in_namespace}
    return found | _united(run, metadata, of_task)


def _united(run: Run, metadata: Mapping[str, Any], of_task: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The pod template's, the task's and the execution's labels and annotations; later ones win."""
    found = {}
    for name, last in (("annotations", run.annotations()), ("labels", run.labels())):
        united = {**metadata.get(name, {}), **of_task.get(name, {}), **last}
        if united:
            found[name] = united
    return found
