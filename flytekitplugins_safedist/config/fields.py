"""The values in a config (``Scratch``, ``Timeouts``, ``Logs``), and what can be wrong with each."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Literal

from ..errors import Problem
from .caches import CACHE_NAMES
from .quantities import size_in_bytes

Keep = Literal["never", "on_failure", "always"]
Volume = Literal["disk", "memory"]
KEEP: tuple[Keep, ...] = ("never", "on_failure", "always")
HangAction = Literal["restart", "fail", "report"]
HANG_ACTIONS: tuple[HangAction, ...] = ("restart", "fail", "report")
VOLUMES: tuple[Volume, ...] = ("disk", "memory")
SCRATCH_MOUNT = "/var/run/safedist/scratch"
SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108  (the path itself is the interface: POSIX shared memory lives there)
MOST_COUNTED = 2**31 - 1
"""An int32, which counts are in Kubernetes' objects."""
MOST_SECONDS = MOST_COUNTED // 1000
"""poll() counts milliseconds in an int."""


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
        shared_caches: names of compile caches (see :mod:`~flytekitplugins_safedist.config.caches`) that ranks share on
            purpose, because the library locks them well enough for the user's file system.
        volume: what is mounted in a pod: ``"disk"`` of the node, or ``"memory"``, which counts against the container's
            memory limit; None: nothing, scratch lives in the container's file system.
        claim: name of a PersistentVolumeClaim to mount instead; all pods of the job mount the same one.
    """

    path: str | None = None
    keep: Keep = "never"
    size_limit: int | str | None = None
    shared_caches: tuple[str, ...] = ()
    volume: Volume | None = "disk"
    claim: str | None = None


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
        exit: for a rank that has reported its outcome to end, and for the pod's process that has its verdict: threads
            and ``atexit`` handlers that a module left have that long.
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


@dataclass(frozen=True, kw_only=True)
class Hangs:
    """When ranks that wait in a collective count as hung, and what is done about the rank they wait for.

    Attributes:
        action: once two looks at all ranks have shown the same: ``"restart"``: the job fails for it as for a rank's
            exception, so that ``max_restarts`` apply; ``"fail"``: it fails without a restart; ``"report"``: the nodes'
            logs say so, and it goes on.
        floor: seconds that a wait lasts at least, and five times as long as the longest one of the round that ended.
            None: nine tenths of the collective's own timeout (``init_process_group(timeout=...)``): torch would end the
            job a little later, and could not say for whom. Of Horovod, which ends none: ``ceiling``.
        ceiling: seconds after which a wait is too long whatever there was before; and after which also a rank that
            computes, or moves, is no longer waited for: a long evaluation and an endless loop look alike.
    """

    action: HangAction = "restart"
    floor: float | None = None
    ceiling: float = 7200.0


def hang_problems(value: object) -> Iterator[Problem]:
    """What is wrong with ``hangs``."""
    if not isinstance(value, Hangs):
        yield Problem("hangs", value, "is not a Hangs", "use Hangs(action=..., floor=..., ceiling=...)")
        return
    if value.action not in HANG_ACTIONS:
        yield not_among("hangs.action", value.action, HANG_ACTIONS)
    times = list(times_problems("hangs", value, ["ceiling", *(["floor"] if value.floor is not None else [])]))
    yield from times
    if not times and value.floor is not None and value.floor > value.ceiling:
        yield Problem("hangs.floor", value.floor, "is more than hangs.ceiling", f"use at most {value.ceiling:g}")


def scratch_problems(value: object) -> Iterator[Problem]:
    """What is wrong with a ``scratch``."""
    if not isinstance(value, Scratch):
        yield Problem("scratch", value, "is not a Scratch", "use Scratch(path=..., keep=..., size_limit=...)")
        return
    if value.path is not None and not is_absolute(value.path):
        yield Problem("scratch.path", value.path, "is not an absolute path", "use one that exists in the task's pod")
    if value.keep not in KEEP:
        yield not_among("scratch.keep", value.keep, KEEP)
    if value.size_limit is not None and not size_in_bytes(value.size_limit):
        yield Problem("scratch.size_limit", value.size_limit, "is not a size", 'use bytes or a quantity such as "20Gi"')
    yield from _volume_problems(value)
    names: object = value.shared_caches
    if isinstance(names, str) or not isinstance(names, Iterable):
        yield Problem("scratch.shared_caches", value.shared_caches, "is not a list of names", 'use ("triton",)')
        return
    for name in names:
        if not isinstance(name, str) or name not in CACHE_NAMES:
            yield not_among("scratch.shared_caches", name, sorted(CACHE_NAMES))


def _volume_problems(value: Scratch) -> Iterator[Problem]:
    claim: object = value.claim
    if value.volume is not None and value.volume not in VOLUMES:
        yield not_among("scratch.volume", value.volume, VOLUMES)
    elif claim is not None and not (isinstance(claim, str) and claim):
        yield Problem("scratch.claim", claim, "is not a name", "name a PersistentVolumeClaim")
    elif claim is not None and value.volume != "disk":
        reason = "is mounted in the place of a volume"
        yield Problem("scratch.claim", claim, reason, f"drop it, or volume={value.volume!r}")
    elif value.path is not None and (claim is not None or value.volume == "memory"):
        reason = "is where scratch goes, so that no volume is mounted for it"
        yield Problem("scratch.path", value.path, reason, "drop it, or " + ("volume" if claim is None else "claim"))


def timeout_problems(value: object) -> Iterator[Problem]:
    """What is wrong with ``timeouts``."""
    if not isinstance(value, Timeouts):
        yield Problem(
            "timeouts", value, "is not a Timeouts", "use Timeouts(start=..., rendezvous=..., stop=..., exit=...)"
        )
        return
    yield from times_problems("timeouts", value, [field.name for field in fields(value)])


def times_problems(where: str, value: object, names: Iterable[str]) -> Iterator[Problem]:
    """What is wrong with attributes that are seconds."""
    for name in names:
        seconds = getattr(value, name)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            yield Problem(f"{where}.{name}", seconds, "is not a time to wait", "use seconds, more than 0")
        elif seconds > MOST_SECONDS:
            reason = "is longer than the kernel can wait at once"
            yield Problem(f"{where}.{name}", seconds, reason, f"use at most {MOST_SECONDS} s, about 24 days")


def log_problems(value: object) -> Iterator[Problem]:
    """What is wrong with ``logs``."""
    if not isinstance(value, Logs):
        yield Problem("logs", value, "is not a Logs", "use Logs(show=..., tail_lines=..., prefix=...)")
        return
    if not are_ranks(value.show):
        yield Problem("logs.show", value.show, "is not a list of ranks", "use ranks such as (0,), or None for all")
    if not is_count(value.tail_lines, least=0):
        yield Problem("logs.tail_lines", value.tail_lines, "is not a number of lines", "use 0 or more")
    if not _can_be_filled_in(value.prefix):
        yield Problem("logs.prefix", value.prefix, "cannot be filled in", "use {rank}, {local_rank}, {node_rank}")


def problem_of_variable(where: str, name: object, text: object, *, further: str = "") -> Problem | None:
    """Why this cannot be a variable. Values may be secrets: they are never shown, only their type is.

    Args:
        where: the argument that sets it, for the message.
        name, text: of the variable.
        further: characters that names may have besides letters, digits and ``_``.
    """
    if not isinstance(name, str) or not re.fullmatch(rf"[{further}A-Za-z_][{further}A-Za-z0-9_]*", name):
        return Problem(where, name, "is not a name of a variable", "use letters, digits and _")
    if not isinstance(text, str):
        return Problem(f"{where}[{name!r}]", type(text).__name__, "is not text", "use a str")
    if not can_be_given(text):
        reason = "cannot be the value of a variable"
        return Problem(f"{where}[{name!r}]", "str", reason, "remove NUL and lone surrogates")
    return None


def is_count(value: object, *, least: int) -> bool:
    """Whether it is a number, at least ``least``, that a job's message and Kubernetes can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_COUNTED


