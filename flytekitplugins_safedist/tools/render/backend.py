"""What the Flyte backend makes of a task template: a PyTorchJob or a Pod, as Kubernetes sees it.

Follows ``flyteplugins/go/tasks/plugins/k8s/{kfoperators,pod}`` and ``flytepropeller/.../task/k8s/plugin_manager.go`` of
Flyte v1.16.8 with its default configuration. Left out is what every object of Flyte's has: its eight labels, the
annotation ``safe-to-evict``, owner references, an empty ``affinity``, ``FLYTE_INTERNAL_EXECUTION_WORKFLOW``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config.validate import TRAINER
from ...errors import RenderError
from .execution import Execution
from .pod import Run, build_pod, idl_amounts, settled
from .pod_templates import PodTemplates


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
    makers = {"pytorch": _pytorchjob, "python-task": _pod}
    if kind not in makers or "k8sPod" not in task:
        raise RenderError("this task cannot be shown", where={"task type": kind}, expected="a task of this package")
    return makers[kind](run)


def _pod(run: Run) -> dict[str, Any]:
    made = build_pod(run)
    metadata = made["metadata"]
    if len(made["spec"]["containers"]) == 1:
        metadata["annotations"]["primary_container_name"] = run.primary
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _of_object(run, metadata), "spec": made["spec"]}


def _pytorchjob(run: Run) -> dict[str, Any]:
    custom = run.task["custom"]
    workers, elastic = int(custom.get("workerReplicas", {}).get("replicas", 0)), custom.get("elasticConfig")
    replicas = {}
    if elastic is None:
        replicas["Master"] = _replica(run, "masterReplicas", 1)
    if workers:
        replicas["Worker"] = _replica(run, "workerReplicas", workers)
        # Into the first container, whichever that is (pytorch.go, updateEnvVars).
        env = replicas["Worker"]["template"]["spec"]["containers"][0]["env"]
        env.append({"name": "_F_WN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    spec: dict[str, Any] = {"pytorchReplicaSpecs": replicas}
    if elastic is not None:
        spec["elasticPolicy"] = {
            "minReplicas": int(elastic.get("minReplicas", 0)),
            "maxReplicas": int(elastic.get("maxReplicas", 0)),
            "rdzvBackend": elastic.get("rdzvBackend", ""),
            "nProcPerNode": int(elastic.get("nprocPerNode", 0)),
            "maxRestarts": int(elastic.get("maxRestarts", 0)),
        }
    spec["runPolicy"] = _run_policy(run.task["custom"].get("runPolicy"))
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _of_object(run, {}), "spec": spec}


def _replica(run: Run, message: str, count: int) -> dict[str, Any]:
    role = run.task["custom"].get(message, {})
    resources, own = role.get("resources", {}), None
    if resources.get("requests") or resources.get("limits"):
        # Completed by the defaults before they are merged over the task's; they replace what the node says
        # (ToReplicaSpecWithOverrides).
        own = settled(idl_amounts(resources), fill=True)
    pod = build_pod(run, own)
    main = next(entry for entry in pod["spec"]["containers"] if entry["name"] == run.primary)
    main["name"] = TRAINER
    if role.get("image"):
        main["image"] = role["image"]
    metadata = _united(run, pod["metadata"])
    template = {"metadata": metadata, "spec": pod["spec"]} if metadata else {"spec": pod["spec"]}
    return {"replicas": count, "restartPolicy": _as_written(role.get("restartPolicy"), "Never"), "template": template}


def _run_policy(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    numbers = ("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished")
    found = {name: int(given[name]) for name in numbers if given.get(name)}
    return {"cleanPodPolicy": _as_written(given.get("cleanPodPolicy"), "None"), **found}


def _as_written(policy: str | None, zero: str) -> str:
    """``RESTART_POLICY_ON_FAILURE`` as ``OnFailure``; the enum's *zero*, which JSON leaves out."""
    return zero if policy is None else "".join(word.capitalize() for word in policy.split("_")[2:])


def _of_object(run: Run, metadata: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """``addObjectMetadata``: the task's own labels and annotations reach the job, and no pod of it."""
    named = {"name": run.execution.job_name, "namespace": run.execution.in_namespace}
    return {**named, **_united(run, metadata, run.task.get("metadata", {}).get("metadata", {}))}


def _united(run: Run, *sources: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Labels and annotations of these, and of the execution; later ones win."""
    found: dict[str, dict[str, str]] = {"annotations": {}, "labels": {}}
    for source in (*sources, run.of_execution()):
        for name, into in found.items():
            into.update(source.get(name, {}))
    return {name: texts for name, texts in found.items() if texts}
