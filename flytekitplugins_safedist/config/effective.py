"""What the pods of a job ask for. :func:`effective` alone computes it; registration, the number of ranks, checks,
``with_overrides``, ``safedist render`` and its summary read it.

Four layers, in Kubernetes' names: the pod template's primary container; over it the task; over both a role, or, where
a role names nothing of its own, what ``with_overrides`` says in a call. What Flyte v1.16.8 does with them:

- flytekit replaces the template's resources by the task's (``_serialize_pod_spec``); of what the task does not name the
  template's stays, by our doing (``plugin/primary.py``);
- a role's are completed by the platform's defaults and then win (``ToReplicaSpecWithOverrides``): registration names
  all of the role's, so that none is filled in from elsewhere;
- a zero of a role or a call is dropped (``ToK8sResourceList``), a request above its limit is lowered without a word,
  and requests and limits stand in for each other (``ApplyResourceOverrides``).

Kubernetes refuses a pod whose GPU request is not its limit, and such a job waits for pods that nobody can make: a count
of GPUs is one number, and stands in both parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from ..errors import Problem
from .quantities import value_of

PARTS = ("requests", "limits")
GPU = "nvidia.com/gpu"
"""What Flyte makes of flytekit's ``gpu``, where the platform names no other."""
_GPUS = (GPU, "gpu", "amd.com/gpu")
MIG = "nvidia.com/mig-"
NAMES = {"cpu": "cpu", "mem": "memory", "gpu": GPU, "ephemeral_storage": "ephemeral-storage"}
"""flytekit's names, and Kubernetes'. A role's message and a call can hold no others."""
POD = "pod"
"""In the place of a role, for a job of one pod."""


class Amount(NamedTuple):
    """How much of one resource.

    Attributes:
        field: which says so, for messages.
        value: as the user wrote it.
    """

    field: str
    value: object


Amounts = Mapping[str, Mapping[str, Amount]]
"""By ``requests`` and ``limits``, then by Kubernetes' name."""
NOTHING: Amounts = {part: {} for part in PARTS}
Layers = tuple[Amounts, Amounts, Mapping[str, Amounts], Amounts]
"""The arguments of :func:`effective`: template, task, roles, call."""


def is_gpu(name: str) -> bool:
    """Whether Kubernetes' resource of that name is GPUs, or slices of them, on which ranks can be counted."""
    return name in _GPUS or name.startswith((f"{GPU}.", MIG))


def of_resources(prefix: str, source: Any) -> Amounts:
    """What ``requests``, ``limits`` and ``resources`` of a decorator, a role or a call say.

    Args:
        prefix: of the fields' names.
        source: has those attributes, or some of them; None: nothing.
    """
    written: dict[str, dict[str, Amount]] = {part: {} for part in PARTS}
    for field in (*PARTS, "resources"):
        resources = getattr(source, field, None)
        for own, name in NAMES.items():
            value = getattr(resources, own, None)
            if isinstance(value, (list, tuple)):
                for at, part in enumerate(PARTS):
                    written[part][name] = Amount(f"{prefix}{field}.{own}[{at}]", value[at])
            elif value is not None:
                written[field if field in PARTS else "requests"][name] = Amount(f"{prefix}{field}.{own}", value)
    one_count(written, GPU)
    return written


def of_container(container: Any) -> Amounts:
    """What a container of a pod template asks for; its client takes a dict of resources as well (before version 37)."""
    resources: Any = getattr(container, "resources", None)
    parts = resources if isinstance(resources, Mapping) else {part: getattr(resources, part, None) for part in PARTS}
    written = {
        part: {
            GPU if name == "gpu" else name: Amount(f"pod_template {container.name} {part}.{name}", value)
            for name, value in {**(parts.get(part) or {})}.items()
            if value is not None
        }
        for part in PARTS
    }
    one_count(written, GPU)
    return written


def one_count(parts: dict[str, dict[str, Any]], name: str) -> None:
    """Have requests and limits both name *name*, where one of them does."""
    for part, other in (PARTS, PARTS[::-1]):
        if name in parts[part]:
            parts[other].setdefault(name, parts[part][name])


def beneath(own: Mapping[str, Mapping[str, Any]], template: Mapping[str, Mapping[str, Any]]) -> Any:
    """What of a template's stays under a task's: what the task does not name. All kinds of GPU are one name."""
    names = {name for part in PARTS for name in own.get(part) or {}}
    takes_gpus = any(map(is_gpu, names))
    return {
        part: {
            name: value
            for name, value in (template.get(part) or {}).items()
            if name not in names and not (takes_gpus and is_gpu(name))
        }
        for part in PARTS
    }


