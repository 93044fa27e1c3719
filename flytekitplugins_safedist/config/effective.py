"""What the pods of a job ask for. :func:`effective` alone computes it; registration, the number of ranks, checks,
``with_overrides``, ``safedist render`` and its summary read it.

Four layers, in Kubernetes' names: the pod template's primary container; over it the task; over both a role, or, where
a role names nothing of its own, what ``with_overrides`` says in a call. What Flyte v1.16.8 does with them:

- flytekit replaces the template's resources by the task's (``_serialize_pod_spec``); of what the task does not name the
  template's stays, by our doing (``plugin/pod.py``);
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
from typing import Any, NamedTuple, TypeVar

from ..errors import Problem
from .quantities import value_of
from .typed import MOST_COUNTED

T = TypeVar("T")
REQUESTS, LIMITS = PARTS = ("requests", "limits")
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


Amounts = Mapping[tuple[str, str], Amount]
"""By ``requests`` or ``limits``, and Kubernetes' name."""
Layers = tuple[Amounts, Amounts, Mapping[str, Amounts], Amounts]
"""The arguments of :func:`effective`: template, task, roles, call."""


def of_resources(prefix: str, source: Any) -> Amounts:
    """What ``requests``, ``limits`` and ``resources`` of a decorator, a role or a call say.

    Args:
        prefix: of the fields' names.
        source: has those attributes, or some of them; None: nothing.
    """
    amounts: dict[tuple[str, str], Amount] = {}
    for field in (*PARTS, "resources"):
        resources = getattr(source, field, None)
        for own, name in NAMES.items():
            value = getattr(resources, own, None)
            if isinstance(value, (list, tuple)):
                for at, (part, each) in enumerate(zip(PARTS, value, strict=False)):
                    amounts[part, name] = Amount(f"{prefix}{field}.{own}[{at}]", each)
            elif value is not None:
                amounts[field if field in PARTS else REQUESTS, name] = Amount(f"{prefix}{field}.{own}", value)
    return with_one_count(amounts)


def of_container(container: Any) -> Amounts:
    """What a container of a pod template asks for; its client takes a dict of resources as well (before version 37)."""
    resources: Any = getattr(container, "resources", None)
    parts = resources if isinstance(resources, Mapping) else {part: getattr(resources, part, None) for part in PARTS}
    return with_one_count(
        {
            (part, GPU if name == "gpu" else name): Amount(f"pod_template {container.name} {part}.{name}", value)
            for part in PARTS
            for name, value in {**(parts.get(part) or {})}.items()
            if value is not None
        }
    )


def with_one_count(amounts: Mapping[tuple[str, str], T]) -> dict[tuple[str, str], T]:
    """The same, with a number of GPUs in both parts where one has it."""
    gpus = {(part, name): each for (_, name), each in amounts.items() if name in (GPU, "gpu") for part in PARTS}
    return {**gpus, **amounts}


def by_part(amounts: Mapping[tuple[str, str], T]) -> dict[str, dict[str, T]]:
    """As Kubernetes has them: ``{"requests": {name: ...}, "limits": {name: ...}}``."""
    return {part: {name: each for (at, name), each in amounts.items() if at == part} for part in PARTS}


def over(own: Mapping[tuple[str, str], T], template: Mapping[tuple[str, str], T]) -> dict[tuple[str, str], T]:
    """A task's, and of a template's what the task does not name. All kinds of GPU are one name."""
    names = {name for _, name in own}
    takes_gpus = any(map(_is_gpu, names))
    is_free = {name: name not in names and not (takes_gpus and _is_gpu(name)) for _, name in template}
    return {**{key: each for key, each in template.items() if is_free[key[1]]}, **own}


