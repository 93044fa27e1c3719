"""Errors from before the task: where every start would end alike, starting again until a limit is no answer.

Code that is not in the store, an archive that is refused, settings that cannot be: nothing that a replaced pod could do
better. So that is the attempt's verdict, uploaded by the pod that would upload every other, and it exits 0; the others
exit non-zero, are started again, and find it. Everything else ends undecided, for the pod to be replaced.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from .. import stopping, topology
from ..config.registered import Registered
from ..errors import ArchiveError, CodeNotFoundError, ConfigError, SafedistError, TopologyError
from ..flyte import error_document, uploads
from ..flyte.storage_errors import one_line

_EXIT_UNDECIDED = 1
_REPEATING = (ArchiveError, CodeNotFoundError, ConfigError)
_COMMAND, _PREFIX = "pyflyte-execute", "--output-prefix"


def settle(error: SafedistError, arguments: Sequence[str]) -> int:
    """The exit status after an error from before the task: 0 where it is uploaded as the attempt's verdict.

    Args:
        error: what kept the task from being started.
        arguments: of the container's command.
    """
    prefix = output_prefix(arguments)
    if prefix is None or not isinstance(error, _REPEATING) or not speaks(os.environ):
        return _EXIT_UNDECIDED
    failure = error_document.SystemFailure(f"USER:{type(error).__name__}", str(error), time.time_ns(), repeats=True)
    stopping.finish()
    try:
        with tempfile.TemporaryDirectory(prefix="safedist-error-") as sandbox:
            access = uploads.patient_access()(local_sandbox_dir=sandbox, raw_output_prefix=sandbox)
            error_document.upload(failure, access, prefix)
    except Exception as trouble:  # whatever the store's client raises: this process ends undecided
        print(f"safedist-execute: that cannot be uploaded: {one_line(trouble)}", file=sys.stderr, flush=True)  # noqa: T201
        return _EXIT_UNDECIDED
    stopping.decided(0)
    return 0


def output_prefix(arguments: Sequence[str]) -> str | None:
    """Where the attempt's verdict goes; None where the command is not flytekit's for one task (a mapped one has a place
    of its own below that, which only it knows)."""
    given = list(arguments)
    if _PREFIX not in given[:-1] or not any(os.path.basename(one) == _COMMAND for one in given):  # noqa: PTH119
        return None
    return given[given.index(_PREFIX) + 1]


def speaks(environment: Mapping[str, str]) -> bool:
    """Whether this pod is the one to upload: it is alone, or node 0; in a range any, for all would say the same."""
    if topology.is_alone(environment):
        return True
    registered = Registered.from_env(environment)
    try:
        return registered is not None and not topology.from_env(environment, registered).node_rank
    except TopologyError:
        return False