def effective(template: Amounts, task: Amounts, roles: Mapping[str, Amounts], call: Amounts) -> dict[str, Amounts]:
    """What the container that trains asks for in the pods of each role, request and limit, and who says so.

    Args:
        template: of the primary container of the pod template.
        task: of ``@task``.
        roles: of each role itself; ``{POD: NOTHING}`` for a job of one pod.
        call: of ``with_overrides``.
    """
    template, task, call = _counted(template), _counted(task), _counted(call)
    container = _over(task, beneath(task, template))
    result = {}
    for name, role in roles.items():
        own = _counted(role)
        result[name] = completed(_over(own if names_any(own) else call, container))
    return result


def _counted(amounts: Amounts) -> Amounts:
    """Without zeros, and without what cannot be read."""
    return {part: {name: each for name, each in amounts[part].items() if _number(name, each)} for part in PARTS}


def names_any(amounts: Amounts) -> bool:
    """Whether anything is asked for."""
    return any(_counted(amounts).values())


def sendable(amounts: Amounts) -> Amounts:
    """What of amounts a role's message, or a call's node, can hold."""
    return {part: {name: amounts[part][name] for name in NAMES.values() if name in amounts[part]} for part in PARTS}


def _over(amounts: Amounts, others: Amounts) -> Amounts:
    return {part: {**others[part], **amounts[part]} for part in PARTS}


def completed(amounts: Amounts) -> Amounts:
    """Requests and limits where one stands for the other: both ways for what Flyte completes, from the limit alone for
    all else (the API server does that)."""
    requests, limits = amounts["requests"], amounts["limits"]
    filled = {name: amount for name, amount in requests.items() if name in NAMES.values()}
    return {"requests": {**limits, **requests}, "limits": {**filled, **limits}}


def gpus_of(amounts: Amounts) -> Amount | None:
    """How many GPUs, or slices, a pod gets; None: none."""
    return next((amount for name, amount in amounts["limits"].items() if is_gpu(name)), None)


def fewest_gpus(roles: Mapping[str, Amounts]) -> tuple[int | None, str]:
    """GPUs in each pod, and which field says so: of the role that has fewest, since every node runs the same number of
    ranks. A role without GPUs has 0 where another has some; None where none has."""
    counts = {name: gpus_of(amounts) for name, amounts in roles.items()}
    if not any(counts.values()):
        return None, "requests.gpu"
    return min((int(str(c.value)), c.field) if c else (0, f"{name}'s GPUs") for name, c in counts.items())


# --- what is wrong ----------------------------------------------------------------------------------------------------
def problems_of_amounts(
    template: Amounts, task: Amounts, roles: Mapping[str, Amounts], call: Amounts
) -> Iterator[Problem]:
    """Amounts that nobody can read, that contradict each other, or that change nothing; arguments as for
    :func:`effective`."""
    for layer in (template, task, *roles.values(), call):
        yield from _unreadable(layer)
    yield from _two_kinds_of_gpus(template, (task, *roles.values(), call))
    below = effective(template, NOTHING, {POD: NOTHING}, NOTHING)[POD]
    yield from _idle_zeros(task, below)
    below = effective(template, task, {POD: NOTHING}, NOTHING)[POD]
    for layer in (*roles.values(), call):
        yield from _idle_zeros(layer, below)
    results = effective(template, task, roles, call)
    yield from _idle_call(_counted(call), results)
    found = [problem for amounts in results.values() for problem in contradictions(amounts)]
    yield from {(problem.field, problem.reason): problem for problem in found}.values()


def problems_of_container(container: Any) -> Iterator[Problem]:
    """The same, of a container of the pod template that is not the primary one."""
    amounts = of_container(container)
    yield from _unreadable(amounts)
    yield from contradictions(completed(_counted(amounts)))


def _unreadable(amounts: Amounts) -> Iterator[Problem]:
    for name, (field, value) in _fields(amounts).values():
        if _number(name, Amount(field, value)) is not None:
            continue
        if is_gpu(name):
            reason = "is not a whole number of GPUs"
            yield Problem(field, value, reason, "Kubernetes hands out whole GPUs; write e.g. '4'")
        else:
            yield Problem(field, value, "is not an amount that Kubernetes can read", "write e.g. '2', '500m' or '64Gi'")


