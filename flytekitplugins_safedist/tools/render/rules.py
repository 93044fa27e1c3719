"""What an API server, or the operator's webhook, refuses, although every field is known and of the right type.

The rules that a task of this package can break, of ``k8s.io/kubernetes/pkg/apis/core/validation`` v1.30 and
training-operator v1.9.0's webhook; :data:`NOT_CHECKED` says what is left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...config.quantities import value_of

NOT_CHECKED = (
    "quotas, limit ranges, admission policies and pod security of the namespace, whether images, claims, secrets and "
    "service accounts are there, and whether a node fits"
)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def refusals(manifest: Mapping[str, Any]) -> list[str]:
    """Why *manifest* would be refused, one line each, beginning with the field."""
    kind = manifest["kind"]
    found = list(_metadata(manifest.get("metadata", {}), ".metadata"))
    if kind == "Pod":
        found += _name(manifest, _SUBDOMAIN, 253)
        found += _pod(manifest["spec"], ".spec")
    elif kind == "Service":
        found += _name(manifest, _LABEL_1035, 63)
        found += _service(manifest["spec"])
    elif kind in ("PyTorchJob", "MPIJob"):
        found += _name(manifest, _LABEL_1035, 63)
        found += _listed_by_name(manifest["spec"])
        if kind == "PyTorchJob":
            found += _webhook(manifest["spec"])
    return found


def _name(manifest: Mapping[str, Any], form: re.Pattern[str], most: int) -> Iterator[str]:
    name = str(manifest["metadata"].get("name", ""))
    if not form.fullmatch(name) or len(name) > most:
        yield f".metadata.name: {name!r} must be lower-case letters, digits and '-', {most} characters at most"


def _metadata(metadata: Mapping[str, Any], path: str) -> Iterator[str]:
    for part in ("labels", "annotations"):
        for key, value in metadata.get(part, {}).items():
            prefix, slash, name = key.rpartition("/")
            bad_prefix = bool(slash) and (not _SUBDOMAIN.fullmatch(prefix) or len(prefix) > 253)
            # Annotations' keys are compared in lower case (ValidateAnnotations).
            if bad_prefix or not _QUALIFIED.fullmatch(name) or len(name) > 63:
                yield f"{path}.{part}: {key!r} is not a qualified name"
            if part == "labels" and value and (not _QUALIFIED.fullmatch(value) or len(value) > 63):
                yield f"{path}.labels[{key}]: {value!r} must be letters, digits, '-', '_' and '.', 63 at most"


def _pod(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    volumes = [volume.get("name", "") for volume in spec.get("volumes", ())]
    yield from _unique(volumes, f"{path}.volumes")
    for name in volumes:
        yield from _dns_label(name, f"{path}.volumes[{name}].name")
    listed = [("initContainers", container) for container in spec.get("initContainers", ())]
    listed += [("containers", container) for container in spec.get("containers", ())]
    yield from _unique([container.get("name", "") for _, container in listed], f"{path}.containers")
    for part, container in listed:
        below = f"{path}.{part}[{container.get('name', '')}]"
        yield from _container(container, below, frozenset(volumes))
        if container.get("restartPolicy") is not None and (
            part == "containers" or container["restartPolicy"] != "Always"
        ):
            yield f"{below}.restartPolicy: {container['restartPolicy']!r} may only be Always, in an init container"
    if spec.get("restartPolicy") not in (None, "Never", "OnFailure", "Always"):
        yield f"{path}.restartPolicy: {spec['restartPolicy']!r} is not a restart policy"


def _container(container: Mapping[str, Any], path: str, volumes: frozenset[str]) -> Iterator[str]:
    yield from _dns_label(container.get("name", ""), f"{path}.name")
    if not container.get("image"):
        yield f"{path}.image: is required"
    yield from _ports(container.get("ports", ()), f"{path}.ports")
    yield from _resources(container.get("resources", {}), f"{path}.resources")
    for variable in container.get("env", ()):
        if not _VARIABLE.fullmatch(variable.get("name", "")):
            yield f"{path}.env: {variable.get('name')!r} is not a name of a variable"
        if variable.get("value") and variable.get("valueFrom"):
            yield f"{path}.env[{variable['name']}]: has a value and valueFrom"
    mounts = container.get("volumeMounts", ())
    yield from _unique([mount.get("mountPath", "") for mount in mounts], f"{path}.volumeMounts")
    for mount in mounts:
        if mount.get("name") not in volumes:
            yield f"{path}.volumeMounts[{mount.get('mountPath')}].name: there is no volume {mount.get('name')!r}"
        if not mount.get("mountPath") or ":" in mount["mountPath"]:
            yield f"{path}.volumeMounts[{mount.get('mountPath')}].mountPath: must be a path without ':'"


def _ports(ports: Iterable[Mapping[str, Any]], path: str) -> Iterator[str]:
    yield from _unique([port["name"] for port in ports if port.get("name")], path)
    for port in ports:
        number, name = port.get("containerPort"), port.get("name")
        if not isinstance(number, int) or not 0 < number < 65536:
            yield f"{path}: {number!r} is not a port"
        if name and (not _PORT_NAME.fullmatch(name) or len(name) > 15):
            wanted = "must be a-z, 0-9 and '-', with at least one letter, 15 characters at most"
            yield f"{path}[{number}].name: {name!r} {wanted}"


def _resources(resources: Mapping[str, Any], path: str) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for part, listed in (("requests", requests), ("limits", limits)):
        for name, value in listed.items():
            if value_of(value) < 0 or (_is_extended(name) and value_of(value).denominator != 1):
                yield f"{path}.{part}[{name}]: {value!r} must be {'a whole number, ' * _is_extended(name)}0 or more"
    for name, value in requests.items():
        limit = limits.get(name)
        if limit is not None and value_of(value) > value_of(limit):
            yield f"{path}.requests[{name}]: {value!r} must be less than or equal to the limit {limit!r}"
        elif _is_extended(name) and (limit is None or value_of(value) != value_of(limit)):
            yield f"{path}.requests[{name}]: {value!r} must be equal to the limit {limit!r}"


def _is_extended(name: str) -> bool:
    """Resources of devices: whole numbers, the same in both, for nothing shares them."""
    return "/" in name and not name.partition("/")[0].endswith("kubernetes.io")


def _service(spec: Mapping[str, Any]) -> Iterator[str]:
    ports = spec.get("ports", ())
    yield from _unique([port["name"] for port in ports if port.get("name")], ".spec.ports")
    yield from _unique([port["port"] for port in ports], ".spec.ports")
    for index, port in enumerate(ports):
        if not port.get("name") and len(ports) > 1:
            yield f".spec.ports[{index}].name: is required where there are several (port {port['port']})"
        if port.get("name"):
            yield from _dns_label(port["name"], f".spec.ports[{index}].name")


def _listed_by_name(spec: Mapping[str, Any]) -> Iterator[str]:
    """What the CRDs of jobs call a map by name (``x-kubernetes-list-map-keys``); in a pod the last of a name counts."""
    for roles in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
        for role, replica in spec.get(roles, {}).items():
            pod = replica["template"]["spec"]
            for part in ("initContainers", "containers"):
                for container in pod.get(part, ()):
                    path = f".spec.{roles}[{role}].template.spec.{part}[{container['name']}].env"
                    names = [variable.get("name") for variable in container.get("env", ())]
                    yield from (f"{path}: Duplicate value{found}" for found in _unique(names, ""))


def _webhook(spec: Mapping[str, Any]) -> Iterator[str]:
    for role, replica in spec["pytorchReplicaSpecs"].items():
        path = f".spec.pytorchReplicaSpecs[{role}].template.spec.containers"
        containers = replica["template"]["spec"]["containers"]
        if not any(container.get("name") == "pytorch" for container in containers):
            yield f"{path}: must have at least one container with name pytorch"
        for container in containers:
            if not container.get("image"):
                yield f"{path}[{container.get('name')}].image: is required"


def _dns_label(name: str, path: str) -> Iterator[str]:
    if not _LABEL.fullmatch(name) or len(name) > 63:
        yield f"{path}: {name!r} must be lower-case letters, digits and '-', 63 characters at most"


def _unique(values: Iterable[object], path: str) -> Iterator[str]:
    for value, count in Counter(values).items():
        if count > 1:
            yield f"{path}: {value!r} is there {count} times and must be unique"
