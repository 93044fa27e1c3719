"""A pod whose root file system is read-only: what needs a directory of its own gets one on the scratch volume.

Pod security asks for such roots; without volumes at ``/tmp`` and at the destination of the code, Python finds no
directory for temporary files, and the code cannot be merged where it belongs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .. import envvars


def temporary_directory(environment: Mapping[str, str]) -> Path | None:
    """A new directory for temporary files on the scratch volume; None where there is a usual one, or no volume."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return _new("tmp", environment)
    return None


def destination(dest: Path, environment: Mapping[str, str]) -> Path:
    """Where the code goes: *dest*, or a new directory on the scratch volume where *dest* cannot be written."""
    there = next(path for path in (dest, *dest.parents) if path.exists())
    if os.access(there, os.W_OK | os.X_OK):
        return dest
    return _new("code", environment) or dest


def _new(purpose: str, environment: Mapping[str, str]) -> Path | None:
    root = environment.get(envvars.SCRATCH_ROOT, "")
    try:
        return Path(tempfile.mkdtemp(prefix=f"safedist-{purpose}-", dir=root)) if root else None
    except OSError:
        return None  # what needs it says what it misses
