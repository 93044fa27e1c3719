"""What the training operator makes of a PyTorchJob: its pods and their services. ``tests/contracts/oracle`` compares it
with recordings of the operator's own code.

Follows ``pkg/controller.v1`` of kubeflow/training-operator v1.9.0 with its default configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]

TRAINER, OPERATORS_PORT, DEFAULT_PORT = "pytorch", "pytorchjob-port", 23456
_LABEL = "training.kubeflow.org/"
_WAIT = (
    "err=1;for i in $(seq 100); do if nslookup {host}; then err=0 && break; fi;"
    "echo waiting for master; sleep 2; done; exit $err"
)


def pods_and_services(job: Manifest) -> list[Manifest]:
    """Each pod of a PyTorchJob, node 0 first, then the service of each: node 0 is met under its service's name."""
    roles = job["spec"]["pytorchReplicaSpecs"]
    members = [(role, index) for role in roles for index in range(roles[role]["replicas"])]
    return [make(job, role, index) for make in (_pod, _service) for role, index in members]


def _object(job: Manifest, kind: str, role: str, index: int) -> Manifest:
    labels = {"job-name": job["metadata"]["name"], "operator-name": "pytorchjob-controller"}
    labels |= {"replica-type": role.lower(), "replica-index": str(index)}
    metadata = {"name": _name(job, role, index), "namespace": job["metadata"]["namespace"]}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {**metadata, "labels": {f"{_LABEL}{name}": value for name, value in labels.items()}},
    }


def _name(job: Manifest, role: str, index: int) -> str:
    return f"{job['metadata']['name']}-{role.lower()}-{index}"


def _pod(job: Manifest, role: str, index: int) -> Manifest:
    """Of the role's template, with the role's restart policy."""
    roles, pod = job["spec"]["pytorchReplicaSpecs"], _object(job, "Pod", role, index)
    template = copy.deepcopy(roles[role]["template"])
    metadata = template.get("metadata", {})
    # Without a Master the role is worker 0's (pytorchjob_controller.go, IsMasterRole).
    master = {f"{_LABEL}job-role": "master"} if role == "Master" or ("Master" not in roles and index == 0) else {}
    labels = {**metadata.get("labels", {}), **pod["metadata"]["labels"], **master}
    spec = {**template["spec"], "restartPolicy": roles[role]["restartPolicy"]}
    _trainer(spec)["ports"] = _ports(spec)
    variables = [{"name": name, "value": value} for name, value in _variables(job, role, index).items()]
    for container in spec["containers"]:
        container["env"] = [*container.get("env", ()), *variables]
    if role == "Worker" and "Master" in roles:
        waits = {
            "name": "init-pytorch",
            "image": "alpine:3.10",
            "imagePullPolicy": "IfNotPresent",
            "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
            "command": ["sh", "-c", _WAIT.format(host=_name(job, "Master", 0))],
        }
        spec["initContainers"] = [*spec.get("initContainers", ()), waits]
    return {**pod, "metadata": {**metadata, **pod["metadata"], "labels": labels}, "spec": spec}


def _trainer(spec: Mapping[str, Any]) -> Manifest:
    trainer: Manifest = next(container for container in spec["containers"] if container["name"] == TRAINER)
    return trainer


def _ports(spec: Mapping[str, Any]) -> list[Manifest]:
    """Those of the training container: one of the operator's name is kept, whatever its number."""
    ports = _trainer(spec).get("ports", [])
    is_there = any(port.get("name") == OPERATORS_PORT for port in ports)
    return [*ports] if is_there else [*ports, {"containerPort": DEFAULT_PORT, "name": OPERATORS_PORT}]


def _port(job: Manifest, role: str) -> int:
    """At which node 0 is met."""
    ports = _ports(job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"])
    return next(int(port["containerPort"]) for port in ports if port.get("name") == OPERATORS_PORT)


def _variables(job: Manifest, role: str, index: int) -> dict[str, str]:
    """In the operator's order, which decides: of two values of one name, the last counts (envvar.go, setPodEnv)."""
    roles, elastic = job["spec"]["pytorchReplicaSpecs"], job["spec"].get("elasticPolicy")
    variables = {"PYTHONUNBUFFERED": "1"}
    if elastic is not None:
        return variables | {
            "PET_RDZV_ENDPOINT": f"{_name(job, role, 0)}:{_port(job, role)}",
            "PET_RDZV_BACKEND": elastic["rdzvBackend"],
            "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
            "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
            "PET_NPROC_PER_NODE": str(elastic["nProcPerNode"]),
        }
    master, port = _name(job, "Master", 0), str(_port(job, "Master"))
    count, rank = str(sum(spec["replicas"] for spec in roles.values())), str(index + 1 if role == "Worker" else index)
    variables |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": master, "PET_MASTER_ADDR": master}
    # Pods, not processes: nprocPerNode stays "auto", which counts as 1.
    variables |= {"WORLD_SIZE": count, "RANK": rank, "PET_NODE_RANK": rank}
    return variables | {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": count}


def _service(job: Manifest, role: str, index: int) -> Manifest:
    """Headless, with every port of the training container under its name (common/service.go)."""
    service = _object(job, "Service", role, index)
    ports = _ports(job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"])
    named = sorted((port.get("name", ""), port["containerPort"]) for port in ports)
    listed = [{"name": name, "port": port} if name else {"port": port} for name, port in named]
    return {**service, "spec": {"clusterIP": "None", "ports": listed, "selector": service["metadata"]["labels"]}}
