"""The pod of a task: the user's pod template with our volumes, merged into a new one each time.

Never the user's own object: two tasks may share it, and a task that is made twice must not find its first volumes.
Imported when registration asks for it: the kubernetes client takes half a second, which ranks and pods need not spend.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from flytekit.core.pod_template import PodTemplate
from kubernetes import client as k8s

from .. import envvars
from ..config.arguments import TaskArguments
from ..config.effective import PARTS, by_part, over, with_one_count
from ..config.options import DEFAULT_PORT, OPERATORS_PORT, SCRATCH_MOUNT, Scratch
from ..config.plan import Plan
from ..config.validate import SCRATCH_VOLUME
from .jobspec import command

LOST_AFTER_SECONDS = 30
"""How long a pod of a job of several nodes stays on a machine that the cluster has lost sight of."""
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def merged_template(arguments: TaskArguments, plan: Plan) -> PodTemplate:
    """A new flytekit ``PodTemplate``: the user's with the scratch volume, the end of the log as the termination
    message and a grace period of our own length where the user's says nothing else, for several nodes a short stay on
    lost machines, and what the cluster would refuse for want of it: names of ports, limits of sidecars.

    The primary container comes first: the backend writes into the first container of a pod (``_F_WN`` in
    ``kfoperators/pytorch``), and ``kubectl exec`` enters it.
    """
    template = copy.deepcopy(arguments.pod_template) if arguments.pod_template is not None else PodTemplate()
    spec, scratch = template.pod_spec, plan.scratch
    primary = _primary_first(template)
    if primary.termination_message_policy is None:
        # Flyte shows a failed pod's termination message. It sets this on the containers that it makes, and not on those
        # of a pod template (flytek8s, v1.16.8): there the text would be empty.
        primary.termination_message_policy = "FallbackToLogsOnError"
    if spec.termination_grace_period_seconds is None:
        spec.termination_grace_period_seconds = plan.grace_needed
    # Nothing else tells a pod these.
    env = [_variable(envvars.KUBERNETES_NODE, field_ref=k8s.V1ObjectFieldSelector(field_path="spec.nodeName"))]
    env += [k8s.V1EnvVar(name=envvars.GRACE, value=str(spec.termination_grace_period_seconds))]
    if scratch.path is None and (scratch.claim or scratch.volume) is not None:
        spec.volumes = [*(spec.volumes or ()), _volume(scratch)]
        mount = k8s.V1VolumeMount(name=SCRATCH_VOLUME, mount_path=SCRATCH_MOUNT)
        primary.volume_mounts = [*(primary.volume_mounts or ()), mount]
        # Beside its mount, not among the task's variables: those outlive a pod template of with_overrides.
        env += [k8s.V1EnvVar(name=envvars.SCRATCH_ROOT, value=SCRATCH_MOUNT)]
    if scratch.size_limit is None and scratch.path is None and scratch.claim is None and scratch.volume != "memory":
        # The ranks' limit on disk follows from the pod's, as Kubernetes sees it in the end: the task's, a role's, an
        # override's, or a namespace's default.
        limit = k8s.V1ResourceFieldSelector(resource="limits.ephemeral-storage")
        env += [_variable(envvars.EPHEMERAL_STORAGE, resource_field_ref=limit)]
    primary.env = [*(primary.env or ()), *env]
    if plan.max_nodes > 1:
        _be_replaced_soon(spec)
        if spec.host_network and spec.dns_policy is None:
            # Kubernetes' own default looks names up on the machine there, which knows no service: none would be met.
            spec.dns_policy = "ClusterFirstWithHostNet"
    _name_ports(primary)
    for container in spec.containers[1:]:
        _complete_limits(container)
    return template


class Primary(k8s.V1Container):  # type: ignore[misc]  # kubernetes is untyped to mypy
    """A container that holds its own when flytekit puts the task's arguments, resources and variables into it
    (``_serialize_pod_spec``): for the task, for a call with another pod template, and for a mapped one.

    - Of resources flytekit drops what the template asks for (EFA, hugepages, slices of a GPU): what the task does not
      name stays.
    - Of variables it puts the task's in front, whatever there is: of one name the first stays. The API server refuses
      a PyTorchJob with two, and in a pod the last would win.
    - The command is ours, whatever it wraps around it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, of these three what is ours of it."""
        if name == "args" and value:
            value = command(value)
        elif name == "env":
            value = list({variable.name: variable for variable in reversed(value or ())}.values())[::-1] or None
        elif name == "resources":
            own, template = (k8s.ApiClient().sanitize_for_serialization(one) or {} for one in (value, self.resources))
            parts = by_part(with_one_count(over(_flat(own), _flat(template))))
            value = {part: each for part, each in {**template, **own, **parts}.items() if each} or None
        super().__setattr__(name, value)


def _flat(resources: Any) -> dict[tuple[str, str], Any]:
    return {(part, name): value for part in PARTS for name, value in (resources.get(part) or {}).items()}


def _primary_first(template: PodTemplate) -> Primary:
    name, containers = template.primary_container_name, template.pod_spec.containers or ()
    own = next((container for container in containers if container.name == name), k8s.V1Container(name=name))
    primary = Primary(**{attribute: getattr(own, attribute) for attribute in k8s.V1Container.openapi_types})
    template.pod_spec.containers = [primary, *(container for container in containers if container is not own)]
    return primary


def _variable(name: str, **source: Any) -> Any:
    return k8s.V1EnvVar(name=name, value_from=k8s.V1EnvVarSource(**source))


def _volume(scratch: Scratch) -> Any:
    if scratch.claim is not None:
        source = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=scratch.claim)
        return k8s.V1Volume(name=SCRATCH_VOLUME, persistent_volume_claim=source)
    size = None if scratch.size_limit is None else str(scratch.size_limit)
    medium = "Memory" if scratch.volume == "memory" else None
    return k8s.V1Volume(name=SCRATCH_VOLUME, empty_dir=k8s.V1EmptyDirVolumeSource(medium=medium, size_limit=size))


def _be_replaced_soon(spec: Any) -> None:
    """The others wait for this pod: Kubernetes gives a lost machine 300 s (the admission plugin
    DefaultTolerationSeconds, which adds nothing where a pod says something)."""
    keys = {each.key for each in spec.tolerations or () if each.effect in (None, "", "NoExecute")}
    waits = {"operator": "Exists", "effect": "NoExecute", "toleration_seconds": LOST_AFTER_SECONDS}
    new = [k8s.V1Toleration(key=key, **waits) for key in _LOST if not keys & {key, None, ""}]
    spec.tolerations = [*(spec.tolerations or ()), *new] or None


def _name_ports(container: Any) -> None:
    """The operator makes a service of the ports, where ports without a name are refused: node 0 would never be found
    (training-operator v1.9.0, common/service.go)."""
    names = {port.name for port in container.ports or ()}
    for port in container.ports or ():
        is_ours = port.container_port == DEFAULT_PORT  # two ports of one number would be refused as well
        name = OPERATORS_PORT if is_ours else f"{(port.protocol or 'TCP').lower()}-{port.container_port}"
        if port.name is None and name not in names:
            names.add(name)
            port.name = name


def _complete_limits(container: Any) -> None:
    """cpu and memory that are only requested become limits as well: the backend writes a limit of zero there, and the
    API server refuses the pod (flytek8s v1.16.8, ``ApplyResourceOverrides`` of a container that is not the primary)."""
    resources = container.resources
    if isinstance(resources, Mapping):
        names = k8s.V1ResourceRequirements.openapi_types
        resources = container.resources = k8s.V1ResourceRequirements(**{name: resources.get(name) for name in names})
    requests = getattr(resources, "requests", None) or {}
    limits = getattr(resources, "limits", None) or {}
    missing = {name: requests[name] for name in ("cpu", "memory") if name in requests and name not in limits}
    if missing:
        resources.limits = {**limits, **missing}
