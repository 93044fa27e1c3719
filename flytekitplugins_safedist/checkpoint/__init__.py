"""Checkpoints that are complete or not there: ``checkpoints(...)``, for Horovod and torch, one process or many.

What is promised, the layout of a save and the protocols: docs/checkpoints.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Checkpoints as Checkpoints
    from .api import checkpoints as checkpoints
    from .sampler import ResumableSampler as ResumableSampler

_PUBLIC = {"Checkpoints": "api", "ResumableSampler": "sampler", "checkpoints": "api"}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
