"""The pod of a task: the user's pod template with our volumes, merged into a new one each time.

Never the user's own object: two tasks may share it, and a task that is made twice must not find its first volumes.
"""

from __future__ import annotations

import copy
from typing import Any

from .. import envvars
from ..config import grace_period
from ..config.arguments import TaskArguments
from ..config.options import SCRATCH_MOUNT, SHARED_MEMORY_MOUNT, Scratch
from ..config.plan import Plan
from ..config.validate import SCRATCH_VOLUME
from ..topology import DEFAULT_PORT

OPERATORS_PORT = "pytorchjob-port"
"""What the operator calls the port at which node 0 is met (training-operator v1.9.0)."""


def merged_template(arguments: TaskArguments, plan: Plan) -> Any:
    """A new flytekit ``PodTemplate``: the user's with the scratch volume, the end of the log as the termination
    message and a grace period of our own length where the user's says nothing else, for several nodes a short stay on
    lost machines, and what the cluster would refuse for want of it: names of ports, limits of sidecars.

    The primary container comes first: the backend writes into the first container of a pod (``_F_WN`` in
    ``kfoperators/pytorch``), and ``kubectl exec`` enters it.
    """
    from flytekit.core.pod_template import PodTemplate
    from kubernetes.client import V1EnvVar

    template = copy.deepcopy(arguments.pod_template) if arguments.pod_template is not None else PodTemplate()
    primary = _primary_first(template)
    if primary.termination_message_policy is None:
        # Flyte shows a failed pod's termination message. It sets this on the containers that it makes, and not on those
        # of a pod template (flytek8s, v1.16.8): there the text would be empty.
        primary.termination_message_policy = "FallbackToLogsOnError"
    if plan.scratch.path is None and plan.scratch.volume is not None:
        _mount(template.pod_spec, primary, _scratch(plan.scratch), SCRATCH_MOUNT)
        # Beside its mount, not among the task's variables: those outlive a pod template of with_overrides.
        primary.env = [*(primary.env or ()), V1EnvVar(name=envvars.SCRATCH_ROOT, value=SCRATCH_MOUNT)]
    primary.env = [*(primary.env or ()), _kubernetes_node()]
    if _is_limited_by_pod(plan.scratch):
        primary.env = [*primary.env, _ephemeral_storage()]
    _set_grace(template.pod_spec, primary, plan)
    if plan.max_nodes > 1:
        _be_replaced_soon(template.pod_spec)
    _name_ports(primary)
    for container in template.pod_spec.containers[1:]:
        _complete_limits(container)
    return template


LOST_AFTER_SECONDS = 30
"""How long a pod of a job of several nodes stays on a machine that the cluster has lost sight of."""
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def _set_grace(spec: Any, primary: Any, plan: Plan) -> None:
    """Time between SIGTERM and SIGKILL, from our own waits unless the user's template says it; and what it is, for the
    pod: nothing else tells it."""
    from kubernetes.client import V1EnvVar

    if spec.termination_grace_period_seconds is None:
        spec.termination_grace_period_seconds = grace_period.needed(plan.timeouts)
    grace = V1EnvVar(name=envvars.GRACE, value=str(spec.termination_grace_period_seconds))
    primary.env = [*(primary.env or ()), grace]


def _be_replaced_soon(spec: Any) -> None:
    """The others wait for this pod: Kubernetes gives a lost machine 300 s (the admission plugin
    DefaultTolerationSeconds, which adds nothing where a pod says something)."""
    from kubernetes.client import V1Toleration

    tolerations = [toleration for toleration in spec.tolerations or () if toleration.effect in (None, "", "NoExecute")]
    for key in _LOST:
        if not any(toleration.key in (key, None, "") for toleration in tolerations):
            waits = V1Toleration(key=key, operator="Exists", effect="NoExecute", toleration_seconds=LOST_AFTER_SECONDS)
            spec.tolerations = [*(spec.tolerations or ()), waits]


