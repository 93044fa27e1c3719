"""Checkpoints that are complete or not there: ``Checkpoints(...)``, for Horovod and torch, one process or many.

What is promised, the layout of a save and the protocols: docs/checkpoints.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import names_of

if TYPE_CHECKING:
    from .group import per_rank as per_rank
    from .manager import Checkpoints as Checkpoints
    from .sampler import RandomNumbers as RandomNumbers
    from .sampler import ResumableSampler as ResumableSampler

_PUBLIC = {"Checkpoints": "manager", "RandomNumbers": "sampler", "ResumableSampler": "sampler", "per_rank": "group"}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  (one table, not two)
__getattr__, __dir__ = names_of(__name__, _PUBLIC)
