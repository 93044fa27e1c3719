"""A code archive becomes code in a directory, whatever happens meanwhile (docs/staging.md).

Correctness rests on operations that the kernel makes atomic: create-if-absent and rename.
"""

from __future__ import annotations

from .points import POINTS
from .stage import stage
from .unpack import Options

__all__ = ["POINTS", "Options", "stage"]
