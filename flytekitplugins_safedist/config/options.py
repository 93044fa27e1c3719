"""Task configurations: frozen dataclasses, and the validation that reports every problem at once.

The dataclasses hold what the user wrote, unchanged. :func:`resolve` turns them, with the resources of the task, into a
:class:`Resolved` value or raises one :class:`~flytekitplugins_safedist.errors.ConfigError` that lists every problem.
It runs when the ``@task`` decorator runs: not at serialization, not in the pod.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Literal

from ..envvars import IDENTITY
from ..errors import ConfigError, Problem
from . import reserved
from .caches import CACHE_NAMES
from .cluster import Kubeflow
from .moved import NOTHING_SAID, ReadsMovedFields, takes_moved_fields
from .quantities import size_in_bytes

Backend = Literal["horovod", "torch"]
StartMethod = Literal["preload", "spawn"]
Keep = Literal["never", "on_failure", "always"]

BACKENDS: tuple[Backend, ...] = ("horovod", "torch")
START_METHODS: tuple[StartMethod, ...] = ("preload", "spawn")
DEFAULT_REPLACEMENTS = 10
KEEP: tuple[Keep, ...] = ("never", "on_failure", "always")


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Where ranks keep their private files, and for how long.

    Attributes:
        path: directory under which the job's scratch is made; default ``$SAFEDIST_SCRATCH_ROOT``, then ``$TMPDIR``.
        keep: ``"never"``, ``"on_failure"`` (look at what a failed rank left behind) or ``"always"``.
        size_limit: for all ranks of a node together, logs included, in bytes or as a Kubernetes quantity (``"20Gi"``);
            None: the pod's limit of ephemeral storage, less a part for the rest of the pod, where scratch counts in it;
            else the disk.
        shared_caches: names of compile caches (see :mod:`~flytekitplugins_safedist.config.caches`) that ranks share on
            purpose, because the library locks them well enough for the user's file system.
    """

    path: str | None = None
    keep: Keep = "never"
    size_limit: int | str | None = None
    shared_caches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each wait may take, in seconds. Every wait has a deadline; when one expires, the error says who was
    waited for.

    Attributes:
        code: for the code archive: for the store, and for another process of the node that fetches it.
        start: for all ranks of a node to begin the task's function: imports of the user's module included, whether in
            the preloading process or in each rank.
        rendezvous: for all nodes of the job to arrive.
        stop: between SIGTERM and SIGKILL when ranks are torn down.
        exit: for a rank that has reported its outcome to end.
        heartbeat: without a word from a node, before it counts as lost (frozen, partitioned, or gone).
        preemption: for ranks to save their work after the pod is told to stop, before they are ended. The pod's grace
            period allows for it.
        upload: for node 0 to upload the outputs, while the other nodes wait. When the store fails, node 0 tries again
            for half of it, at most 600 s.
    """

    code: float = 1800.0
    start: float = 600.0
    rendezvous: float = 900.0
    stop: float = 5.0
    exit: float = 60.0
    heartbeat: float = 60.0
    preemption: float = 20.0
    upload: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What of the ranks' output reaches the node's log.

    Attributes:
        show: ranks whose lines are shown; None: all. Every rank's output is in its own file all the same, the last
            16 MiB of it.
        tail_lines: lines of the failing rank's output that go into the error.
        prefix: text before each line; ``{rank}``, ``{local_rank}`` and ``{node_rank}`` are filled in.
    """

    show: tuple[int, ...] | None = None
    tail_lines: int = 20
    prefix: str = "[rank {rank}] "


