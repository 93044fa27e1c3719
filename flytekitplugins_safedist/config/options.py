"""Task configurations: frozen dataclasses that hold what the user wrote, unchanged.

What values a field may have stands beside its type (:mod:`.typed`); what must agree with what, in :mod:`.validate`.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import ConfigError, Problem
from .caches import CACHE_NAMES
from .quantities import size_in_bytes
from .typed import KFPYTORCH, MOST_COUNTED, Must, is_count, is_text

if TYPE_CHECKING:
    from flytekitplugins import kfpytorch
    from typing_extensions import Self
else:  # it is not imported for a task that names none
    kfpytorch = KFPYTORCH

Backend = Literal["horovod", "torch"]
StartMethod = Literal["preload", "spawn"]

DEFAULT_REPLACEMENTS = 10
SCRATCH_MOUNT = "/var/run/safedist/scratch"
SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108  (the path itself is the interface: POSIX shared memory lives there)
DEFAULT_PORT = 23456
"""At which nodes meet: what Kubeflow's operators open in a pod; ours too where no operator names one."""
MOST_SECONDS = MOST_COUNTED // 1000
"""poll() counts milliseconds in an int."""


def parse_nodes(nodes: object) -> tuple[int, int] | None:
    """``3`` or ``"3"`` as (3, 3), ``"2:4"`` as (2, 4); None for anything else."""
    if isinstance(nodes, int) and not isinstance(nodes, bool) and 0 < nodes < 1_000_000:
        nodes = str(nodes)  # Python itself prints no number of some thousand digits
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", nodes) if isinstance(nodes, str) else None
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return (low, high) if 1 <= low <= high else None


def nodes_text(low: int, high: int) -> str:
    """As users write it: ``"4"`` or ``"2:4"``."""
    return str(high) if low == high else f"{low}:{high}"


def _at_least(least: int, what: str, repair: str) -> Must:
    return Must(lambda value: is_count(value, least=least), f"is not a number of {what}", repair)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _are_ranks(show: Any) -> bool:
    if isinstance(show, range):
        show = (*show[:1], *show[-1:])
    return isinstance(show, (tuple, list, set, frozenset)) and all(is_count(rank, least=0) for rank in show)


def _are_steps(steps: Any) -> bool:
    first, last = steps
    return isinstance(steps, tuple) and is_count(first, least=1) and is_count(last, least=first)


_PREFIX = re.compile(r"(?:[^{}]|{{|}}|{(?:rank|local_rank|node_rank)(?::[^{}]{0,3})?})*")


def _is_prefix(prefix: str) -> bool:
    return _PREFIX.fullmatch(prefix) is not None and isinstance(prefix.format(rank=0, local_rank=0, node_rank=0), str)