def _two_kinds_of_gpus(template: Amounts, layers: Iterable[Amounts]) -> Iterator[Problem]:
    kinds = [(name, amount) for name, amount in _fields(template).values() if is_gpu(name)]
    if any(GPU in layer["limits"] for layer in layers):
        reason = "is another kind of GPU than the task's own gpu=, which would take its place"
        wrong = [amount for name, amount in kinds if name != GPU]
    else:
        reason = "is a second kind of GPU, and every rank has one"
        wrong = [amount for name, amount in kinds if name != kinds[0][0]]
    for field, value in wrong:
        yield Problem(field, value, reason, "keep one of them")


def _idle_zeros(amounts: Amounts, below: Amounts) -> Iterator[Problem]:
    for name, (field, value) in _fields(amounts).values():
        stays = below["requests"].get(name) or below["limits"].get(name)
        if value_of(value) == 0 and stays is not None:
            reason = f"does not take away {stays.field}={stays.value}: the backend drops a zero"
            yield Problem(field, value, reason, f"name {stays.field} only where it is wanted")


def _idle_call(call: Amounts, results: Mapping[str, Amounts]) -> Iterator[Problem]:
    effect = {id(amount) for amounts in results.values() for part in PARTS for amount in amounts[part].values()}
    for field, (_, amount) in _fields(call).items():
        if id(amount) not in effect:
            reason = f"changes nothing: the job's {' and '.join(results)} names its own resources, which win"
            repair = "define a second task, with those resources, that calls the same code"
            yield Problem(field, amount.value, reason, repair)


def contradictions(amounts: Amounts) -> Iterator[Problem]:
    """Requests that are above their limits; and of what Kubernetes gives whole (GPUs, EFA, hugepages), those that are
    not their limits."""
    for name, (field, value) in amounts["requests"].items():
        limit = amounts["limits"].get(name)
        is_whole = not _may_exceed(name)
        if limit is None:
            if is_whole:
                reason = "has no limit, without which the API server refuses the pod"
                yield Problem(field, value, reason, "name the same number in limits")
        elif is_whole and value_of(value) != value_of(limit.value):
            reason = f"differs from {limit.field}={limit.value!r}"
            yield Problem(field, value, reason, "Kubernetes wants the same number in both; give one of them")
        elif (value_of(value) or 0) > (value_of(limit.value) or 0):
            reason = f"is above {limit.field}={limit.value!r}"
            yield Problem(field, value, reason, "raise the limit, or lower the request")


def problems_of_gpus(roles: Mapping[str, Amounts], nproc_per_node: int | None) -> Iterator[Problem]:
    """Ranks that have no GPU, where others have one; *roles* is what :func:`effective` gives."""
    counts = {name: gpus_of(amounts) for name, amounts in roles.items()}
    gpus, source = fewest_gpus(roles)
    if gpus is None:
        return
    if nproc_per_node is not None and nproc_per_node > gpus:
        repair = f"lower it to {gpus} or request {nproc_per_node} GPUs" if gpus else "request GPUs for every role"
        yield Problem("nproc_per_node", nproc_per_node, f"exceeds {source}={gpus}", repair)
    if nproc_per_node is None and len({count and int(str(count.value)) for count in counts.values()}) > 1:
        said = [f"{c.field}={c.value}" if c else f"{name}, which gets none" for name, c in counts.items()]
        reason = f"is not decided by {' and '.join(said)}: every node runs the same number of ranks"
        yield Problem("nproc_per_node", None, reason, "set nproc_per_node, or give the roles the same number of GPUs")


def _may_exceed(name: str) -> bool:
    """Whether a limit may be above its request: Kubernetes' ``IsOvercommitAllowed``."""
    return ("/" not in name or "kubernetes.io/" in name) and not name.startswith("hugepages-")


def _fields(amounts: Amounts) -> dict[str, tuple[str, Amount]]:
    """Name and amount by the field that says it: one that stands in both parts once."""
    return {amount.field: (name, amount) for part in PARTS for name, amount in amounts[part].items()}


def _number(name: str, amount: Amount) -> Fraction | None:
    """None: nobody can read it, or it is none of that resource."""
    text = str(amount.value)
    if is_gpu(name) and not (text.isascii() and text.isdecimal()):
        return None
    number = value_of(amount.value)
    return None if number is None or number < 0 else number