@takes_moved_fields
@dataclass(frozen=True, kw_only=True)
class SafeDistributed(ReadsMovedFields):
    """What Horovod and PyTorch tasks have in common. Use :class:`SafeHorovod` or :class:`SafeTorch`.

    Attributes:
        nodes: pods of the job: ``1`` runs anywhere, ``N`` is a job of fixed size, ``"2:4"`` an elastic range.
        nproc_per_node: ranks per node; default: the number of GPUs the task requests, else 1.
        max_replacements: how often nodes of a job may be lost (drained, preempted, out of memory, their machine gone)
            and come back within one Flyte attempt; a budget beside ``max_restarts``. None: 10, or one less than
            ``run_policy.backoff_limit`` where that is lower: the operator counts some of the same losses.
        max_restarts: how often the ranks of the whole job may be relaunched together within one Flyte attempt.
        start_method: ``"preload"`` forks ranks from a process that imported torch, the backend, flytekit and the
            task's module once, falling back to ``"spawn"`` with a warning when that is not safe; ``"spawn"`` starts
            a fresh interpreter per rank.
        scratch: see :class:`Scratch`.
        timeouts: see :class:`Timeouts`.
        logs: see :class:`Logs`.
        environment: further variables for every rank; they win over the defaults safedist sets (``OMP_NUM_THREADS``),
            and identity (``RANK``, ``HOROVOD_SIZE``, ...) is refused.
        cluster: how the job looks to Kubernetes (operator, roles, run policy, volumes), see
            :class:`~flytekitplugins_safedist.config.cluster.Kubeflow`.

    The fields of ``cluster`` are still taken beside the others, with a warning; the next release drops that.
    """

    nodes: int | str = 1
    nproc_per_node: int | None = None
    max_replacements: int | None = None
    max_restarts: int = 0
    start_method: StartMethod = "preload"
    scratch: Scratch = field(default_factory=Scratch)
    timeouts: Timeouts = field(default_factory=Timeouts)
    logs: Logs = field(default_factory=Logs)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    cluster: Kubeflow = NOTHING_SAID


@takes_moved_fields
@dataclass(frozen=True, kw_only=True)
class SafeHorovod(SafeDistributed):
    """Run the task function on every rank of a Horovod job: ``hvd.init()`` just works, no horovodrun, ssh or MPI."""


@takes_moved_fields
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
        environment: the user's variables.
        size_limit: scratch limit in bytes, or None.
        max_replacements: how often nodes may be lost, in the whole job.
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
    further: Iterable[Problem] = (),
) -> Resolved:
    """Decide every default, or report everything that is wrong.

    Args:
        config: what the user wrote.
        requested: what the task asks of its pods.
        where: the task, for the error.
        dynamic: whether the function is a ``@dynamic`` workflow, which has no ranks.
        further: problems that others have found; reported with ours.

    Raises:
        ConfigError: one or more problems, all of them listed.
    """
    problems = [*_problems(config, requested, dynamic=dynamic), *further]
    if problems:
        raise ConfigError(problems, where=where)
    low, high = parse_nodes(config.nodes)  # type: ignore[misc]  # no problems: it parses
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
        environment=tuple(sorted(config.environment.items())),
        nproc_is_open=config.nproc_per_node is None,
        max_replacements=replacements(config),
    )


def replacements(config: SafeDistributed) -> int:
    """The budget for lost nodes. The operator fails a job in which containers were restarted ``backoff_limit`` times
    (training-operator v1.9.0, core/job.go, PastBackoffLimit): our own budget ends it before, with its cause."""
    if config.max_replacements is not None:
        return config.max_replacements
    limit = getattr(getattr(config.cluster, "run_policy", None), "backoff_limit", None)
    return DEFAULT_REPLACEMENTS if limit is None else max(0, min(DEFAULT_REPLACEMENTS, limit - 1))


def parse_nodes(nodes: object) -> tuple[int, int] | None:
    """``3`` or ``"3"`` as (3, 3), ``"2:4"`` as (2, 4); None for anything else."""
    if isinstance(nodes, bool) or not isinstance(nodes, (int, str)):
        return None
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", str(nodes))
    if match is None:
        return None
    low = int(match[1])
    high = int(match[2] or match[1])
    return (low, high) if 1 <= low <= high else None


def _problems(config: SafeDistributed, requested: Requested, *, dynamic: bool) -> Iterator[Problem]:
    if type(config) is SafeDistributed:
        yield Problem("task_config", "SafeDistributed", "names no backend", "use SafeHorovod(...) or SafeTorch(...)")
    if dynamic:
        yield Problem(
            "task_config", type(config).__name__, "is on a @dynamic workflow, which has no ranks", "use @task"
        )
    if parse_nodes(config.nodes) is None:
        yield Problem("nodes", config.nodes, "is not a number of nodes", 'use 1, a number N, or a range such as "2:4"')
    yield from _nproc_problems(config.nproc_per_node, requested)
    if not _is_count(config.max_restarts, least=0):
        yield Problem("max_restarts", config.max_restarts, "is not a number of restarts", "use 0 or more")
    yield from _replacement_problems(config)
    if config.start_method not in START_METHODS:
        yield _not_among("start_method", config.start_method, START_METHODS)
    yield from _scratch_problems(config.scratch)
    yield from _timeout_problems(config.timeouts)
    yield from _log_problems(config.logs)
    yield from _environment_problems(config.environment)
    cluster: object = config.cluster
    if not isinstance(cluster, Kubeflow):
        yield Problem("cluster", cluster, "is not a Kubeflow", "use Kubeflow(operator=..., worker=..., ...)")