Seconds = Annotated[
    float,
    Must(_is_seconds, "is not a time to wait", "use seconds, more than 0"),
    Must(
        lambda value: value <= MOST_SECONDS,
        "is longer than the kernel can wait at once",
        f"use at most {MOST_SECONDS} s, about 24 days",
    ),
]
Nodes = Annotated[
    int | str,
    Must(parse_nodes, "is not a number of nodes", 'use 1, a number N of up to 999999, or a range such as "2:4"'),
]
Directory = Annotated[
    str,
    Must(
        lambda value: is_text(value) and PurePosixPath(value).is_absolute(),
        "is not an absolute path",
        "use a str, such as '/data', of a directory that exists in the task's pod",
    ),
]
Size = Annotated[int | str, Must(size_in_bytes, "is not a size", 'use bytes or a quantity such as "20Gi"')]
Ranks = Annotated[
    tuple[int, ...], Must(_are_ranks, "is not a list of ranks", "use ranks such as (0,), or None for all")
]
Port = Annotated[
    int, Must(lambda port: is_count(port, least=1) and port < 1 << 16, "is not a port", "use 1 to 65535, e.g. 9400")
]
CacheNames = Annotated[
    tuple[str, ...],
    Must(lambda names: isinstance(names, (tuple, list, set, frozenset)), "is not a list of names", 'use ("triton",)'),
    Must(CACHE_NAMES.issuperset, "has a name that is unknown", "known are " + ", ".join(sorted(CACHE_NAMES))),
]
Claim = Annotated[str, Must(lambda name: name and is_text(name), "is not a name", "name a PersistentVolumeClaim")]
QueueName = Annotated[
    str,
    Must(
        re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?").fullmatch,
        "is not the name of a LocalQueue",
        "use up to 63 small letters, digits, '-' and '.'",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Where ranks keep their private files, and for how long.

    Attributes:
        path: directory under which the job's scratch is made, where the pod has one of its own for it; then nothing is
            mounted for scratch. Default: the volume; outside a pod ``$SAFEDIST_SCRATCH_ROOT``, then ``$TMPDIR``.
        keep: ``"never"``, ``"on_failure"`` (look at what a failed rank left behind) or ``"always"``.
        size_limit: for all ranks of a node together, logs included, in bytes or as a Kubernetes quantity (``"20Gi"``);
            None: the pod's limit of ephemeral storage, less a part for the rest of the pod, where scratch counts in it;
            else the disk. The volume has it as well: beyond it the kubelet evicts the pod.
        shared_caches: names of compile caches (docs/configuration.md#compile-caches) that ranks share on purpose,
            because the library locks them well enough for the user's file system.
        share_inputs: whether the ranks of a node download an input of the task (``FlyteFile``, ``FlyteDirectory``) once
            for all of them (docs/fs.md#inputs). They may not write to its files then. False: each rank has a copy.
        volume: what is mounted in a pod: ``"disk"`` of the node, or ``"memory"``, which counts against the container's
            memory limit; None: nothing, scratch lives in the container's file system.
        claim: name of a PersistentVolumeClaim to mount instead; all pods of the job mount the same one.
    """

    path: Directory | None = None
    keep: Literal["never", "on_failure", "always"] = "never"
    size_limit: Size | None = None
    shared_caches: CacheNames = ()
    share_inputs: bool = True
    volume: Literal["disk", "memory"] | None = "disk"
    claim: Claim | None = None


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each wait may take, in seconds. Every wait has a deadline; when one expires, the error says who was
    waited for.

    Attributes:
        code: for the code archive: for the store, and for another process of the node that fetches it.
        start: for the libraries to be imported for all ranks of a node, and then for all of them to begin the task's
            function, with the imports of the user's module that they wait for.
        rendezvous: for all nodes of the job to arrive.
        stop: between SIGTERM and SIGKILL when ranks are torn down.
        exit: for a rank that has reported its outcome to end, and for the pod's process that has its verdict: threads
            and ``atexit`` handlers that a module left have that long.
        heartbeat: without a word from a node, before it counts as lost (frozen, partitioned, or gone).
        preemption: for ranks to save their work after the pod is told to stop, before they are ended. The pod's grace
            period allows for it.
        upload: for node 0 to upload the outputs, while the other nodes wait. When the store fails, node 0 tries again
            for half of it, at most 600 s.
    """

    code: Seconds = 1800.0
    start: Seconds = 600.0
    rendezvous: Seconds = 900.0
    stop: Seconds = 5.0
    exit: Seconds = 60.0
    heartbeat: Seconds = 60.0
    preemption: Seconds = 20.0
    upload: Seconds = 3600.0


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What of the ranks' output reaches the node's log.

    Attributes:
        show: ranks whose lines are shown; None: all. Every rank's output is in its own file all the same, the last
            16 MiB of it.
        tail_lines: lines of the failing rank's output that go into the error.
        prefix: text before each line; ``{rank}``, ``{local_rank}`` and ``{node_rank}`` are filled in.
    """

    show: Ranks | None = None
    tail_lines: Annotated[int, _at_least(0, "lines", "use 0 or more")] = 20
    prefix: Annotated[str, Must(_is_prefix, "cannot be filled in", "use {rank}, {local_rank}, {node_rank}")] = (
        "[rank {rank}] "
    )


@dataclass(frozen=True, kw_only=True)
class Hangs:
    """When ranks that wait in a collective, or whose steps do not end, count as hung, and what is done about it.

    Attributes:
        action: once two looks at all ranks have shown the same: ``"restart"``: the job fails for it as for a rank's
            exception, so that ``max_restarts`` apply; ``"fail"``: it fails without a restart; ``"report"``: the nodes'
            logs say so, and it goes on.
        floor: seconds that a wait lasts at least before it is too long, and five times as long as the longest one of
            the round that ended; a step of a job that tells them (``current_rank().progress``) is the same as a wait.
            None: only what a library gives up by itself, after its own timeout
            (``init_process_group(timeout=...)``), is ended, half a minute before it would, and not for a rank that
            works. Whatever else lasts long is told in the logs: what nobody gives up, as under Horovod, after ten
            minutes; a step after ``ceiling``.
        ceiling: seconds after which, with a floor, a wait is too long whatever there was before; and after which also a
            rank that computes, reads or writes is no longer waited for: a long evaluation and an endless loop look
            alike.
    """

    action: Literal["restart", "fail", "report"] = "restart"
    floor: Seconds | None = None
    ceiling: Seconds = 7200.0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where each node tells of the run while it goes on (docs/metrics.md).

    Attributes:
        prometheus: port of the pod, of every address, at which Prometheus may ask; None: at none.
        otlp: whether they are sent to an OpenTelemetry collector. The ``OTEL_*`` variables of the pod say which.
    """

    prometheus: Port | None = None
    otlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Checks of all nodes, when they have met and before the first rank starts: scratch, /dev/shm, names, a connection
    to each other node, clocks, GPUs, a small matrix product on each, and an all-reduce between neighbours.

    Attributes:
        action: where a node is not fit, or far slower than the others: ``"fail"``: the job ends with
            ``SYSTEM:Preflight...``, which costs none of ``retries``; ``"report"``: the log says so.
        slow: the part of the median of all nodes (of all GPUs) below which a figure is far off.
        timeout: for all of it.
    """

    action: Literal["fail", "report"] = "fail"
    slow: Annotated[float, Must(lambda part: 0 < part < 1, "is no part of the median", "use 0.5, or less")] = 0.5
    timeout: Seconds = 120.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps that torch.profiler looks into, for the trace of the run (docs/record.md). A rank tells its steps by
    ``current_rank().progress``.

    Attributes:
        steps: the first and the last of them.
        ranks: which ones do; None: all.
    """

    steps: Annotated[
        tuple[int, int], Must(_are_steps, "is not a first and a last step", "use (10, 12), the first >= 1")
    ]
    ranks: Ranks | None = (0,)


_DIFFERENT = {
    "operator": "leave it out: a job of several nodes is a PyTorchJob, for Horovod too, which needs no MPI",
    "launcher": "leave it out: no pod launches the others; master=Master(...), worker=Worker(...) are those that train",
    "slots": "write nproc_per_node=",
    "replicas": "write nnodes=",
    "num_workers": "write nnodes=, which counts the master as well",
    "num_launcher_replicas": "leave it out: no pod launches the others",
    "rdzv_configs": "write timeouts=Timeouts(rendezvous=SECONDS) for its join_timeout, and leave out the rest",
    "elastic_timeout": "write timeouts=Timeouts(rendezvous=SECONDS)",
    "monitor_interval": "leave it out: an agent hears of a rank's end at once",
    "increase_shared_mem": "leave it out: /dev/shm is as large as the memory; @task(shared_memory=...) sizes it",
    "discovery_script_path": "leave it out: the operator says which nodes there are",
    "verbose": "leave it out: logs=Logs(...) says what is shown",
    "log_level": "leave it out: logs=Logs(...) says what is shown",
}
"""Arguments of Flyte's ``Elastic``, ``PyTorch``, ``MPIJob`` and ``HorovodJob`` that are none here: what to write."""


def _instead(name: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, fields, 1)
    return _DIFFERENT.get(name) or (f"did you mean {near[0]}?" if near else "leave it out")


@dataclass(frozen=True, kw_only=True)
class SafeDistributed:
    """What Horovod and PyTorch tasks have in common. Use :class:`SafeHorovod` or :class:`SafeTorch`.

    Where Flyte's own PyTorch plugin has a class for something (``RunPolicy``, ``Master``, ``Worker``,
    ``RestartPolicy``), it is that one, from ``flytekitplugins.kfpytorch``.

    Attributes:
        nnodes: pods of the job (docs/kubeflow.md): ``1`` runs anywhere, ``N`` is a job of fixed size, ``"2:4"`` an
            elastic range.
        nproc_per_node: ranks per node; default: the number of GPUs the task requests, else 1.
        max_restarts: how often the ranks of the whole job may be relaunched together within one Flyte attempt.
        max_replacements: how often nodes of a job may be lost (drained, preempted, out of memory, their machine gone)
            and come back within one Flyte attempt; a budget beside ``max_restarts``. The default is one less than
            ``run_policy.backoff_limit`` where that is lower: the operator counts some of the same losses.
        start_method: ``"preload"`` forks ranks from a process that has imported libraries once for all of them, and
            none of the task's code, which each rank imports itself; it falls back to ``"spawn"`` with a warning when
            that is not safe. ``"spawn"`` starts a fresh interpreter per rank.
        scratch: see :class:`Scratch`.
        timeouts: see :class:`Timeouts`.
        logs: see :class:`Logs`.
        hangs: see :class:`Hangs` (docs/hangs.md).
        metrics: see :class:`Metrics`.
        preflight: see :class:`Preflight` (docs/preflight.md); None: nothing is checked.
        profile: see :class:`Profile`; on Flyte with ``enable_deck=True`` of ``@task``.
        master: image, resources and restart policy of node 0 of a job of fixed size. The restart policy of every role
            is OnFailure unless it names another: a pod that is lost comes back.
        worker: the same for the other nodes; for every node of an elastic range.
        run_policy: clean-up, deadline, time to live, backoff limit. Unset, running pods are cleaned up at the end, and
            the backoff limit is above the job's budget for lost nodes (``max_replacements``).
        queue: Kueue's LocalQueue, in the execution's namespace, which starts all pods of the job or none: its label on
            the job (docs/platform.md#kueue-secrets). Kueue must have its integration of PyTorchJobs switched on (of
            pods, for ``nnodes=1``).
    """

    nnodes: Nodes = 1
    nproc_per_node: Annotated[int, _at_least(1, "ranks", "use 1 or more, or None for one rank per GPU")] | None = None
    max_restarts: Annotated[int, _at_least(0, "restarts", "use 0 or more")] = 0
    max_replacements: Annotated[int, _at_least(0, "lost nodes", "use 0 or more")] = DEFAULT_REPLACEMENTS
    start_method: StartMethod = "preload"
    scratch: Scratch = field(default_factory=Scratch)
    timeouts: Timeouts = field(default_factory=Timeouts)
    logs: Logs = field(default_factory=Logs)
    hangs: Hangs = field(default_factory=Hangs)
    metrics: Metrics = field(default_factory=Metrics)
    preflight: Preflight | None = None
    profile: Profile | None = None
    master: kfpytorch.Master | None = None
    worker: kfpytorch.Worker | None = None
    run_policy: kfpytorch.RunPolicy | None = None
    queue: QueueName | None = None

    def __new__(cls, *_: object, **arguments: object) -> Self:
        """Refuse what is no field, before Python calls it an unexpected argument.

        Raises:
            ConfigError: all of it, with what to write instead.
        """
        if not SafeDistributed.__dataclass_fields__.keys() <= cls.__dataclass_fields__.keys():
            reason = "has the fields of another of its bases alone"
            repair = f"write @dataclass above class {cls.__name__}"
            raise ConfigError([Problem("task_config", cls.__name__, reason, repair)])
        takes = inspect.signature(cls.__init__).parameters  # a user's class may have an __init__ of its own
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        unknown = () if is_open else arguments.keys() - takes.keys()
        if unknown:
            reason = f"is no field of {cls.__name__}"
            raise ConfigError(Problem(name, arguments[name], reason, _instead(name, takes)) for name in sorted(unknown))
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """Have flytekit know a user's own class, too: a task of a class that it does not know has no ranks."""
        super().__init_subclass__(**options)
        ours = next(base for base in cls.__mro__[1:] if issubclass(base, SafeDistributed))  # a mixin may stand before
        if ours is not SafeDistributed:
            from flytekit.extend import TaskPlugins

            TaskPlugins.register_pythontask_plugin(cls, TaskPlugins.find_pythontask_plugin(ours))


@dataclass(frozen=True, kw_only=True)
class SafeHorovod(SafeDistributed):
    """Run the task function on every rank of a Horovod job: ``hvd.init()`` just works, no horovodrun, ssh or MPI."""


@dataclass(frozen=True, kw_only=True)
class SafeTorch(SafeDistributed):
    """Run the task function on every rank of a PyTorch job: ``dist.init_process_group()`` just works."""