def effective(template: Amounts, task: Amounts, roles: Mapping[str, Amounts], call: Amounts) -> dict[str, Amounts]:
    """What the container that trains asks for in the pods of each role, request and limit, and who says so.

    Args:
        template: of the primary container of the pod template.
        task: of ``@task``.
        roles: of each role itself; ``{POD: {}}`` for a job of one pod.
        call: of ``with_overrides``.
    """
    container = over(countable(task), countable(template))
    return {name: _completed({**container, **(countable(role) or countable(call))}) for name, role in roles.items()}


def countable(amounts: Amounts) -> Amounts:
    """Without zeros, and without what cannot be read."""
    return {key: each for key, each in amounts.items() if _number(key[1], each.value)}


def sendable(amounts: Amounts) -> Amounts:
    """What of amounts a role's message, or a call's node, can hold."""
    return {key: each for key, each in amounts.items() if key[1] in NAMES.values()}


def _completed(amounts: Amounts) -> Amounts:
    """Requests and limits where one stands for the other: both ways for what Flyte completes, from the limit alone for
    all else (the API server does that)."""
    requests = {(REQUESTS, name): each for name, each in by_part(amounts)[LIMITS].items()}
    limits = {(LIMITS, name): each for name, each in by_part(sendable(amounts))[REQUESTS].items()}
    return {**requests, **limits, **amounts}


def _is_gpu(name: str) -> bool:
    """Whether Kubernetes' resource of that name is GPUs, or slices of them, on which ranks can be counted."""
    return name in _GPUS or name.startswith((f"{GPU}.", MIG))


def gpus_of(amounts: Amounts) -> tuple[int, str]:
    """How many GPUs, or slices, a pod gets, and which field says so."""
    counts = ((int(str(each.value)), each.field) for (part, name), each in amounts.items() if _is_gpu(name))
    return next(counts, (0, ""))


def fewest_gpus(roles: Mapping[str, Amounts]) -> tuple[int | None, str]:
    """GPUs in each pod, and which field says so: of the role that has fewest, since every node runs the same number of
    ranks. A role without GPUs has 0 where another has some; None where none has."""
    counts = {name: gpus_of(amounts) for name, amounts in roles.items()}
    if not any(count for count, _ in counts.values()):
        return None, ""
    return min((count, field or f"{name}'s GPUs") for name, (count, field) in counts.items())


# --- what is wrong ----------------------------------------------------------------------------------------------------
def problems_of_amounts(
    template: Amounts, task: Amounts, roles: Mapping[str, Amounts], call: Amounts
) -> Iterator[Problem]:
    """Amounts that nobody can read, that contradict each other, or that change nothing; arguments as for
    :func:`effective`."""
    upper = (task, *roles.values(), call)
    for layer in (template, *upper):
        yield from _unreadable(layer)
    yield from _two_kinds_of_gpus(template, upper)
    yield from _idle_zeros(task, countable(template))
    for layer in upper[1:]:
        yield from _idle_zeros(layer, over(countable(task), countable(template)))
    pods = effective(template, task, roles, call)
    in_effect = {id(each) for amounts in pods.values() for each in amounts.values()}
    for field, (_, each) in _by_field(countable(call)).items():
        if id(each) not in in_effect:
            reason = f"changes nothing: the job's {' and '.join(pods)} names its own resources, which win"
            repair = "define a second task, with those resources, that calls the same code"
            yield Problem(field, each.value, reason, repair)
    problems = [problem for amounts in pods.values() for problem in _contradictions(amounts)]
    yield from {(problem.field, problem.reason): problem for problem in problems}.values()


def problems_of_container(container: Any) -> Iterator[Problem]:
    """The same, of a container of the pod template that is not the primary one."""
    amounts = of_container(container)
    yield from _unreadable(amounts)
    yield from _contradictions(_completed(countable(amounts)))


def _unreadable(amounts: Amounts) -> Iterator[Problem]:
    for field, (name, (_, value)) in _by_field(amounts).items():
        if _number(name, value) is None and _is_gpu(name):
            reason = "is not a whole number of GPUs"
            yield Problem(field, value, reason, "Kubernetes hands out whole GPUs; write e.g. '4'")
        elif _number(name, value) is None:
            yield Problem(field, value, "is not an amount that Kubernetes can read", "write e.g. '2', '500m' or '64Gi'")