def shared_memory(arguments: TaskArguments) -> bool | str:
    """What the task asks of the backend for ``/dev/shm``: what ``@task(shared_memory=...)`` says; by default as much as
    the container's memory allows, for the runtime's 64 MiB are too few for NCCL and data loaders. False where the pod
    template mounts something there.

    Not a volume of our own: ``with_overrides(shared_memory=...)`` replaces what was asked, and would meet a mount.
    """
    if arguments.shared_memory is not None:
        return arguments.shared_memory
    return SHARED_MEMORY_MOUNT not in arguments.mounted_paths()


def _is_limited_by_pod(scratch: Scratch) -> bool:
    """Whether the ranks' limit on disk follows from the pod's (see :mod:`.disklimit`)."""
    return scratch.size_limit is None and scratch.path is None and scratch.claim is None and scratch.volume != "memory"


def _ephemeral_storage() -> Any:
    """Tell the container its limit, as Kubernetes sees it in the end: the task's, a role's, an override's, or a
    namespace's default."""
    from kubernetes.client import V1EnvVar, V1EnvVarSource, V1ResourceFieldSelector

    limit = V1ResourceFieldSelector(resource="limits.ephemeral-storage")
    return V1EnvVar(name=envvars.EPHEMERAL_STORAGE, value_from=V1EnvVarSource(resource_field_ref=limit))


def _kubernetes_node() -> Any:
    """Tell the container which machine it is on: errors name one that is at fault, and a range goes on without it."""
    from kubernetes.client import V1EnvVar, V1EnvVarSource, V1ObjectFieldSelector

    field = V1ObjectFieldSelector(field_path="spec.nodeName")
    return V1EnvVar(name=envvars.KUBERNETES_NODE, value_from=V1EnvVarSource(field_ref=field))


def _name_ports(container: Any) -> None:
    """The operator makes a service of the ports, where ports without a name are refused: node 0 would never be found
    (training-operator v1.9.0, common/service.go)."""
    taken = {port.name for port in container.ports or ()}
    for port in container.ports or ():
        if port.name is None:
            ours = port.container_port == DEFAULT_PORT  # two ports of one number would be refused as well
            name = OPERATORS_PORT if ours else f"{(port.protocol or 'TCP').lower()}-{port.container_port}"
            if name not in taken:
                taken.add(name)
                port.name = name


def _complete_limits(container: Any) -> None:
    """cpu and memory that are only requested become limits as well: the backend writes a limit of zero there, and the
    API server refuses the pod (flytek8s v1.16.8, ``ApplyResourceOverrides`` of a container that is not the primary)."""
    resources = container.resources
    requests = getattr(resources, "requests", None) or {}
    limits = getattr(resources, "limits", None) or {}
    missing = {name: requests[name] for name in ("cpu", "memory") if name in requests and name not in limits}
    if missing:
        resources.limits = {**limits, **missing}


def _primary_first(template: Any) -> Any:
    from kubernetes.client import V1Container

    from .primary import Primary

    name, containers = template.primary_container_name, list(template.pod_spec.containers or ())
    own = next((container for container in containers if container.name == name), None)
    primary = Primary.of(own or V1Container(name=name))
    template.pod_spec.containers = [primary, *(container for container in containers if container is not own)]
    return primary


def _mount(spec: Any, container: Any, volume: Any, path: str) -> None:
    from kubernetes.client import V1VolumeMount

    spec.volumes = [*(spec.volumes or ()), volume]
    container.volume_mounts = [*(container.volume_mounts or ()), V1VolumeMount(name=volume.name, mount_path=path)]


def _scratch(scratch: Scratch) -> Any:
    from kubernetes.client import V1EmptyDirVolumeSource, V1PersistentVolumeClaimVolumeSource, V1Volume

    if scratch.claim is not None:
        return V1Volume(
            name=SCRATCH_VOLUME,
            persistent_volume_claim=V1PersistentVolumeClaimVolumeSource(claim_name=scratch.claim),
        )
    size = None if scratch.size_limit is None else str(scratch.size_limit)
    source = V1EmptyDirVolumeSource(medium="Memory" if scratch.volume == "memory" else None, size_limit=size)
    return V1Volume(name=SCRATCH_VOLUME, empty_dir=source)
