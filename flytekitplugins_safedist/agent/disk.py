"""How much the ranks of a node hold on disk, and may: what the user said, or what their pod is given.

An evicted pod says nothing of who filled the disk, and comes back to fill it again. So the ranks' limit lies below the
pod's, and is looked at more often than the kubelet looks (every ten seconds).
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import envvars
from ..config.options import SCRATCH_MOUNT
from ..config.registered import Registered
from ..errors import ScratchError
from ..rank.places import JobScratch
from ..store.patience import in_thread
from ..texts import human
from . import scratch

CALM_SECONDS, CLOSE_SECONDS = 5.0, 1.0
"""Between two looks: usually, and once half the limit is in use."""

_REST = 20
"""Times what the last look took, until the next."""

_REST_OF_POD = 128 << 20
"""Bytes, or a tenth, that the pod's limit leaves to what is not the ranks': the code archive, the container's log."""


def bytes_of(path: Path) -> int:
    """Bytes that a file, or the files below a directory, take on disk; what vanishes meanwhile counts as nothing. Of
    a file with several names each has its part: what ranks share counts once."""
    total, todo = 0, [str(path)]  # no recursion: a task may leave directories of any depth
    while todo:
        at = todo.pop()
        try:
            found = os.lstat(at)
            if stat.S_ISDIR(found.st_mode):
                todo += [entry.path for entry in os.scandir(at)]
            else:
                total += found.st_blocks * 512 // max(1, found.st_nlink)
        except OSError:
            continue
    return total


@dataclass(frozen=True)
class Usage:
    """What the ranks of this node hold on disk, in bytes, and how much room the file system has left.

    Attributes:
        path: the job's directory.
        by_rank: rank and bytes of each, its log included.
        free: bytes; None where the file system does not say.
        earlier: bytes that are kept of earlier rounds.
        together: bytes that are no one rank's: in ``node_dir``, and of inputs.
    """

    path: Path
    by_rank: tuple[tuple[int, int], ...]
    free: int | None
    earlier: int = 0
    together: int = 0

    @property
    def total(self) -> int:
        """Bytes of all ranks, of earlier rounds, and of what ranks share."""
        return sum(size for _, size in self.by_rank) + self.earlier + self.together

    def largest(self) -> int:
        """The rank that holds most."""
        return max(self.by_rank, key=lambda item: item[1])[0]

    def __str__(self) -> str:
        ranked = sorted(self.by_rank, key=lambda item: -item[1])
        listed = [f"rank {rank}: {human(size)}" for rank, size in ranked]
        listed += [f"earlier rounds: {human(self.earlier)}"] if self.earlier else []
        listed += [f"node_dir and inputs: {human(self.together)}"] if self.together else []
        free = "unknown" if self.free is None else human(self.free)
        return f"{human(self.total)} in {self.path} ({', '.join(listed)}); {free} free on its file system"


def usage(job: JobScratch, round_: int, ranks: Iterable[int]) -> Usage:
    """Measure a job in one of its rounds. This never fails: what cannot be read counts as nothing, or is not known."""

    def of(rank: int) -> int:
        own, log, errors = job.rank(round_, rank), job.log(round_, rank), job.errors(round_, rank)
        return sum(map(bytes_of, (own.path, own.caches, log, errors)))

    by_rank = tuple((rank, of(rank)) for rank in ranks)
    free, earlier = None, 0
    with suppress(OSError):
        earlier = sum(map(bytes_of, scratch.other_rounds(job, round_)))
    with suppress(OSError):  # the directory is gone, or its file system fails: which is what the caller is about to say
        free = shutil.disk_usage(job.path).free
    together = bytes_of(job.node) + bytes_of(job.inputs)
    return Usage(path=job.path, by_rank=by_rank, free=free, earlier=earlier, together=together)


@dataclass(frozen=True)
class DiskLimit:
    """Bytes that the ranks of a node may hold together, and whose word that is."""

    size: int
    origin: str

    def __str__(self) -> str:
        return f"{human(self.size)} {self.origin}"


def limit_of(settings: Registered, environment: Mapping[str, str]) -> DiskLimit | None:
    """The limit of this node's ranks, or None where there is none.

    Args:
        settings: the task's; its own limit counts first.
        environment: this process's variables, with what Kubernetes says of the pod.
    """
    if settings.size_limit is not None:
        return DiskLimit(settings.size_limit, "by Scratch(size_limit=...)")
    if not _on_pods_disk(settings, environment):
        return None
    given = environment.get(envvars.EPHEMERAL_STORAGE, "")
    pods = int(given) if given.isascii() and given.isdecimal() else 0
    if not pods:
        return None
    size = pods - min(max(_REST_OF_POD, pods // 10), pods // 2)
    return DiskLimit(size, f"by the pod's ephemeral storage of {human(pods)}, part of which is left to the rest of it")


def _on_pods_disk(settings: Registered, environment: Mapping[str, str]) -> bool:
    """Whether scratch is in what Kubernetes counts: the container's own files, and volumes on the node's disk."""
    asked, named = settings.scratch, environment.get(envvars.SCRATCH_ROOT)
    if asked.path is not None:
        return False
    if asked.volume is None or named != SCRATCH_MOUNT:
        return named is None
    return asked.claim is None and asked.volume == "disk"


class DiskWatch:
    """Looks at what the ranks of one round hold, now and then, in a thread of its own: with a million files a look
    takes seconds, for which nobody is to wait; and never more than a twentieth of the time."""

    def __init__(self, limit: DiskLimit | None) -> None:
        self._limit = limit
        self._next = time.monotonic() + CALM_SECONDS
        self._look: Future[Usage] | None = None
        self._began = 0.0

    def excess(self, measure: Callable[[], Usage]) -> tuple[int, ScratchError] | None:
        """The rank that holds most, and the error for it, once all hold more than the limit; called again and again.

        Args:
            measure: called when it is time to look, in a thread.

        Raises:
            Exception: whatever *measure* has raised.
        """
        now = time.monotonic()
        if self._limit is None or (self._look is None and now < self._next):
            return None
        if self._look is None:
            self._began, self._look = now, in_thread(measure)
        if not self._look.done():
            return None
        found, self._look = self._look.result(), None
        close = found.total > self._limit.size // 2
        self._next = now + max(CLOSE_SECONDS if close else CALM_SECONDS, _REST * (now - self._began))
        error = over_limit(found, self._limit)
        return None if error is None else (found.largest(), error)


def over_limit(measured: Usage, limit: DiskLimit) -> ScratchError | None:
    """The error for ranks that hold more than their limit, or None."""
    if measured.total <= limit.size:
        return None
    return ScratchError(
        "the ranks of this node wrote more than their scratch limit",
        where={"directory": measured.path},
        seen=str(measured),
        expected=f"at most {limit}",
        hint="write less to current_rank().scratch and temporary files, remove what is done with, or raise "
        "Scratch(size_limit=...) or the task's limit of ephemeral_storage",
    )
