"""Race-free helpers for file systems that many ranks and nodes share.

They need no Flyte: any of them works in a safedist task, under torchrun or horovodrun, and in a single process. All
are synchronous, may be called from any thread, and raise subclasses of ``FsError`` only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .atomic import atomic_dir as atomic_dir
    from .atomic import atomic_write as atomic_write
    from .claims import Claim as Claim
    from .claims import claim as claim
    from .context import use_identity as use_identity
    from .debris import sweep as sweep
    from .dirs import ensure_dir as ensure_dir
    from .identity import Identity as Identity
    from .identity import identity_from_env as identity_from_env
    from .waiting import wait_for as wait_for

_PUBLIC = {
    "Claim": "claims",
    "Identity": "identity",
    "atomic_dir": "atomic",
    "atomic_write": "atomic",
    "claim": "claims",
    "ensure_dir": "dirs",
    "identity_from_env": "identity",
    "sweep": "debris",
    "use_identity": "context",
    "wait_for": "waiting",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
