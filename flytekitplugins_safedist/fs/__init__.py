"""Race-free helpers for file systems that many ranks and nodes share.

They need no Flyte: any of them works in a safedist task, under torchrun or horovodrun, and in a single process. All
are synchronous, may be called from any thread, and raise subclasses of ``FsError`` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import names_of

if TYPE_CHECKING:
    from .atomic import atomic_dir as atomic_dir
    from .atomic import atomic_path as atomic_path
    from .atomic import atomic_write as atomic_write
    from .barriers import barrier as barrier
    from .barriers import exchange as exchange
    from .claims import Claim as Claim
    from .claims import claim as claim
    from .context import use_identity as use_identity
    from .dirs import ensure_dir as ensure_dir
    from .downloads import Progress as Progress
    from .downloads import download_once as download_once
    from .group import Group as Group
    from .group import default_group as default_group
    from .group import file_group as file_group
    from .group import horovod_group as horovod_group
    from .group import torch_group as torch_group
    from .group import use_group as use_group
    from .identity import Identity as Identity
    from .identity import identity_from_env as identity_from_env
    from .once import once_per_job as once_per_job
    from .once import once_per_node as once_per_node
    from .publishing import is_published as is_published
    from .publishing import publish as publish
    from .ranklogs import Entry as Entry
    from .ranklogs import RankLog as RankLog
    from .ranklogs import merge_logs as merge_logs
    from .scope import SharedScope as SharedScope
    from .scope import shared_scope as shared_scope
    from .stale_files import sweep as sweep
    from .waiting import wait_for as wait_for

_PUBLIC = {
    "Claim": "claims",
    "Entry": "ranklogs",
    "Group": "group",
    "Identity": "identity",
    "Progress": "downloads",
    "RankLog": "ranklogs",
    "SharedScope": "scope",
    "atomic_dir": "atomic",
    "atomic_path": "atomic",
    "atomic_write": "atomic",
    "barrier": "barriers",
    "claim": "claims",
    "default_group": "group",
    "download_once": "downloads",
    "ensure_dir": "dirs",
    "exchange": "barriers",
    "file_group": "group",
    "horovod_group": "group",
    "identity_from_env": "identity",
    "is_published": "publishing",
    "merge_logs": "ranklogs",
    "once_per_job": "once",
    "once_per_node": "once",
    "publish": "publishing",
    "shared_scope": "scope",
    "sweep": "stale_files",
    "torch_group": "group",
    "use_group": "group",
    "use_identity": "context",
    "wait_for": "waiting",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)
__getattr__, __dir__ = names_of(__name__, _PUBLIC)
