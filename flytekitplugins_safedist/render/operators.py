"""What the training operator makes of a job: its pods, with their names, variables and init containers.

Follows ``pkg/controller.v1`` of kubeflow/training-operator v1.9.0 with its default configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..errors import RenderError
from ..topology import DEFAULT_PORT

_LABEL = "training.kubeflow.org"
_PYTORCH_PORT = "pytorchjob-port"
_CONFIG, _KUBECTL = "mpi-job-config", "mpi-job-kubectl"


def pods(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The pods of *manifest* in the order in which the operator numbers them; an ordinary pod is its own only one.

    Raises:
        RenderError: no operator known here handles this kind.
    """
    kind = manifest["kind"]
    if kind == "Pod":
        return [copy.deepcopy(dict(manifest))]
    if kind == "PyTorchJob":
        return _of_pytorchjob(manifest)
    if kind == "MPIJob":
        return _of_mpijob(manifest)
    raise RenderError("the pods of this job cannot be shown", where={"kind": kind})


def _of_pytorchjob(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    found = []
    for role in ("Master", "Worker"):
        for index in range(specs.get(role, {}).get("replicas", 0)):
            found.append(_pytorch_pod(manifest, role, index))
    return found


def _pytorch_pod(manifest: Mapping[str, Any], role: str, index: int) -> dict[str, Any]:
    replica = manifest["spec"]["pytorchReplicaSpecs"][role]
    name = f"{manifest['metadata']['name']}-{role.lower()}-{index}"
    # Without a Master the role is worker 0's (pytorchjob_controller.go, IsMasterRole).
    is_master = role == "Master" or ("Master" not in manifest["spec"]["pytorchReplicaSpecs"] and index == 0)
    labels = {"operator-name": "pytorchjob-controller", "replica-type": role.lower(), "replica-index": str(index)}
    pod = _pod(manifest, replica, name, labels | ({"job-role": "master"} if is_master else {}))
    for container in pod["spec"]["containers"]:
        container["env"] = [*container.get("env", ()), *_pytorch_env(manifest, role, index)]
        if container["name"] == "pytorch" and not any(one.get("name") == _PYTORCH_PORT for one in _ports(container)):
            container["ports"] = [*_ports(container), {"containerPort": DEFAULT_PORT, "name": _PYTORCH_PORT}]
    if role == "Worker" and "Master" in manifest["spec"]["pytorchReplicaSpecs"]:
        waits = _wait_for(f"{manifest['metadata']['name']}-master-0")
        pod["spec"]["initContainers"] = [*pod["spec"].get("initContainers", ()), waits]
    return pod


def _pytorch_env(manifest: Mapping[str, Any], role: str, index: int) -> list[dict[str, str]]:
    """In the operator's order, which decides: of two values of one name, the last counts (envvar.go, setPodEnv)."""
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    specs, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    pairs = [("PYTHONUNBUFFERED", "1")]
    count = sum(one["replicas"] for one in specs.values())
    if "Master" in specs:
        master, port = f"{name}-master-0", str(DEFAULT_PORT)
        pairs += [
            ("MASTER_PORT", port),
            ("PET_MASTER_PORT", port),
            ("MASTER_ADDR", master),
            ("PET_MASTER_ADDR", master),
        ]
        rank = str(index + 1 if role == "Worker" else index)
        # Pods, not processes: nprocPerNode stays "auto", which counts as 1.
        pairs += [("WORLD_SIZE", str(count)), ("RANK", rank), ("PET_NODE_RANK", rank)]
    if elastic is None:
        pairs += [("PET_NPROC_PER_NODE", "auto"), ("PET_NNODES", str(count))]
    else:
        pairs += [
            ("PET_RDZV_ENDPOINT", f"{name}-worker-0:{DEFAULT_PORT}"),
            ("PET_RDZV_BACKEND", elastic["rdzvBackend"]),
            ("PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}"),
            ("PET_MAX_RESTARTS", str(elastic["maxRestarts"])),
            ("PET_NPROC_PER_NODE", str(elastic["nProcPerNode"])),
        ]
    return _env(pairs)


def _of_mpijob(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    specs, name = manifest["spec"]["mpiReplicaSpecs"], manifest["metadata"]["name"]
    labels = {"operator-name": "mpijob-controller"}
    of_launcher = {"replica-type": "launcher", "job-role": "master"}
    launcher = _pod(manifest, specs["Launcher"], f"{name}-launcher", labels | of_launcher)
    _complete_launcher(launcher, name)
    found = [launcher]
    for index in range(specs["Worker"]["replicas"]):
        of_worker = {"replica-type": "worker", "replica-index": str(index)}
        pod = _pod(manifest, specs["Worker"], f"{name}-worker-{index}", labels | of_worker)
        main = pod["spec"]["containers"][0]
        if not main.get("command"):
            # Whatever args the backend sent (mpijob_controller.go, newWorker): the launcher starts everything.
            main["command"], main["args"] = ["sleep"], ["365d"]
        _add_config(pod, name, ("kubexec.sh",))
        found.append(pod)
    return found


def _complete_launcher(pod: dict[str, Any], name: str) -> None:
    main = pod["spec"]["containers"][0]
    pairs = [("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh"), ("OMPI_MCA_orte_default_hostfile", "/etc/mpi/hostfile")]
    if not any("gpu" in key for key in main.get("resources", {}).get("limits", {})):
        pairs += [("NVIDIA_VISIBLE_DEVICES", ""), ("NVIDIA_DRIVER_CAPABILITIES", "")]
    pairs += [("I_MPI_HYDRA_BOOTSTRAP", "rsh"), ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "/etc/mpi/kubexec.sh")]
    main["env"] = [*main.get("env", ()), *_env(pairs)]
    pod["spec"].setdefault("serviceAccountName", f"{name}-launcher")
    kubectl = {"name": _KUBECTL, "mountPath": "/opt/kube"}
    main["volumeMounts"] = [*main.get("volumeMounts", ()), kubectl]
    pod["spec"]["volumes"] = [*pod["spec"].get("volumes", ()), {"name": _KUBECTL, "emptyDir": {}}]
    _add_config(pod, name, ("kubexec.sh", "hostfile", "discover_hosts.sh"))
    delivery = {
        "name": "kubectl-delivery",
        "image": "kubeflow/kubectl-delivery:latest",
        "imagePullPolicy": "IfNotPresent",
        "env": _env([("TARGET_DIR", "/opt/kube"), ("NAMESPACE", pod["metadata"]["namespace"])]),
        "volumeMounts": [kubectl, {"name": _CONFIG, "mountPath": "/etc/mpi"}],
    }
    pod["spec"]["initContainers"] = [*pod["spec"].get("initContainers", ()), delivery]


def _add_config(pod: dict[str, Any], name: str, files: tuple[str, ...]) -> None:
    main = pod["spec"]["containers"][0]
    main["volumeMounts"] = [*main.get("volumeMounts", ()), {"name": _CONFIG, "mountPath": "/etc/mpi"}]
    items = [{"key": one, "path": one, "mode": 0o444 if one == "hostfile" else 0o555} for one in files]
    volume = {"name": _CONFIG, "configMap": {"name": f"{name}-config", "items": items}}
    pod["spec"]["volumes"] = [*pod["spec"].get("volumes", ()), volume]


def _pod(
    manifest: Mapping[str, Any], replica: Mapping[str, Any], name: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    template = copy.deepcopy(replica["template"])
    metadata = template.get("metadata", {})
    ours = {f"{_LABEL}/{key}": value for key, value in {"job-name": manifest["metadata"]["name"], **labels}.items()}
    spec = template["spec"]
    spec["restartPolicy"] = replica["restartPolicy"]
    named = {
        **metadata,
        "name": name,
        "namespace": manifest["metadata"]["namespace"],
        "labels": {**metadata.get("labels", {}), **ours},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": spec}


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


def _ports(container: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(container.get("ports", ()))


def _env(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in pairs]
