"""The job in a few lines for people: how many of what, and what they may not have meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import envvars
from ...config.registered import Registered
from ...config.validate import QUEUE_LABEL
from ...errors import RenderError
from ...plugin.images import warning_of_image
from ...topology import DEFAULT_PORT
from .pod_templates import PodTemplates


@dataclass(frozen=True)
class Summary:
    """What a job amounts to.

    Attributes:
        facts: name and text, in the order to print them.
        warnings: one sentence each; the job can be registered all the same.
    """

    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """As YAML comments, to stand above the manifest."""
        width = max(len(name) for name, _ in self.facts)
        return [f"# {name:<{width}}  {text}" for name, text in self.facts] + [
            f"# WARNING {warning}" for warning in self.warnings
        ]


def summarise(
    manifest: Mapping[str, Any],
    *,
    task: str,
    retries: int = 0,
    max_restarts: int = 0,
    further: Sequence[str] = (),
) -> Summary:
    """Sum up the job that :func:`.job_manifest` made for *task*.

    Args:
        manifest: the job.
        task: its name.
        retries, max_restarts: of Flyte, and of all ranks together.
        further: warnings of others.
    """
    roles = _roles(manifest)
    first = next(iter(roles.values()))
    registered = _registered(_primary(first))
    nproc, changed = _ranks_of_node(registered, first)
    gpus = sum(role["replicas"] * _gpus(_primary(role)) for role in roles.values())
    facts = [
        ("task", task),
        ("job", f"{manifest['kind']} {manifest['metadata']['name']}" + _pods(roles)),
        ("nodes", registered.nnodes),
        ("ranks", f"{_ranks(registered, nproc)} ({nproc} per node, {registered.backend})"),
        ("GPUs", f"{gpus} in total" if gpus else "none"),
        ("images", ", ".join(_images(roles))),
        (
            "restarts",
            f"{max_restarts} of all ranks together in each attempt, {retries} retries of the attempt by Flyte",
        ),
        ("platform", "Flyte's own defaults; what yours adds or bounds is not shown"),
    ]
    warnings = [*changed, *_warnings(manifest, roles, nproc), *further]
    return Summary(tuple(facts), tuple(dict.fromkeys(warnings)))


def notes_of(task: Any, template: Any, pod_templates: PodTemplates | None) -> list[str]:
    """What one should know of a task before it is registered, and a manifest does not show; one sentence each.

    Args:
        task: one of ours.
        template: the ``TaskTemplate`` that it is registered as.
        pod_templates: the cluster's; None: it may have others than are known here.
    """
    from google.protobuf.json_format import MessageToDict

    notes = []
    name = template.metadata.pod_template_name
    if name and name not in (pod_templates or {}):
        notes.append(
            f"the cluster's PodTemplate {name!r}, on which the backend lays these pods, is not known here: give its "
            "YAML with --pod-template FILE"
        )
    (container, *_) = MessageToDict(template.k8s_pod.pod_spec)["containers"]
    unusable = warning_of_image(container.get("image"), task.plan.roles)
    notes += [] if unusable is None else [unusable]
    for role in task.plan.roles:
        fields = [field for field in ("image", "requests", "limits") if getattr(role.written, field, None)]
        if fields:
            named = f"{' and '.join(fields)} of {role.name}"
            notes.append(f"with_overrides does not change {named}: what a role names of its own stays")
    return notes


def _roles(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if manifest["kind"] == "Pod":
        template = {"spec": manifest["spec"], "metadata": manifest["metadata"]}
        return {"Pod": {"replicas": 1, "restartPolicy": manifest["spec"]["restartPolicy"], "template": template}}
    return dict(manifest["spec"]["pytorchReplicaSpecs"])


def _primary(role: Mapping[str, Any]) -> Mapping[str, Any]:
    first: Mapping[str, Any] = role["template"]["spec"]["containers"][0]
    return first


def _pods(roles: Mapping[str, Mapping[str, Any]]) -> str:
    if set(roles) == {"Pod"}:
        return ""
    return ": " + ", ".join(f"{role['replicas']} {name}" for name, role in roles.items())


def _registered(container: Mapping[str, Any]) -> Registered:
    """The job, as the task's container is told of it."""
    told = {variable["name"]: variable["value"] for variable in container.get("env", ()) if "value" in variable}
    registered = Registered.from_env(told)
    if registered is None:
        raise RenderError("this is no task of this package", where={"container": container.get("name")})
    return registered


