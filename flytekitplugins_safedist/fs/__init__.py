"""Race-free helpers for file systems that many ranks and nodes share.

They need no Flyte: any of them works in a safedist task, under torchrun or horovodrun, and in a single process. All
are synchronous, may be called from any thread, and raise subclasses of ``FsError`` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import names_of

if TYPE_CHECKING:
    from .atomic import atomic_path as atomic_path
    from .atomic import atomic_write as atomic_write
    from .collective import barrier as barrier
    from .collective import rank_zero_first as rank_zero_first
    from .download import download_once as download_once
    from .once import once_per_job as once_per_job
    from .once import once_per_node as once_per_node
    from .paths import ensure_dir as ensure_dir
    from .paths import wait_for as wait_for

_PUBLIC = {
    "atomic_path": "atomic",
    "atomic_write": "atomic",
    "barrier": "collective",
    "download_once": "download",
    "ensure_dir": "paths",
    "once_per_job": "once",
    "once_per_node": "once",
    "rank_zero_first": "collective",
    "wait_for": "paths",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)
__getattr__, __dir__ = names_of(__name__, _PUBLIC)
