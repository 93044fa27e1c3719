"""A pod whose root file system is read-only: what needs a directory of its own gets one on the scratch volume.

Pod security asks for such roots; without volumes at ``/tmp`` and at the destination of the code, Python finds no
directory for temporary files, and the code cannot be put where it belongs. What a killed container leaves there, the
next one removes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from .. import envvars
from ..errors import StagingError


def temporary_directory(environment: Mapping[str, str], own: ExitStack) -> Path | None:
    """A new directory for temporary files on the scratch volume; None where this pod has a usual one.

    Args:
        own: what is removed at the end.

    Raises:
        StagingError: there is none, and no scratch volume either.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        root = environment.get(envvars.SCRATCH_ROOT)
        if root:
            return private(Path(root), own)
        raise StagingError(
            "There is no directory for temporary files",
            where={"host": os.uname().nodename, "user": os.geteuid()},
            seen=str(error),
            expected="one that can be written",
            hint="mount a volume there (emptyDir), or name a directory with TMPDIR",
        ) from error
    return None


def destination(dest: Path, environment: Mapping[str, str], own: ExitStack) -> Path:
    """Where the code goes: *dest*, or a new directory on the scratch volume where *dest* cannot be written."""
    there = dest
    while not os.path.exists(there) and there != there.parent:  # noqa: PTH110  (raises nothing)
        there = there.parent
    root = environment.get(envvars.SCRATCH_ROOT)
    if os.access(there, os.W_OK | os.X_OK) or not root:
        return dest
    code = private(Path(root), own) / "code"
    code.mkdir()
    return code


def private(parent: Path, own: ExitStack) -> Path:
    """A new directory in *parent*.

    Raises:
        StagingError: *parent* cannot be written.
    """
    from ..pod.staging import Private
    from ..pod.staging.disk import disk_failed

    try:
        return own.enter_context(Private(parent)).path
    except OSError as error:
        raise disk_failed(error, parent, "make a directory for this start") from error
