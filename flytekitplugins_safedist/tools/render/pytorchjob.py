"""A PyTorchJob's pods and services (``pkg/controller.v1/{pytorch,common}`` of training-operator v1.9.0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...topology import DEFAULT_PORT
from .replicas import make_pod, own_labels, variables

_CONTAINER = "pytorch"
_PORT = "pytorchjob-port"
_ROLES = ("Master", "Worker")


def created(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its pods, master first, then a service for each: node 0 is met under its service's name."""
    numbered = list(_numbered(manifest))
    return [_pod(manifest, *replica) for replica in numbered] + [_service(manifest, *replica) for replica in numbered]


def _numbered(manifest: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    for role in _ROLES:
        for index in range(specs.get(role, {}).get("replicas", 0)):
            yield role, index


def _name(manifest: Mapping[str, Any], role: str, index: int) -> str:
    return f"{manifest['metadata']['name']}-{role.lower()}-{index}"


def _labels(role: str, index: int) -> dict[str, str]:
    return {"replica-type": role.lower(), "replica-index": str(index)}


def _pod(manifest: Mapping[str, Any], role: str, index: int) -> dict[str, Any]:
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    # Without a Master the role is worker 0's (pytorchjob_controller.go, IsMasterRole).
    is_master = role == "Master" or ("Master" not in specs and index == 0)
    labels = _labels(role, index) | ({"job-role": "master"} if is_master else {})
    pod = make_pod(manifest, specs[role], _name(manifest, role, index), labels)
    main = _trainer(pod["spec"])
    main["ports"] = _ports(main)
    for container in pod["spec"]["containers"]:
        container["env"] = [*container.get("env", ()), *_environment(manifest, role, index)]
    if role == "Worker" and "Master" in specs:
        waits = _wait_for(_name(manifest, "Master", 0))
        pod["spec"]["initContainers"] = [*pod["spec"].get("initContainers", ()), waits]
    return pod


def _trainer(spec: Mapping[str, Any]) -> dict[str, Any]:
    containers: list[dict[str, Any]] = spec["containers"]
    return next((container for container in containers if container["name"] == _CONTAINER), containers[0])


def _ports(container: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A port of the operator's name is kept, whatever its number (``setPyTorchDefaultPort``)."""
    ports = list(container.get("ports", ()))
    if any(port.get("name") == _PORT for port in ports):
        return ports
    return [*ports, {"containerPort": DEFAULT_PORT, "name": _PORT}]


def _port(manifest: Mapping[str, Any], role: str) -> str:
    main = _trainer(manifest["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"])
    return next(str(port["containerPort"]) for port in _ports(main) if port.get("name") == _PORT)


def _environment(manifest: Mapping[str, Any], role: str, index: int) -> list[dict[str, str]]:
    """In the operator's order, which decides: of two values of one name, the last counts (envvar.go, setPodEnv)."""
    specs, elastic = manifest["spec"]["pytorchReplicaSpecs"], manifest["spec"].get("elasticPolicy")
    pairs = [("PYTHONUNBUFFERED", "1")]
    count = sum(spec["replicas"] for spec in specs.values())
    if "Master" in specs:
        master, port = _name(manifest, "Master", 0), _port(manifest, "Master")
        pairs += [("MASTER_PORT", port), ("PET_MASTER_PORT", port)]
        pairs += [("MASTER_ADDR", master), ("PET_MASTER_ADDR", master)]
        rank = str(index + 1 if role == "Worker" else index)
        # Pods, not processes: nprocPerNode stays "auto", which counts as 1.
        pairs += [("WORLD_SIZE", str(count)), ("RANK", rank), ("PET_NODE_RANK", rank)]
    if elastic is None:
        pairs += [("PET_NPROC_PER_NODE", "auto"), ("PET_NNODES", str(count))]
    else:
        pairs += [
            ("PET_RDZV_ENDPOINT", f"{_name(manifest, 'Worker', 0)}:{_port(manifest, 'Worker')}"),
            ("PET_RDZV_BACKEND", elastic["rdzvBackend"]),
            ("PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}"),
            ("PET_MAX_RESTARTS", str(elastic["maxRestarts"])),
            ("PET_NPROC_PER_NODE", str(elastic["nProcPerNode"])),
        ]
    return variables(pairs)


def _service(manifest: Mapping[str, Any], role: str, index: int) -> dict[str, Any]:
    """Headless, with every port of the training container under its name (common/service.go): ports without a name
    fall into one, and the API server refuses it."""
    main = _trainer(manifest["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"])
    named = {port.get("name", ""): port["containerPort"] for port in _ports(main)}
    labels = own_labels(manifest, _labels(role, index))
    ports = [{"name": name, "port": port} if name else {"port": port} for name, port in sorted(named.items())]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": _name(manifest, role, index),
            "namespace": manifest["metadata"]["namespace"],
            "labels": labels,
        },
        "spec": {"clusterIP": "None", "ports": ports, "selector": dict(labels)},
    }


def _wait_for(host: str) -> dict[str, Any]:
    script = (
        f"err=1;for i in $(seq 100); do if nslookup {host}; then err=0 && break; fi;"
        "echo waiting for master; sleep 2; done; exit $err"
    )
    return {
        "name": "init-pytorch",
        "image": "alpine:3.10",
        "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
        "command": ["sh", "-c", script],
    }
