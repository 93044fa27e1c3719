"""A pod whose root file system is read-only: what needs a directory of its own gets one on the scratch volume.

Pod security asks for such roots; without volumes at ``/tmp`` and at the destination of the code, Python finds no
directory for temporary files, and the code cannot be put where it belongs. What a killed container leaves there, the
next one removes.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from .. import envvars
from ..errors import StagingError

logger = logging.getLogger(__name__)


def have_temporary_files(own: ExitStack) -> None:
    """Have a directory for temporary files, this process and those that it starts: a new one on the scratch volume
    where this pod has no usual one.

    Args:
        own: what is removed at the end.

    Raises:
        StagingError: there is none, and no scratch volume either.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        root = os.environ.get(envvars.SCRATCH_ROOT)
        if not root:
            raise StagingError(
                "There is no directory for temporary files",
                where={"host": os.uname().nodename, "user": os.geteuid()},
                seen=str(error),
                expected="one that can be written",
                hint="mount a volume there (emptyDir), or name a directory with TMPDIR",
            ) from error
        os.environ[envvars.TMPDIR] = str(_private(Path(root), own))
        tempfile.tempdir = None  # looked for again


def place_for_code(asked: Path, own: ExitStack) -> Path:
    """Where the code goes: as asked, or to a new directory on the scratch volume where that cannot be written; the task
    starts there, where it would have started in the other.

    Raises:
        StagingError: the scratch volume cannot be written.
    """
    there = asked
    while not os.path.exists(there) and there != there.parent:  # noqa: PTH110  (raises nothing)
        there = there.parent
    root = os.environ.get(envvars.SCRATCH_ROOT)
    if os.access(there, os.W_OK | os.X_OK) or not root:
        return asked
    code = _private(Path(root), own) / "code"
    code.mkdir()
    logger.info(f"{asked} cannot be written: the code is in {code}, and the task starts there")
    if Path.cwd() == asked:
        os.chdir(code)
    return code


def _private(parent: Path, own: ExitStack) -> Path:
    from .staging.place import Private, disk_failed

    try:
        return own.enter_context(closing(Private(parent))).path
    except OSError as error:
        raise disk_failed(error, parent, "make a directory for this start") from error
