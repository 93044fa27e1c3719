"""GPUs per pod, from everything that can ask for them, and what of it contradicts itself.

``accelerator`` names a kind of GPU but never a number; the backend drops a GPU count of zero (``flytek8s/utils.go`` of
v1.16.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import Problem
from .asked import GENERIC_GPU, MIG, Amount, Amounts, TaskArguments, gpus_of, is_gpu, of_container
from .roles import Role


def per_role(arguments: TaskArguments, roles: Sequence[Role]) -> list[Amount]:
    """What each role gets, where anything asks for GPUs: its own count, else the task's."""
    task = _of_task(arguments)
    counts = [gpus_of(role.amounts()) or task for role in roles] if roles else [task]
    return [count for count in counts if count is not None]


def fewest(counts: Sequence[Amount]) -> tuple[int | None, str]:
    """GPUs in each pod, and which field says so; None where nothing asks for any. Where roles ask for
    different numbers, the smallest: every node runs the same number of ranks."""
    known = [(number, count.field) for count in counts if (number := _number(count.value)) is not None]
    return min(known) if known else (None, "requests.gpu")


def problems_of_gpus(
    arguments: TaskArguments, roles: Sequence[Role], *, nproc_per_node: int | None
) -> Iterator[Problem]:
    """Everything about GPUs that contradicts itself."""
    task, counts = _of_task(arguments), per_role(arguments, roles)
    gpus, source = fewest(counts)
    if nproc_per_node is not None and gpus and nproc_per_node > gpus:
        repair = f"lower it to {gpus} or request {nproc_per_node} GPUs"
        yield Problem("nproc_per_node", nproc_per_node, f"exceeds {source}={gpus}", repair)
    for amounts in (arguments.amounts(), *(role.amounts() for role in roles)):
        yield from _unreadable(amounts)
    yield from _beside_template(arguments)
    if nproc_per_node is None and len({_number(count.value) for count in counts}) > 1:
        listed = " and ".join(f"{count.field}={count.value}" for count in counts)
        reason = f"is not decided by {listed}: every node runs the same number of ranks"
        yield Problem("nproc_per_node", None, reason, "set nproc_per_node, or give the roles the same number of GPUs")
    for own in (gpus_of(role.amounts()) for role in roles):
        if own is not None and _number(own.value) == 0 and task is not None and _number(task.value) != 0:
            reason = f"does not take away {task.field}={task.value}: the backend drops a count of zero"
            yield Problem(own.field, own.value, reason, "request GPUs per role only, not on the task")
    yield from _accelerator(arguments, gpus, nproc_per_node)


def _of_task(arguments: TaskArguments) -> Amount | None:
    own = gpus_of(arguments.amounts())
    if own is not None:
        return own
    return next((amount for name, amount in _of_template(arguments).items() if is_gpu(name)), None)


def _of_template(arguments: TaskArguments) -> dict[str, Amount]:
    """What the primary container asks for by the resource's name; its limit, where it names both."""
    return {name: amount for (_, name), amount in of_container(arguments.primary_container()).items()}


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() else None


def _unreadable(amounts: Amounts) -> Iterator[Problem]:
    request, limit = amounts.get(("requests", GENERIC_GPU)), amounts.get(("limits", GENERIC_GPU))
    count = limit or request
    if count is not None and _number(count.value) is None:
        reason = "is not a whole number of GPUs"
        yield Problem(count.field, count.value, reason, "Kubernetes hands out whole GPUs; write e.g. '4'")
    if request is not None and limit is not None and str(request.value) != str(limit.value):
        reason = f"differs from {limit.field}={limit.value!r}"
        yield Problem(
            request.field, request.value, reason, "Kubernetes wants the same number in both; give one of them"
        )


def _beside_template(arguments: TaskArguments) -> Iterator[Problem]:
    """The template's GPUs are kept where the task names none (``plugin/serialization.py``); else two kinds are."""
    named = gpus_of(arguments.amounts()) is not None
    for name, (field, value) in _of_template(arguments).items():
        if named and is_gpu(name) and name not in ("nvidia.com/gpu", GENERIC_GPU):
            reason = "is another kind of GPU than the task's own gpu=, which would take its place"
            yield Problem(field, value, reason, "keep one of them")


def _accelerator(arguments: TaskArguments, gpus: int | None, nproc: int | None) -> Iterator[Problem]:
    device, size = _of_accelerator(arguments.accelerator)
    named = f"{device} ({size})" if size else device
    if device.lower().startswith("tpu"):
        yield Problem("accelerator", named, "is a TPU, which neither Horovod nor torch ranks here can use", "use GPUs")
    if device and not gpus:
        reason = "names a kind of GPU, but no GPU is requested, so pods would land on nodes without one"
        yield Problem("accelerator", named, reason, "add Resources(gpu=...), or drop accelerator")
    slices = size or any(name.startswith(MIG) for name in _of_template(arguments))
    if slices and nproc is None and gpus is not None and gpus > 1:
        reason = f"cannot be derived from {gpus} slices: a process sees one MIG slice, and NCCL joins no two of a GPU"
        repair = "set nproc_per_node=1 and use nnodes=, or whole GPUs; set a higher number only for Gloo on the CPU"
        yield Problem("nproc_per_node", nproc, reason, repair)


def _of_accelerator(accelerator: Any) -> tuple[str, str]:
    """Device and size of a slice ("": whole devices), as flytekit sends them."""
    if accelerator is None:
        return "", ""
    message = accelerator.to_flyte_idl()
    return message.device or type(accelerator).__name__, message.partition_size