def is_absolute(path: object) -> bool:
    """Whether it is text that can be a path from the root."""
    return isinstance(path, str) and can_be_given(path) and PurePosixPath(path).is_absolute()


def are_ranks(show: object) -> bool:
    """Whether it is what ``Logs(show=...)`` takes."""
    if isinstance(show, range):
        return all(is_count(rank, least=0) for rank in (*show[:1], *show[-1:]))
    return show is None or (
        isinstance(show, (tuple, list, set, frozenset)) and all(is_count(rank, least=0) for rank in show)
    )


def _can_be_filled_in(prefix: object) -> bool:
    """Whether each rank can have it before its lines. A width of millions would be filled in as well, in memory."""
    try:
        text: str = prefix  # type: ignore[assignment]  # else TypeError
        specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
        if any(re.search(r"\d{4}|[{]", spec) for spec in specs):
            return False
        text.format(rank=0, local_rank=0, node_rank=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return False
    return True


def not_among(name: str, value: object, allowed: Iterable[str]) -> Problem:
    """The problem of a word that is none of those allowed."""
    return Problem(name, value, "is unknown", "use one of: " + ", ".join(repr(choice) for choice in allowed))


def can_be_given(text: object) -> bool:
    """Whether it is text that a process can be given."""
    if not isinstance(text, str):
        return False
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
