"""How much the ranks of a node may write: what the user said, or what their pod is given before the kubelet evicts it.

An evicted pod says nothing of who filled the disk, and comes back to fill it again. So the ranks' limit lies below the
pod's, and is looked at more often than the kubelet looks (every ten seconds).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import envvars
from ..config.fields import SCRATCH_MOUNT
from ..config.options import Resolved
from ..errors import ScratchError
from .scratch import Usage, human

CALM_SECONDS, CLOSE_SECONDS = 5.0, 1.0
"""Between two looks: usually, and once half the limit is in use."""

_REST_OF_POD = 128 << 20
"""Bytes, or a tenth, that the pod's limit leaves to what is not the ranks': the code archive, the container's log."""


@dataclass(frozen=True)
class DiskLimit:
    """Bytes that the ranks of a node may hold together, and whose word that is."""

    size: int
    origin: str

    def __str__(self) -> str:
        return f"{human(self.size)} {self.origin}"


def limit_of(settings: Resolved, environment: Mapping[str, str]) -> DiskLimit | None:
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


def _on_pods_disk(settings: Resolved, environment: Mapping[str, str]) -> bool:
    """Whether scratch is in what Kubernetes counts: the container's own files, and volumes on the node's disk."""
    asked, named = settings.scratch, environment.get(envvars.SCRATCH_ROOT)
    if asked.path is not None:
        return False
    if asked.volume is None or named != SCRATCH_MOUNT:
        return named is None
    return asked.claim is None and asked.volume == "disk"


class DiskWatch:
    """Looks at what the ranks hold, now and then."""

    def __init__(self, limit: DiskLimit | None) -> None:
        self._limit = limit
        self._next = time.monotonic() + CALM_SECONDS

    def excess(self, measure: Callable[[], Usage]) -> tuple[int, ScratchError] | None:
        """The rank that holds most, and the error for it, once all hold more than the limit.

        Args:
            measure: asked when it is time to look.
        """
        if self._limit is None or time.monotonic() < self._next:
            return None
        found = measure()
        close = found.total > self._limit.size // 2
        self._next = time.monotonic() + (CLOSE_SECONDS if close else CALM_SECONDS)
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
