"""An MPIJob's pods, and what its launcher needs to reach the workers (``pkg/controller.v1/mpi`` of training-operator
v1.9.0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .replicas import make_pod, variables

_CONFIG, _KUBECTL = "mpi-job-config", "mpi-job-kubectl"
_DELIVERY = {"cpu": "100m", "ephemeral-storage": "5Gi", "memory": "512Mi"}
_RBAC = "rbac.authorization.k8s.io"


def created(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Launcher and workers, the launcher's config map, and its right to run commands in the workers."""
    specs, name = manifest["spec"]["mpiReplicaSpecs"], _name(manifest)
    workers = [f"{name}-worker-{index}" for index in range(specs["Worker"]["replicas"])]
    return [
        _launcher(manifest),
        *(_worker(manifest, worker, index) for index, worker in enumerate(workers)),
        _config_map(manifest, workers),
        _account(manifest),
        _role(manifest, workers),
        _role_binding(manifest),
    ]


def _name(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


def _launcher(manifest: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{_name(manifest)}-launcher"
    labels = {"replica-type": "launcher", "job-role": "master"}
    pod = make_pod(manifest, manifest["spec"]["mpiReplicaSpecs"]["Launcher"], name, labels)
    spec, main = pod["spec"], pod["spec"]["containers"][0]
    main["env"] = [*main.get("env", ()), *_launcher_environment(main, has_gpus=_has_gpus(spec))]
    if not spec.get("serviceAccountName"):
        spec["serviceAccountName"] = name
    kubectl = {"name": _KUBECTL, "mountPath": "/opt/kube"}
    main["volumeMounts"] = [*main.get("volumeMounts", ()), kubectl]
    spec["volumes"] = [*spec.get("volumes", ()), {"name": _KUBECTL, "emptyDir": {}}]
    _add_config(pod, _name(manifest), ("kubexec.sh", "hostfile", "discover_hosts.sh"))
    delivery = {
        "name": "kubectl-delivery",
        "image": "kubeflow/kubectl-delivery:latest",
        "imagePullPolicy": "IfNotPresent",
        "env": variables([("TARGET_DIR", "/opt/kube"), ("NAMESPACE", pod["metadata"]["namespace"])]),
        "resources": {"limits": dict(_DELIVERY), "requests": dict(_DELIVERY)},
        "volumeMounts": [kubectl, {"name": _CONFIG, "mountPath": "/etc/mpi"}],
    }
    spec["initContainers"] = [*spec.get("initContainers", ()), delivery]
    return pod


def _launcher_environment(main: Mapping[str, Any], *, has_gpus: bool) -> list[dict[str, str]]:
    pairs = [("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh"), ("OMPI_MCA_orte_default_hostfile", "/etc/mpi/hostfile")]
    if not has_gpus:
        pairs += [("NVIDIA_VISIBLE_DEVICES", ""), ("NVIDIA_DRIVER_CAPABILITIES", "")]
    there = {variable["name"] for variable in main.get("env", ())}
    intel = [("I_MPI_HYDRA_BOOTSTRAP", "rsh"), ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "/etc/mpi/kubexec.sh")]
    return variables([*pairs, *(variable for variable in intel if variable[0] not in there)])


def _has_gpus(spec: Mapping[str, Any]) -> bool:
    """``isGPULauncher``: any container whose limits have a name with "gpu" in or at the end of it."""
    return any(
        "gpu" in name for container in spec["containers"] for name in container.get("resources", {}).get("limits", {})
    )


def _worker(manifest: Mapping[str, Any], name: str, index: int) -> dict[str, Any]:
    labels = {"replica-type": "worker", "replica-index": str(index)}
    pod = make_pod(manifest, manifest["spec"]["mpiReplicaSpecs"]["Worker"], name, labels)
    main = pod["spec"]["containers"][0]
    if not main.get("command"):
        # Whatever args the backend sent (newWorker): the launcher starts everything.
        main["command"], main["args"] = ["sleep"], ["365d"]
    _add_config(pod, _name(manifest), ("kubexec.sh",))
    return pod


def _add_config(pod: dict[str, Any], name: str, files: tuple[str, ...]) -> None:
    main = pod["spec"]["containers"][0]
    main["volumeMounts"] = [*main.get("volumeMounts", ()), {"name": _CONFIG, "mountPath": "/etc/mpi"}]
    items = [{"key": file, "path": file, "mode": 0o444 if file == "hostfile" else 0o555} for file in files]
    volume = {"name": _CONFIG, "configMap": {"name": f"{name}-config", "items": items}}
    pod["spec"]["volumes"] = [*pod["spec"].get("volumes", ()), volume]


def _config_map(manifest: Mapping[str, Any], workers: list[str]) -> dict[str, Any]:
    slots = manifest["spec"].get("slotsPerWorker", 1)
    has_gpus = _has_gpus(manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"])
    launcher = f"{_name(manifest)}-launcher"
    hosts = [*([launcher] if has_gpus else []), *workers]
    found = _object(manifest, "v1", "ConfigMap", "config")
    found["data"] = {
        "hostfile": "".join(f"{host} slots={slots}\n" for host in hosts),
        "kubexec.sh": '#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n/opt/kube/kubectl exec ${POD_NAME} -- /bin/sh -c "$*"',
        # Of pods that run: none, when the job is created.
        "discover_hosts.sh": "#!/bin/sh" + (f"\necho {launcher}:{slots}\n" if has_gpus else ""),
    }
    return found


def _account(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Made where it is not there yet; one that the pods name, too (``newLauncherServiceAccount``)."""
    found = _object(manifest, "v1", "ServiceAccount", "launcher")
    found["metadata"]["name"] = _account_name(manifest)
    return found


def _account_name(manifest: Mapping[str, Any]) -> str:
    spec = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return str(spec.get("serviceAccountName") or f"{_name(manifest)}-launcher")


def _role(manifest: Mapping[str, Any], workers: list[str]) -> dict[str, Any]:
    found = _object(manifest, f"{_RBAC}/v1", "Role", "launcher")
    found["rules"] = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "resourceNames": workers, "verbs": ["create"]},
    ]
    return found


def _role_binding(manifest: Mapping[str, Any]) -> dict[str, Any]:
    found = _object(manifest, f"{_RBAC}/v1", "RoleBinding", "launcher")
    name = found["metadata"]["name"]
    found["roleRef"] = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    found["subjects"] = [
        {"kind": "ServiceAccount", "name": _account_name(manifest), "namespace": found["metadata"]["namespace"]}
    ]
    return found


def _object(manifest: Mapping[str, Any], version: str, kind: str, suffix: str) -> dict[str, Any]:
    name, namespace = _name(manifest), manifest["metadata"]["namespace"]
    metadata = {"name": f"{name}-{suffix}", "namespace": namespace, "labels": {"app": name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