def _ranks(registered: Registered, nproc: int) -> str:
    sizes = dict.fromkeys((registered.min_nodes, registered.max_nodes))
    return " to ".join(str(count * nproc) for count in sizes)


def _ranks_of_node(registered: Registered, role: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Ranks of a node, and what there is to say of them: an override, or a platform's limit, may have changed the GPUs
    (:func:`flytekitplugins_safedist.topology.devices.ranks_here`)."""
    nproc, gpus = registered.nproc_per_node, registered.gpus or 0
    here = _gpus(_primary(role))
    if not here or _mig(role):
        return nproc, ()
    requests = f"the pods have {here} GPUs, and the task was registered for {gpus or 'no'}"
    if registered.nproc_is_open and here != nproc:
        return here, (f"{requests}: ranks follow them, {here} on each node",)
    if not registered.nproc_is_open and here < min(gpus, nproc):
        repair = "leave nproc_per_node out, so that ranks follow the GPUs"
        return nproc, (f"{requests} and {nproc} ranks: every node fails at once; {repair}",)
    return nproc, ()


def _gpus(container: Mapping[str, Any]) -> int:
    limits = container.get("resources", {}).get("limits", {})
    return sum(int(value) for name, value in limits.items() if name.endswith("/gpu") or "/mig-" in name)


def _images(roles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    images = {name: str(_primary(role).get("image")) for name, role in roles.items()}
    if len(set(images.values())) == 1:
        return list(images.values())[:1]
    return [f"{image} ({name})" for name, image in images.items()]


def _warnings(manifest: Mapping[str, Any], roles: Mapping[str, Mapping[str, Any]], nproc: int) -> Iterator[str]:
    for name, role in roles.items():
        gpus = _gpus(_primary(role))
        if gpus > nproc:
            idle = gpus - nproc
            yield f"{gpus} GPUs per {name.lower()}, but {nproc} ranks: {idle} GPUs stay idle unless ranks take several"
        if nproc > 1 and _mig(role):
            yield "each rank sees one MIG slice, and NCCL joins no two slices of one GPU: use Gloo, or whole GPUs"
        spec = role["template"]["spec"]
        if len(spec["containers"]) > 1:
            names = ", ".join(container["name"] for container in spec["containers"][1:])
            yield f"the pod of {name} ends only when every container does: {names} must end by themselves"
        if spec.get("hostNetwork"):
            yield f"hostNetwork: two jobs on one machine meet at the same port {DEFAULT_PORT} (set {envvars.ENDPOINT})"
    yield from _job_warnings(manifest, roles)


def _mig(role: Mapping[str, Any]) -> bool:
    limits = _primary(role).get("resources", {}).get("limits", {})
    affinity = str(role["template"]["spec"].get("affinity", {}))
    return any("/mig-" in name for name in limits) or (
        "gpu-partition-size" in affinity and "DoesNotExist" not in affinity
    )


def _job_warnings(manifest: Mapping[str, Any], roles: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if manifest["kind"] == "Pod":
        return
    worker = roles.get("Worker", {"replicas": 0})
    if worker["replicas"] and worker["restartPolicy"] == "Never":
        yield "a lost worker fails the job, as its restart policy is Never (left out, it may come back and join)"
    of_pods = next(iter(roles.values()))["template"].get("metadata", {}).get("labels", {})
    of_job = manifest["metadata"].get("labels", {})
    if QUEUE_LABEL in of_pods and QUEUE_LABEL not in of_job:
        kind = manifest["kind"]
        yield (
            f"a pod template's {QUEUE_LABEL} is put on the pods, not on the {kind}, where Kueue looks for it: use "
            f"queue= of the task's config, which Flyte puts on the {kind}"
        )
