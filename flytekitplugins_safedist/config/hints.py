"""What works, and gives something up: told when a task is registered, called or shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .arguments import TaskArguments
from .effective import LIMITS, gpus_of
from .options import DEFAULT_PORT, OPERATORS_PORT
from .plan import Plan
from .quantities import value_of
from .validate import QUEUE_LABEL, has_slices

_DEFAULT_IMAGE = re.compile(r"(?:.+/)?flyteorg/flytekit(?:[:@].*)?")
"""``DefaultImages`` of flytekit, whichever registry a platform mirrors it in."""
_POLICIES = {
    "NEVER": "when that pod is lost (drained, preempted, out of memory) the operator fails the whole job, a retry of "
    "the task's is spent, and Flyte shows no cause. Left out, the pod is replaced and the job goes on",
    "ALWAYS": "a pod that is done is started again, for ever, and the operator never sees it succeed. Left out, a pod "
    "comes back only where it failed",
}


def hints(plan: Plan, arguments: TaskArguments, image: str | None, named: Any = None) -> Iterator[str]:
    """One sentence each.

    Args:
        plan: of the task.
        arguments: of the task, as it is registered.
        image: of the container that trains.
        named: what ``container_image=`` of the task says.
    """
    for role in plan.roles:
        if role.restart_policy in _POLICIES:
            yield f"{role.name}.restart_policy is {role.restart_policy}: {_POLICIES[role.restart_policy]}"
    for name, amounts in plan.resources.items():
        gpus, _ = gpus_of(amounts)
        if gpus > plan.nproc_per_node:
            idle = f"{gpus - plan.nproc_per_node} GPUs stay idle unless ranks take several"
            yield f"{gpus} GPUs per {name}, but {plan.nproc_per_node} ranks: {idle}"
    yield from _hints_of_scratch(plan)
    if getattr(plan.config.run_policy, "active_deadline_seconds", None) is not None:
        yield (
            "run_policy.active_deadline_seconds ends no job that runs undisturbed: the operator looks at it only when "
            "something of the job changes (kubeflow/trainer#3358). timeout= of @task ends one in time"
        )
    if plan.config.profile is not None and plan.decks is None:
        yield "profile is seen on the task's deck alone: set enable_deck=True of @task"
    if plan.nproc_per_node > 1 and has_slices(plan.resources, arguments.accelerator):
        yield "each rank sees one MIG slice, and NCCL joins no two slices of one GPU: use Gloo, or whole GPUs"
    yield from hints_of_template(plan, arguments)
    if named is not None and getattr(arguments.primary_container(), "image", None) not in (None, named):
        yield (
            "container_image= of @task is not used: the pod template's primary container names an image, which wins. "
            "Keep one of the two"
        )
    needs_image = not plan.roles or not all(getattr(role.written, "image", None) for role in plan.roles)
    if needs_image and (not image or _DEFAULT_IMAGE.fullmatch(image)):
        what = f"the image {image} is flytekit's default one" if image else "no image is named: flytekit's is taken"
        yield (
            f"{what}. It does not contain safedist-execute, so the pods cannot start. Fix: build an image with this "
            "package and your training packages, and name it with container_image= of @task, or --image: the README's "
            '"Install" shows an ImageSpec'
        )


def _hints_of_scratch(plan: Plan) -> Iterator[str]:
    scratch = plan.scratch
    if plan.size_limit is None or scratch.volume == "memory" or scratch.path is not None or scratch.claim is not None:
        return
    limits = {amounts.get((LIMITS, "ephemeral-storage")) for amounts in plan.resources.values()}
    for field, value in filter(None, limits):
        if (value_of(value) or 0) < plan.size_limit:
            yield (
                f"scratch.size_limit={scratch.size_limit} is above {field}={value}, at which the kubelet evicts the "
                "pod: no rank is ended before. Lower it, or leave it out"
            )


def hints_of_template(plan: Plan, arguments: TaskArguments) -> Iterator[str]:
    """The same, of the pod template alone."""
    template: Any = arguments.pod_template
    spec = getattr(template, "pod_spec", None)
    if spec is None:
        return
    grace, needed = spec.termination_grace_period_seconds, plan.grace_needed
    if grace is not None and grace < needed:
        yield (
            f"the pod template's terminationGracePeriodSeconds={grace} is less than the {needed} s that "
            f"timeouts.preemption={plan.timeouts.preemption:g}, timeouts.stop={plan.timeouts.stop:g}, leaving and an "
            "upload take: what is not done by then is lost. Raise it, lower those, or leave it out"
        )
    sidecars = [each.name for each in spec.containers or () if each.name != template.primary_container_name]
    if sidecars:
        yield f"a pod ends only when every container of it does: {', '.join(sidecars)} must end by themselves"
    if plan.max_nodes == 1:
        return
    ports = [port.name for port in getattr(arguments.primary_container(), "ports", None) or ()]
    if spec.host_network and OPERATORS_PORT not in ports:
        yield (
            f"hostNetwork: Kubernetes puts no two pods with one port, {DEFAULT_PORT}, on one machine, of other jobs "
            f"either. V1ContainerPort(name={OPERATORS_PORT!r}, container_port=...) in the template names another"
        )
    if QUEUE_LABEL in (template.labels or {}) and plan.config.queue is None:
        yield (
            f"a pod template's {QUEUE_LABEL} is put on the pods, not on the PyTorchJob, where Kueue looks for it: use "
            "queue= of the task's config, which Flyte puts on the PyTorchJob"
        )
    yield from _hints_of_meeting(plan, spec)


def _hints_of_meeting(plan: Plan, spec: Any) -> Iterator[str]:
    """What of a pod template keeps nodes from finding node 0 by its name, or workers from starting."""
    if spec.dns_policy == "Default" or (spec.dns_policy == "ClusterFirst" and spec.host_network):
        fix = "Leave it out, or use ClusterFirstWithHostNet"
        yield f"dnsPolicy={spec.dns_policy} looks names up on the machine, which does not know node 0's. {fix}"
    beside = [each for each in spec.init_containers or () if getattr(each, "restart_policy", None) == "Always"]
    probed = [each.name for each in (*(spec.containers or ()), *beside) if each.readiness_probe is not None]
    if probed:
        yield (
            f"node 0 is found by its name, which leads to it only while all containers of its pod are ready: no node "
            f"comes before the readiness probe of {', '.join(probed)} has passed. Leave it out, or use a startup probe"
        )
    context = spec.security_context
    if getattr(context, "run_as_non_root", None) and context.run_as_user is None and plan.min_nodes == plan.max_nodes:
        yield (
            "runAsNonRoot without runAsUser keeps workers from starting: the operator's init container, whose image "
            "names no user, is refused as root. Name run_as_user beside it"
        )
