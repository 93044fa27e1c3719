"""A code archive becomes a code directory, once per node, whatever happens meanwhile.

Correctness rests on three operations that the kernel makes atomic: create-if-absent, rename, and link. Locks only
save work. See docs/staging.md for what is promised on which file system.
"""

from __future__ import annotations

from ...errors import CodeNotFoundError
from .keeping import Keep
from .places import USUAL
from .progress import StagingProgress
from .source import Retry
from .stage import POINTS, Options, StagedCode, stage
from .store import CodeStore

__all__ = [
    "POINTS",
    "USUAL",
    "CodeNotFoundError",
    "CodeStore",
    "Keep",
    "Options",
    "Retry",
    "StagedCode",
    "StagingProgress",
    "stage",
]
