"""Task configurations: frozen dataclasses, and the validation that reports every problem at once.

The dataclasses hold what the user wrote, unchanged. :func:`resolve` turns them, with the resources of the task, into a
:class:`Resolved` value or raises one :class:`~flytekitplugins_safedist.errors.ConfigError` that lists every problem.
It runs when the ``@task`` decorator runs: not at serialization, not in the pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..errors import ConfigError, Problem
from .fields import (
    MOST_COUNTED,
    are_ranks,
    hang_problems,
    is_count,
    log_problems,
    not_among,
    scratch_problems,
    timeout_problems,
)
from .fields import Hangs as Hangs  # noqa: PLC0414  (where a config is written)
from .fields import Logs as Logs  # noqa: PLC0414  (where a config is written)
from .fields import Scratch as Scratch  # noqa: PLC0414  (where a config is written)
from .fields import Timeouts as Timeouts  # noqa: PLC0414  (where a config is written)
from .quantities import size_in_bytes

if TYPE_CHECKING:
    from flytekitplugins import kfmpi, kfpytorch

    RunPolicy: TypeAlias = kfpytorch.RunPolicy | kfmpi.task.RunPolicy
    Master: TypeAlias = kfpytorch.Master
    Worker: TypeAlias = kfpytorch.Worker | kfmpi.Worker
    Launcher: TypeAlias = kfmpi.Launcher

Backend = Literal["horovod", "torch"]
Operator = Literal["pytorch", "mpi"]
StartMethod = Literal["preload", "spawn"]

BACKENDS: tuple[Backend, ...] = ("horovod", "torch")
OPERATORS: tuple[Operator, ...] = ("pytorch", "mpi")
START_METHODS: tuple[StartMethod, ...] = ("preload", "spawn")
DEFAULT_REPLACEMENTS = 10


@dataclass(frozen=True, kw_only=True)
class SafeDistributed:
    """What Horovod and PyTorch tasks have in common. Use :class:`SafeHorovod` or :class:`SafeTorch`.

    Where Flyte's own Kubeflow plugins have a class for something (``RunPolicy``, ``Master``, ``Worker``, ``Launcher``,
    ``RestartPolicy``), it is theirs, from ``flytekitplugins.kfpytorch`` or ``flytekitplugins.kfmpi``.

    Attributes:
        nnodes: pods of the job: ``1`` runs anywhere, ``N`` is a job of fixed size, ``"2:4"`` an elastic range.
        nproc_per_node: ranks per node; default: the number of GPUs the task requests, else 1.
        max_restarts: how often the ranks of the whole job may be relaunched together within one Flyte attempt.
        max_replacements: how often nodes of a job may be lost (drained, preempted, out of memory, their machine gone)
            and come back within one Flyte attempt; a budget beside ``max_restarts``. The default is one less than
            ``run_policy.backoff_limit`` where that is lower: the operator counts some of the same losses.
        start_method: ``"preload"`` forks ranks from a process that imported torch, the backend, flytekit and the
            task's module once, falling back to ``"spawn"`` with a warning when that is not safe; ``"spawn"`` starts
            a fresh interpreter per rank.
        scratch: see :class:`Scratch`.
        timeouts: see :class:`Timeouts`.
        logs: see :class:`Logs`.
        hangs: see :class:`Hangs`.
        operator: ``"pytorch"`` (PyTorchJob) or ``"mpi"`` (MPIJob), for clusters that only have that one.
        master: image, resources and restart policy of node 0 of a PyTorchJob of fixed size. The restart policy of
            every role is OnFailure unless it names another: a pod that is lost comes back.
        worker: the same for the other nodes of a PyTorchJob; for every node of an elastic one or an MPIJob.
        launcher: the same for the launcher pod of an MPIJob, which runs no ranks and needs no GPU.
        run_policy: clean-up, deadline, time to live, backoff limit. Unset, running pods are cleaned up at the end, and
            the backoff limit is above the job's budget for lost nodes (``max_replacements``).
        queue: Kueue's LocalQueue, in the execution's namespace, which starts all pods of the job or none: its label on
            the job. Kueue must have the integration of the job's kind switched on.
    """

    nnodes: int | str = 1
    nproc_per_node: int | None = None
    max_restarts: int = 0
    max_replacements: int = DEFAULT_REPLACEMENTS
    start_method: StartMethod = "preload"
    scratch: Scratch = field(default_factory=Scratch)
    timeouts: Timeouts = field(default_factory=Timeouts)
    logs: Logs = field(default_factory=Logs)
    hangs: Hangs = field(default_factory=Hangs)
    operator: Operator = "pytorch"
    master: Master | None = None
    worker: Worker | None = None
    launcher: Launcher | None = None
    run_policy: RunPolicy | None = None
    queue: str | None = None


@dataclass(frozen=True, kw_only=True)
class SafeHorovod(SafeDistributed):
    """Run the task function on every rank of a Horovod job: ``hvd.init()`` just works, no horovodrun, ssh or MPI."""


@dataclass(frozen=True, kw_only=True)
class SafeTorch(SafeDistributed):
    """Run the task function on every rank of a PyTorch job: ``dist.init_process_group()`` just works."""


@dataclass(frozen=True)
class Requested:
    """What the task asks of each pod, as far as ranks depend on it.

    Attributes:
        gpus: GPUs per pod, or None where the task does not say.
        gpus_source: the field that says so, for messages.
    """

    gpus: int | None = None
    gpus_source: str = "requests.gpu"


@dataclass(frozen=True)
class Resolved:
    """A configuration that can run, with every default decided.

    Attributes:
        backend: "horovod" or "torch".
        min_nodes, max_nodes: equal for a fixed size.
        nproc_per_node: ranks per node.
        environment: the task's variables; they win over safedist's own defaults (``OMP_NUM_THREADS``).
        size_limit: scratch limit in bytes, or None.
        max_replacements: how often nodes may be lost, in the whole job.
        hangs: as configured.
        nproc_is_open: the user named no number of ranks: in a pod they follow the GPUs that it has.
    """

    backend: Backend
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    max_restarts: int
    start_method: StartMethod
    scratch: Scratch
    size_limit: int | None
    timeouts: Timeouts
    logs: Logs
    environment: tuple[tuple[str, str], ...]
    hangs: Hangs = field(default_factory=Hangs)
    nproc_is_open: bool = False
    max_replacements: int = DEFAULT_REPLACEMENTS

    @property
    def world_size(self) -> int:
        """Ranks of the job when every node is there."""
        return self.max_nodes * self.nproc_per_node


def resolve(
    config: SafeDistributed,
    requested: Requested,
    *,
    where: Mapping[str, object] | None = None,
    dynamic: bool = False,
    environment: Mapping[str, str] | None = None,
    further: Iterable[Problem] = (),
) -> Resolved:
    """Decide every default, or report everything that is wrong.

    Args:
        config: what the user wrote.
        requested: what the task asks of its pods.
        where: the task, for the error.
        dynamic: whether the function is a ``@dynamic`` workflow, which has no ranks.
        environment: of the task.
        further: problems that others have found; reported with ours.

    Raises:
        ConfigError: one or more problems, all of them listed.
    """
    problems = [*_problems(config, requested, dynamic=dynamic), *further]
    if problems:
        raise ConfigError(problems, where=where)
    low, high = parse_nodes(config.nnodes)  # type: ignore[misc]  # no problems: it parses
    nproc = config.nproc_per_node if config.nproc_per_node is not None else (requested.gpus or 1)
    return Resolved(
        backend="horovod" if isinstance(config, SafeHorovod) else "torch",
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=nproc,
        max_restarts=config.max_restarts,
        start_method=config.start_method,
        scratch=config.scratch,
        size_limit=None if config.scratch.size_limit is None else size_in_bytes(config.scratch.size_limit),
        timeouts=config.timeouts,
        logs=config.logs,
        hangs=config.hangs,
        environment=tuple(sorted((environment or {}).items())),
        nproc_is_open=config.nproc_per_node is None,
        max_replacements=replacements(config),
    )


def replacements(config: SafeDistributed) -> int:
    """The budget for lost nodes. The operator fails a job in which containers were restarted ``backoff_limit`` times
    (training-operator v1.9.0, core/job.go, PastBackoffLimit): our own budget ends it before, with its cause."""
    limit = getattr(config.run_policy, "backoff_limit", None)
    return config.max_replacements if limit is None else max(0, min(config.max_replacements, limit - 1))


def parse_nodes(nodes: object) -> tuple[int, int] | None:
    """``3`` or ``"3"`` as (3, 3), ``"2:4"`` as (2, 4); None for anything else."""
    if isinstance(nodes, bool) or not isinstance(nodes, (int, str)):
        return None
    if isinstance(nodes, int):
        return (nodes, nodes) if 1 <= nodes <= 999_999 else None
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", nodes)
    if match is None:
        return None
    low = int(match[1])
    high = int(match[2] or match[1])
    return (low, high) if 1 <= low <= high else None


def _problems(config: SafeDistributed, requested: Requested, *, dynamic: bool) -> Iterator[Problem]:
    if type(config) is SafeDistributed:
        yield Problem(
            "task_config", "SafeDistributed", "does not name a backend", "use SafeHorovod(...) or SafeTorch(...)"
        )
    if dynamic:
        yield Problem(
            "task_config", type(config).__name__, "is on a @dynamic workflow, which has no ranks", "use @task"
        )
    if parse_nodes(config.nnodes) is None:
        yield Problem(
            "nnodes", config.nnodes, "is not a number of nodes", 'use 1, a number N, or a range such as "2:4"'
        )
    yield from _nproc_problems(config.nproc_per_node, requested)
    if not is_count(config.max_restarts, least=0):
        yield Problem("max_restarts", config.max_restarts, "is not a number of restarts", "use 0 or more")
    yield from _replacement_problems(config)
    if config.start_method not in START_METHODS:
        yield not_among("start_method", config.start_method, START_METHODS)
    yield from scratch_problems(config.scratch)
    yield from timeout_problems(config.timeouts)
    yield from log_problems(config.logs)
    yield from hang_problems(config.hangs)
    yield from _shown_problems(config)


def _shown_problems(config: SafeDistributed) -> Iterator[Problem]:
    """Ranks to show that the job will not have. Without ``nproc_per_node`` they follow the GPUs of a pod, which a call
    may change."""
    nodes, nproc = parse_nodes(config.nnodes), config.nproc_per_node
    logs: object = config.logs
    if nodes is None or not is_count(nproc, least=1) or not isinstance(logs, Logs) or not are_ranks(logs.show):
        return
    world = nodes[1] * int(str(nproc))
    show: Any = logs.show
    if show and max((show[0], show[-1]) if isinstance(show, range) else show) >= world:
        yield Problem(
            "logs.show", logs.show, f"names a rank that is not there: {world} in all", f"use 0 to {world - 1}"
        )


def _nproc_problems(nproc: object, requested: Requested) -> Iterator[Problem]:
    if nproc is None:
        return
    if not is_count(nproc, least=1):
        yield Problem(
            "nproc_per_node", nproc, "is not a number of ranks", "use 1 or more, or None for one rank per GPU"
        )
    elif requested.gpus is not None and requested.gpus > 0 and int(str(nproc)) > requested.gpus:
        yield Problem(
            "nproc_per_node",
            nproc,
            f"exceeds {requested.gpus_source}={requested.gpus}",
            f"lower it to {requested.gpus} or request {nproc} GPUs",
        )


def _replacement_problems(config: SafeDistributed) -> Iterator[Problem]:
    replacements = config.max_replacements
    limit = getattr(config.run_policy, "backoff_limit", None)
    if not is_count(replacements, least=0):
        yield Problem("max_replacements", replacements, "is not a number of lost nodes", "use 0 or more")
    elif isinstance(limit, int) and limit <= replacements != DEFAULT_REPLACEMENTS:
        reason = f"is spent after the operator's run_policy.backoff_limit={limit}, which fails the job without a cause"
        repair = f"lower it to {limit - 1}, or raise backoff_limit to {replacements + 1}"
        yield Problem("max_replacements", replacements, reason, repair)
    nodes = (parse_nodes(config.nnodes) or (0, 0))[1]
    if limit is None and is_count(replacements, least=0) and replacements * nodes >= MOST_COUNTED:
        # The job's own backoff limit is made of them.
        reason = f"with {nodes} nodes is more restarts of pods than an operator can count"
        repair = f"lower it to {MOST_COUNTED // nodes - 1}"
        yield Problem("max_replacements", replacements, reason, repair)
