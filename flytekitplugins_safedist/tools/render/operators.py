"""What the training operator makes of a job: pods and services.

Follows ``pkg/controller.v1`` of kubeflow/training-operator v1.9.0 with its default configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ...errors import RenderError
from ...topology import DEFAULT_PORT
from .pod_templates import merged

Manifest = Mapping[str, Any]

_LABEL = "training.kubeflow.org"
_PORT = "pytorchjob-port"
_WAIT = (
    "err=1;for i in $(seq 100); do if nslookup {host}; then err=0 && break; fi;"
    "echo waiting for master; sleep 2; done; exit $err"
)


def pods(manifest: Manifest) -> list[dict[str, Any]]:
    """The pods of *manifest* in the order in which the operator numbers them; an ordinary pod is its own only one.

    Raises:
        RenderError: no operator known here handles this kind.
    """
    return [item for item in created(manifest) if item["kind"] == "Pod"]


def created(manifest: Manifest) -> list[dict[str, Any]]:
    """Every object that the operator creates for *manifest*, pods first.

    Raises:
        RenderError: no operator known here handles this kind.
    """
    makers = {"Pod": lambda pod: [copy.deepcopy(dict(pod))], "PyTorchJob": _of_pytorchjob}
    if manifest["kind"] not in makers:
        raise RenderError("the pods of this job cannot be shown", where={"kind": manifest["kind"]})
    return makers[manifest["kind"]](manifest)


def _object(manifest: Manifest, kind: str, name: str, labels: Mapping[str, str], **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": manifest["metadata"]["namespace"], "labels": dict(labels)}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}


def _labels(manifest: Manifest, role: str, **further: str) -> dict[str, str]:
    """The operator's, of an object of the job."""
    base = {"job-name": manifest["metadata"]["name"], "operator-name": "pytorchjob-controller"}
    found = {**base, "replica-type": role.lower(), **further}
    return {f"{_LABEL}/{key.replace('_', '-')}": value for key, value in found.items()}


def _pod(manifest: Manifest, replica: Manifest, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A pod of the role's template, with the role's restart policy."""
    own = _object(manifest, "Pod", name, labels, spec={"restartPolicy": replica["restartPolicy"]})
    return merged(replica["template"], own)


def _of_pytorchjob(manifest: Manifest) -> list[dict[str, Any]]:
    """Its pods, master first, then a service for each: node 0 is met under its service's name."""
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    numbered = [(role, index) for role in specs for index in range(specs[role]["replicas"])]
    return [make(manifest, *replica) for make in (_pytorch_pod, _service) for replica in numbered]


def _name(manifest: Manifest, role: str, index: int) -> str:
    return f"{manifest['metadata']['name']}-{role.lower()}-{index}"


def _pytorch_pod(manifest: Manifest, role: str, index: int) -> dict[str, Any]:
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    # Without a Master the role is worker 0's (pytorchjob_controller.go, IsMasterRole).
    is_master = role == "Master" or ("Master" not in specs and index == 0)
    labels = _labels(manifest, role, replica_index=str(index), **({"job_role": "master"} if is_master else {}))
    pod = _pod(manifest, specs[role], _name(manifest, role, index), labels)
    spec = pod["spec"]
    trainer = _trainer(spec)
    trainer["ports"] = _ports(trainer)
    variables = [{"name": name, "value": value} for name, value in _of_node(manifest, role, index).items()]
    for container in spec["containers"]:
        container["env"] = [*container.get("env", ()), *variables]
    if role == "Worker" and "Master" in specs:
        waits = {
            "name": "init-pytorch",
            "image": "alpine:3.10",
            "imagePullPolicy": "IfNotPresent",
            "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
            "command": ["sh", "-c", _WAIT.format(host=_name(manifest, "Master", 0))],
        }
        spec["initContainers"] = [*spec.get("initContainers", ()), waits]
    return pod


def _trainer(spec: Manifest) -> dict[str, Any]:
    containers: list[dict[str, Any]] = spec["containers"]
    return next((container for container in containers if container["name"] == "pytorch"), containers[0])


def _ports(container: Manifest) -> list[dict[str, Any]]:
    """A port of the operator's name is kept, whatever its number (``setPyTorchDefaultPort``)."""
    ports = list(container.get("ports", ()))
    if any(port.get("name") == _PORT for port in ports):
        return ports
    return [*ports, {"containerPort": DEFAULT_PORT, "name": _PORT}]


def _named_ports(manifest: Manifest, role: str) -> dict[str, int]:
    trainer = _trainer(manifest["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"])
    return {port.get("name", ""): port["containerPort"] for port in _ports(trainer)}


def _of_node(manifest: Manifest, role: str, index: int) -> dict[str, str]:
    """In the operator's order, which decides: of two values of one name, the last counts (envvar.go, setPodEnv)."""
    specs, elastic = manifest["spec"]["pytorchReplicaSpecs"], manifest["spec"].get("elasticPolicy")
    found = {"PYTHONUNBUFFERED": "1"}
    count = str(sum(spec["replicas"] for spec in specs.values()))
    if "Master" in specs:
        master, port = _name(manifest, "Master", 0), str(_named_ports(manifest, "Master")[_PORT])
        found |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": master, "PET_MASTER_ADDR": master}
        rank = str(index + 1 if role == "Worker" else index)
        # Pods, not processes: nprocPerNode stays "auto", which counts as 1.
        found |= {"WORLD_SIZE": count, "RANK": rank, "PET_NODE_RANK": rank}
    if elastic is None:
        return {**found, "PET_NPROC_PER_NODE": "auto", "PET_NNODES": count}
    return {
        **found,
        "PET_RDZV_ENDPOINT": f"{_name(manifest, 'Worker', 0)}:{_named_ports(manifest, 'Worker')[_PORT]}",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_NPROC_PER_NODE": str(elastic["nProcPerNode"]),
    }


def _service(manifest: Manifest, role: str, index: int) -> dict[str, Any]:
    """Headless, with every port of the training container under its name (common/service.go): ports without a name
    fall into one, and the API server refuses it."""
    labels = _labels(manifest, role, replica_index=str(index))
    named = sorted(_named_ports(manifest, role).items())
    ports = [{"name": name, "port": port} if name else {"port": port} for name, port in named]
    spec = {"clusterIP": "None", "ports": ports, "selector": labels}
    return _object(manifest, "Service", _name(manifest, role, index), labels, spec=spec)