def _nproc_problems(nproc: object, requested: Requested) -> Iterator[Problem]:
    if nproc is None:
        return
    if not _is_count(nproc, least=1):
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
    said = config.max_replacements
    limit = getattr(getattr(config.cluster, "run_policy", None), "backoff_limit", None)
    if said is None:
        return
    if not _is_count(said, least=0):
        yield Problem("max_replacements", said, "is not a number of lost nodes", "use 0 or more, or None for 10")
    elif isinstance(limit, int) and limit <= said:
        reason = f"is spent after the operator's run_policy.backoff_limit={limit}, which fails the job without a cause"
        repair = f"lower it to {limit - 1}, or raise backoff_limit to {said + 1}"
        yield Problem("max_replacements", said, reason, repair)


def _scratch_problems(value: object) -> Iterator[Problem]:
    if not isinstance(value, Scratch):
        yield Problem("scratch", value, "is not a Scratch", "use Scratch(path=..., keep=..., size_limit=...)")
        return
    if value.path is not None and not (isinstance(value.path, str) and PurePosixPath(value.path).is_absolute()):
        yield Problem("scratch.path", value.path, "is not an absolute path", "use one that exists in the task's pod")
    if value.keep not in KEEP:
        yield _not_among("scratch.keep", value.keep, KEEP)
    if value.size_limit is not None and not size_in_bytes(value.size_limit):
        yield Problem("scratch.size_limit", value.size_limit, "is not a size", 'use bytes or a quantity such as "20Gi"')
    names: object = value.shared_caches
    if isinstance(names, str) or not isinstance(names, Iterable):
        yield Problem("scratch.shared_caches", value.shared_caches, "is not a list of names", 'use ("triton",)')
        return
    for name in names:
        if not isinstance(name, str) or name not in CACHE_NAMES:
            yield _not_among("scratch.shared_caches", name, sorted(CACHE_NAMES))


def _timeout_problems(value: object) -> Iterator[Problem]:
    if not isinstance(value, Timeouts):
        yield Problem(
            "timeouts", value, "is not a Timeouts", "use Timeouts(start=..., rendezvous=..., stop=..., exit=...)"
        )
        return
    for each in fields(value):
        seconds = getattr(value, each.name)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            yield Problem(f"timeouts.{each.name}", seconds, "is not a time to wait", "use seconds, more than 0")


def _log_problems(value: object) -> Iterator[Problem]:
    if not isinstance(value, Logs):
        yield Problem("logs", value, "is not a Logs", "use Logs(show=..., tail_lines=..., prefix=...)")
        return
    if value.show is not None and (
        not isinstance(value.show, (tuple, list, set, frozenset, range))
        or not all(_is_count(rank, least=0) for rank in value.show)
    ):
        yield Problem("logs.show", value.show, "is not a list of ranks", "use ranks such as (0,), or None for all")
    if not _is_count(value.tail_lines, least=0):
        yield Problem("logs.tail_lines", value.tail_lines, "is not a number of lines", "use 0 or more")
    try:
        value.prefix.format(rank=0, local_rank=0, node_rank=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        yield Problem("logs.prefix", value.prefix, "cannot be filled in", "use {rank}, {local_rank}, {node_rank}")


def _environment_problems(value: object) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        yield Problem("environment", value, "is not a mapping", 'use {"NAME": "value"}')
        return
    for name, text in value.items():
        # Values may be secrets: the message names the variable and the type, never the text.
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Problem("environment", name, "is not a name of a variable", "use letters, digits and _")
        elif not isinstance(text, str):
            yield Problem(f"environment[{name!r}]", type(text).__name__, "is not text", "use a str")
        elif not _can_be_given(text):
            yield Problem(
                f"environment[{name!r}]", "str", "cannot be the value of a variable", "remove NUL and lone surrogates"
            )
        elif name in IDENTITY:
            yield Problem(
                "environment", name, "says who a rank is, which only safedist decides", "remove it; see current_rank()"
            )
        elif (problem := reserved.problem_of(name, "environment")) is not None:
            yield problem


def _can_be_given(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _not_among(name: str, value: object, allowed: Iterable[str]) -> Problem:
    return Problem(name, value, "is unknown", "use one of: " + ", ".join(repr(each) for each in allowed))
