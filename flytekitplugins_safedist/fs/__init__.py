"""Race-free helpers for file systems that many ranks and nodes share.

They need no Flyte: any of them works in a safedist task, under torchrun or horovodrun, and in a single process. All
are synchronous, may be called from any thread, and raise subclasses of ``FsError`` only.
"""

from __future__ import annotations

from .atomic import atomic_path, atomic_write
from .collective import barrier, once_per_job, once_per_node, rank_zero_first
from .download import download_once
from .paths import ensure_dir, wait_for

__all__ = [
    "atomic_path",
    "atomic_write",
    "barrier",
    "download_once",
    "ensure_dir",
    "once_per_job",
    "once_per_node",
    "rank_zero_first",
    "wait_for",
]
