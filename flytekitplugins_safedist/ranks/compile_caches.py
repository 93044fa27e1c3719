"""The directories of one process's compile caches: a rank's, in every round the same, or the importing process's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..config.caches import CACHES


def make(parent: Path) -> None:
    """Make them below ``parent``, or find them. No process that had them is left: what one had locked by a file's mere
    existence is free.

    Raises:
        OSError: they cannot be made.
    """
    parent.parent.mkdir(mode=0o700, exist_ok=True)
    parent.mkdir(mode=0o700, exist_ok=True)
    for cache in CACHES:
        own = parent / cache.name
        own.mkdir(mode=0o700, exist_ok=True)
        for lock in own.glob(cache.locks) if cache.locks else ():
            lock.unlink()


def variables(parent: Path, shared: Collection[str]) -> dict[str, str]:
    """What sends libraries there.

    Args:
        parent: of the directories.
        shared: names of caches that stay where the environment has them.
    """
    return {cache.variable: str(parent / cache.name) for cache in CACHES if cache.name not in shared}
