"""Task configurations: frozen dataclasses that hold what the user wrote, unchanged.

What values a field may have stands beside its type (:mod:`.typed`); what must agree with what, in :mod:`.validate`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import ConfigError, Problem
from .caches import CACHE_NAMES
from .quantities import size_in_bytes
from .typed import KFPYTORCH, MOST_COUNTED, Must, is_count, is_text, well_typed

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
OPERATORS_PORT = "pytorchjob-port"
"""What the operator calls the port at which node 0 is met (training-operator v1.9.0)."""
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


def _name_of(what: str, most: int, repair: str) -> Must:
    form = re.compile(rf"[a-z0-9]([a-z0-9.-]{{0,{most - 2}}}[a-z0-9])?")
    return Must(form.fullmatch, f"is not the name of a {what}", repair)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _can_be_waited(seconds: float) -> bool:
    return seconds <= MOST_SECONDS


def _is_directory(value: Any) -> bool:
    return is_text(value) and PurePosixPath(value).is_absolute()


def _is_part(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1


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
    Must(_can_be_waited, "is longer than the kernel can wait at once", f"use at most {MOST_SECONDS} s, about 24 days"),
]
Nodes = Annotated[
    int | str,
    Must(parse_nodes, "is not a number of nodes", 'use 1, a number N of up to 999999, or a range such as "2:4"'),
]
_A_DIRECTORY = "use a str, such as '/data', of a directory that exists in the task's pod"
Directory = Annotated[str, Must(_is_directory, "is not an absolute path", _A_DIRECTORY)]
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
Claim = Annotated[str, _name_of("PersistentVolumeClaim", 253, "use small letters, digits, '-' and '.'")]
QueueName = Annotated[str, _name_of("LocalQueue", 63, "use up to 63 small letters, digits, '-' and '.'")]


_DIFFERENT = {
    "operator": "leave it out: a job of several nodes is a PyTorchJob, for Horovod too, which needs no MPI",
    "launcher": "leave it out: no pod launches the others; master=Master(...), worker=Worker(...) are those that train",
    "slots": "write nproc_per_node=",
    "replicas": "write nnodes=",
    "num_workers": "write nnodes=, the number of pods that train, node 0 among them",
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


def _instead(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1) or [each for each in names if each.startswith(name)]
    there = f"leave it out; there are {', '.join(names)}"
    return _DIFFERENT.get(name) or (f"did you mean {near[0]}?" if near else there)


class _Fields:
    """A class whose fields are all given by name."""

    def __new__(cls, *values: object, **arguments: object) -> Self:
        """Refuse what is no field, before Python calls it an unexpected argument.

        Raises:
            ConfigError: all of it, with what to write instead.
        """
        takes = inspect.signature(cls.__init__).parameters  # a user's class may have an __init__ of its own
        names = [each for each in takes if each != "self"]
        problems = []
        if not any(each.kind in _TAKEN_WITHOUT_A_NAME for name, each in takes.items() if name != "self"):
            repair = f"write {cls.__name__}(NAME=...), with one of: {', '.join(names)}"
            problems += [Problem(f"argument {at}", each, "has no name", repair) for at, each in enumerate(values, 1)]
        if not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            reason, unknown = f"is no field of {cls.__name__}", sorted(arguments.keys() - takes.keys())
            problems += [Problem(name, arguments[name], reason, _instead(name, names)) for name in unknown]
        if problems:
            with contextlib.suppress(Exception):  # of one without a field that it must have, or a user's own __init__
                well_typed(cls(**{name: value for name, value in arguments.items() if name in takes}), problems)
            raise ConfigError(problems)
        return super().__new__(cls)


_TAKEN_WITHOUT_A_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


@dataclass(frozen=True, kw_only=True)
class Scratch(_Fields):
    """Where ranks keep their private files, and for how long.

    Attributes:
        path: a directory of the pod under which the job's scratch is made; no volume is mounted for it then. None: the
            volume; outside a pod ``$SAFEDIST_SCRATCH_ROOT``, then ``$TMPDIR``.
        keep: ``"never"``, ``"on_failure"`` (to look at what a failed rank left) or ``"always"``.
        size_limit: for all ranks of a node together, logs included: bytes, or a Kubernetes quantity (``"20Gi"``). The
            volume has the same limit: above it the kubelet evicts the pod. None: most of the pod's limit of ephemeral
            storage where scratch counts in it, else the disk.
        shared_caches: names of compile caches that the ranks of a node share (docs/configuration.md#compile-caches).
            The library must lock them well enough for your file system.
        share_inputs: whether the ranks of a node download an input (``FlyteFile``, ``FlyteDirectory``) once for all of
            them (docs/fs.md#inputs). They may not write to its files then. False: each rank has a copy.
        volume: what is mounted in a pod: ``"disk"`` of the node, or ``"memory"``, which counts against the container's
            memory limit. None: nothing; scratch is in the container's file system.
        claim: name of a PersistentVolumeClaim to mount instead. All pods of the job mount the same one.
    """

    path: Directory | None = None
    keep: Literal["never", "on_failure", "always"] = "never"
    size_limit: Size | None = None
    shared_caches: CacheNames = ()
    share_inputs: bool = True
    volume: Literal["disk", "memory"] | None = "disk"
    claim: Claim | None = None


@dataclass(frozen=True, kw_only=True)
class Timeouts(_Fields):
    """How long each wait may take, in seconds. Every wait has a deadline; when one expires, the error says who was
    waited for.

    Attributes:
        code: to get the code archive from the store.
        start: to import the libraries of a node's ranks; then as long again until all ranks have imported your module.
            Inputs are fetched after that, and do not count.
        rendezvous: until all nodes of the job have arrived.
        stop: between SIGTERM and SIGKILL when ranks are ended. One that has failed has as long for its exit handlers.
        exit: for a rank to end after it has reported its result, and for the pod's process after the verdict. Threads
            and ``atexit`` handlers have that long.
        heartbeat: without a message from a node, until it counts as lost (frozen, cut off, or gone).
        preemption: for ranks to save after their pod is told to stop. The pod's grace period allows for it.
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
class Logs(_Fields):
    """What of the ranks' output reaches the node's log.

    Attributes:
        show: ranks whose lines are shown. None: all. Every rank's output is also in a file of its own, the last 16 MiB
            of it.
        tail_lines: lines of the failed rank's output that go into the error.
        prefix: text before each line; ``{rank}``, ``{local_rank}`` and ``{node_rank}`` are filled in.
    """

    show: Ranks | None = None
    tail_lines: Annotated[int, _at_least(0, "lines", "use 0 or more")] = 20
    prefix: Annotated[str, Must(_is_prefix, "cannot be filled in", "use {rank}, {local_rank}, {node_rank}")] = (
        "[rank {rank}] "
    )


@dataclass(frozen=True, kw_only=True)
class Hangs(_Fields):
    """When a wait or a step counts as a hang, and what follows.

    Attributes:
        action: what follows when two looks at all ranks have shown the same hang. ``"restart"``: the job fails as for a
            rank's exception, so ``max_restarts`` apply. ``"fail"``: it fails without a restart. ``"report"``: only the
            logs say so.
        floor: seconds that a wait, or a step (``current_rank().progress``), lasts at least before it is too long. Too
            long is five times the longest one of the round that has ended, between ``floor`` and ``ceiling``. None:
            only what a library is about to give up by itself is ended; the rest is logged.
        ceiling: with ``floor``: seconds after which every wait is too long, also one for a rank that computes, reads or
            writes (a long evaluation and an endless loop look alike). Without: after which a step is logged.
    """

    action: Literal["restart", "fail", "report"] = "restart"
    floor: Seconds | None = None
    ceiling: Seconds = 7200.0


@dataclass(frozen=True, kw_only=True)
class Metrics(_Fields):
    """Where each node shows its metrics while the job runs (docs/metrics.md).

    Attributes:
        prometheus: port of the pod, on every address, which Prometheus may ask. None: no port.
        otlp: whether metrics are sent to an OpenTelemetry collector. The pod's ``OTEL_*`` variables say which.
    """

    prometheus: Port | None = None
    otlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Preflight(_Fields):
    """Checks of all nodes before the first rank starts (docs/preflight.md). They look at scratch, /dev/shm, names, the
    connections between nodes, clocks, GPUs, a small matrix product, and an all-reduce between neighbours.

    Attributes:
        action: what follows where a node is not fit, or far slower than the others. ``"fail"``: the job ends with
            ``SYSTEM:Preflight...``, which costs none of ``retries``. ``"report"``: only the log says so.
        slow: the part of the median of all nodes (of all GPUs) below which a figure is far off.
        timeout: seconds for all of it.
    """

    action: Literal["fail", "report"] = "fail"
    slow: Annotated[float, Must(_is_part, "is no part of the median", "use 0.5, or less")] = 0.5
    timeout: Seconds = 120.0


@dataclass(frozen=True, kw_only=True)
class Profile(_Fields):
    """Steps that torch.profiler looks into (docs/record.md). A rank tells its steps by ``current_rank().progress``.

    Attributes:
        steps: the first and the last of them.
        ranks: the ranks that are profiled. None: all.
    """

    steps: Annotated[
        tuple[int, int], Must(_are_steps, "is not a first and a last step", "use (10, 12), the first >= 1")
    ]
    ranks: Ranks | None = (0,)


@dataclass(frozen=True, kw_only=True)
class SafeDistributed(_Fields):
    """What Horovod and PyTorch tasks have in common. Use :class:`SafeHorovod` or :class:`SafeTorch`.

    Where Flyte's own PyTorch plugin has a class for something (``RunPolicy``, ``Master``, ``Worker``,
    ``RestartPolicy``), it is that one, from ``flytekitplugins.kfpytorch``.

    Attributes:
        nnodes: pods of the job: ``1``, a fixed number, or a range such as ``"2:4"`` (docs/kubeflow.md).
        nproc_per_node: ranks per node; None: one for each GPU that the task requests, else 1.
        max_restarts: how often all ranks may start again together in one Flyte attempt.
        max_replacements: how often nodes may be lost and come back in one Flyte attempt. A node is lost when its pod is
            drained, preempted, out of memory, or its machine is gone. ``max_restarts`` do not pay for that. The default
            is lower under a ``run_policy.backoff_limit`` of 10 or less: one less than that.
        start_method: ``"preload"`` imports libraries once per node and forks ranks; ``"spawn"`` starts interpreters
            (docs/configuration.md#start-methods). With both, each rank imports your own code itself. Where a fork is
            not safe, the ranks are fresh interpreters, and a line of the log says why.
        scratch: see :class:`Scratch`.
        timeouts: see :class:`Timeouts`.
        logs: see :class:`Logs`.
        hangs: see :class:`Hangs` (docs/hangs.md).
        metrics: see :class:`Metrics`.
        preflight: see :class:`Preflight`. None: nothing is checked.
        profile: see :class:`Profile`. On Flyte it needs ``enable_deck=True`` of ``@task``.
        master: image, resources and restart policy of node 0 of a job of fixed size. A role without a restart policy
            has OnFailure: a pod that is lost comes back.
        worker: the same for the other nodes. In a range: for every node.
        run_policy: clean-up, deadline, time to live, backoff limit. Unset, running pods are removed at the end, and the
            backoff limit is above the job's own budget for lost nodes (``max_replacements``).
        queue: Kueue's LocalQueue, which starts all pods of the job or none (docs/platform.md#kueue-secrets). It is in
            the execution's namespace. Kueue needs its integration of PyTorchJobs (for ``nnodes=1``: of pods).
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

    def __new__(cls, *values: object, **arguments: object) -> Self:
        """Refuse a class that is none of ours any more.

        Raises:
            ConfigError: that, or what is no field.
        """
        if not SafeDistributed.__dataclass_fields__.keys() <= cls.__dataclass_fields__.keys():
            reason = "has the fields of another of its bases alone"
            repair = f"write @dataclass above class {cls.__name__}"
            raise ConfigError([Problem("task_config", cls.__name__, reason, repair)])
        return super().__new__(cls, *values, **arguments)

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