def _two_kinds_of_gpus(template: Amounts, layers: Iterable[Amounts]) -> Iterator[Problem]:
    kinds = [(name, each) for name, each in _by_field(template).values() if _is_gpu(name)]
    kind = next((name for name, _ in kinds), GPU)
    reason = "is a second kind of GPU, and every rank has one"
    if any((LIMITS, GPU) in layer for layer in layers):
        kind, reason = GPU, "is another kind of GPU than the task's own gpu=, which would take its place"
    for name, (field, value) in kinds:
        if name != kind:
            yield Problem(field, value, reason, "keep one of them")


def _idle_zeros(amounts: Amounts, below: Amounts) -> Iterator[Problem]:
    for field, (name, (_, value)) in _by_field(amounts).items():
        stays = below.get((REQUESTS, name)) or below.get((LIMITS, name))
        if value_of(value) == 0 and stays is not None:
            reason = f"does not take away {stays.field}={stays.value}: the backend drops a zero"
            yield Problem(field, value, reason, f"name {stays.field} only where it is wanted")


def _contradictions(amounts: Amounts) -> Iterator[Problem]:
    """Requests that are above their limits; and of what Kubernetes gives whole (GPUs, EFA, hugepages:
    ``IsOvercommitAllowed``), those that are not their limits."""
    for name, (field, value) in by_part(amounts)[REQUESTS].items():
        limit = amounts.get((LIMITS, name))
        is_whole = ("/" in name and "kubernetes.io/" not in name) or name.startswith("hugepages-")
        if limit is None and is_whole:
            reason = "has no limit, without which the API server refuses the pod"
            yield Problem(field, value, reason, "name the same number in limits")
        elif limit is not None and is_whole and value_of(value) != value_of(limit.value):
            reason = f"differs from {limit.field}={limit.value!r}"
            yield Problem(field, value, reason, "Kubernetes wants the same number in both; give one of them")
        elif limit is not None and (value_of(value) or 0) > (value_of(limit.value) or 0):
            reason = f"is above {limit.field}={limit.value!r}"
            yield Problem(field, value, reason, "raise the limit, or lower the request")


def problems_of_gpus(roles: Mapping[str, Amounts], nproc_per_node: int | None) -> Iterator[Problem]:
    """Ranks that have no GPU, where others have one; *roles* is what :func:`effective` gives."""
    counts = {name: gpus_of(amounts) for name, amounts in roles.items()}
    gpus, source = fewest_gpus(roles)
    if gpus is not None and nproc_per_node is not None and nproc_per_node > gpus:
        repair = f"lower it to {gpus} or request {nproc_per_node} GPUs" if gpus else "request GPUs for every role"
        yield Problem("nproc_per_node", nproc_per_node, f"exceeds {source}={gpus}", repair)
    if nproc_per_node is None and len({count for count, _ in counts.values()}) > 1:
        fields = [f"{at}={count}" if at else f"{name}, which gets none" for name, (count, at) in counts.items()]
        reason = f"is not decided by {' and '.join(fields)}: every node runs the same number of ranks"
        yield Problem("nproc_per_node", None, reason, "set nproc_per_node, or give the roles the same number of GPUs")


def _by_field(amounts: Amounts) -> dict[str, tuple[str, Amount]]:
    """Name and amount by the field that says it: one that stands in both parts once."""
    return {each.field: (name, each) for (_, name), each in amounts.items()}


def _number(name: str, value: object) -> Fraction | None:
    """None: nobody can read it, or it is none of that resource."""
    number = value_of(value)
    if number is None or number < 0 or (_is_gpu(name) and not (str(value).isdecimal() and number <= MOST_COUNTED)):
        return None
    return number
