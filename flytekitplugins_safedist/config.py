"""Task configurations: frozen dataclasses, and the validation that reports every problem at once.

The dataclasses hold what the user wrote, unchanged. :func:`resolve` turns them, with the resources of the task, into a
:class:`Resolved` value or raises one :class:`~flytekitplugins_safedist.errors.ConfigError` that lists every problem.
It runs when the ``@task`` decorator runs: not at serialization, not in the pod.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Literal

from .errors import ConfigError, Problem

Backend = Literal["horovod", "torch"]
StartMethod = Literal["preload", "spawn"]
Keep = Literal["never", "on_failure", "always"]

BACKENDS: tuple[Backend, ...] = ("horovod", "torch")
START_METHODS: tuple[StartMethod, ...] = ("preload", "spawn")
KEEP: tuple[Keep, ...] = ("never", "on_failure", "always")


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Where ranks keep their private files, and for how long.

    Attributes:
        path: directory under which the job's scratch is made; default ``$SAFEDIST_SCRATCH_ROOT``, then ``$TMPDIR``.
        keep: ``"never"``, ``"on_failure"`` (look at what a failed rank left behind) or ``"always"``.
        size_limit: for all ranks of a node together, in bytes or as a Kubernetes quantity (``"20Gi"``); None: the disk.
        shared_caches: names of compile caches (see :mod:`~flytekitplugins_safedist.scratch`) that ranks share on
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
        start: for all ranks of a node to be started, imports of the user's module included.
        rendezvous: for all nodes of the job to arrive.
        stop: between SIGTERM and SIGKILL when ranks are torn down.
        exit: for a rank that has reported its outcome to end.
    """

    start: float = 600.0
    rendezvous: float = 900.0
    stop: float = 5.0
    exit: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What of the ranks' output reaches the node's log.

    Attributes:
        show: ranks whose lines are shown; None: all. Every rank's output is in its own file all the same.
        tail_lines: lines of the failing rank's output that go into the error.
        prefix: text before each line; ``{rank}``, ``{local_rank}`` and ``{node_rank}`` are filled in.
    """

    show: tuple[int, ...] | None = None
    tail_lines: int = 20
    prefix: str = "[rank {rank}] "


@dataclass(frozen=True, kw_only=True)
class SafeDistributed:
    """What Horovod and PyTorch tasks have in common. Use :class:`SafeHorovod` or :class:`SafeTorch`.

    Attributes:
        nodes: pods of the job. ``1`` runs anywhere; later also ``N`` and ``"2:4"``.
        nproc_per_node: ranks per node; default: the number of GPUs the task requests, else 1.
        max_restarts: how often the ranks of the whole job may be relaunched together within one Flyte attempt.
        start_method: ``"preload"`` forks ranks from a process that imported torch, the backend, flytekit and the
            task's module once, falling back to ``"spawn"`` with a warning when that is not safe; ``"spawn"`` starts
            a fresh interpreter per rank.
        scratch: see :class:`Scratch`.
        timeouts: see :class:`Timeouts`.
        logs: see :class:`Logs`.
        environment: further variables for every rank; they win over the defaults safedist sets (``OMP_NUM_THREADS``),
            and identity (``RANK``, ``HOROVOD_SIZE``, ...) is refused.
    """

    nodes: int | str = 1
    nproc_per_node: int | None = None
    max_restarts: int = 0
    start_method: StartMethod = "preload"
    scratch: Scratch = field(default_factory=Scratch)
    timeouts: Timeouts = field(default_factory=Timeouts)
    logs: Logs = field(default_factory=Logs)
    environment: tuple[tuple[str, str], ...] | dict[str, str] = ()


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
        environment: the user's variables.
        size_limit: scratch limit in bytes, or None.
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

    @property
    def world_size(self) -> int:
        """Ranks of the job when every node is there."""
        return self.max_nodes * self.nproc_per_node
