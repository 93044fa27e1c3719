"""Checkpoints that are complete or not there: ``checkpoints(...)``, for Horovod and torch, one process or many.

What is promised, the layout of a save and the protocols: docs/checkpoints.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import names_of

if TYPE_CHECKING:
    from .api import Checkpoints as Checkpoints
    from .api import checkpoints as checkpoints
    from .sampler import ResumableSampler as ResumableSampler

_PUBLIC = {"Checkpoints": "api", "ResumableSampler": "sampler", "checkpoints": "api"}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)
__getattr__, __dir__ = names_of(__name__, _PUBLIC)
