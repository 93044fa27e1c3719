"""Ends from before the task.

A pod that is started after its attempt's verdict has nothing to do: it leaves with 0 before it fetches anything.

Errors for which every start would end alike are the verdict themselves: code that is not in the store, an archive that
is refused, settings that cannot be. Starting again until a limit would be no answer. The pod that would upload every
other verdict uploads that, and exits 0; the others exit non-zero, are started again, and find it. Everything else ends
undecided, for the pod to be replaced.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .. import stopping, topology
from ..config.registered import Registered
from ..errors import MissingDependencyError, SafedistError, TopologyError
from ..flyte.storage_errors import one_line
from ..job import comeback
from ..pod.store import error_document

logger = logging.getLogger(__name__)

_EXIT_FAILED = 1
_COMMAND, _PREFIX = "pyflyte-execute", "--output-prefix"


def is_over(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this pod comes too late: the verdict of its attempt is in the store. A pod that nobody replaces does not
    look: its attempt begins with it.

    Args:
        command: flytekit's, which names the place.
        environment: the pod's variables.
    """
    prefix = output_prefix(command)
    if prefix is None or topology.is_alone(environment):
        return False
    from ..pod.store import verdict

    with stopping.unwinding(), _access(prefix) as access:
        over = comeback.is_decided(lambda: verdict.is_there(prefix, access), logger.info)
    if over:
        logger.info(comeback.LEAVES)
    return over


def settle(error: SafedistError, arguments: Sequence[str]) -> int:
    """The exit status after an error from before the task: 0 where it is uploaded as the attempt's verdict.

    Args:
        error: what kept the task from being started.
        arguments: of the container's command.
    """
    if error.platforms:
        return stopping.EXIT_UNDECIDED
    prefix = output_prefix(arguments)
    if prefix is None or not speaks(os.environ):
        return _EXIT_FAILED
    failure = error_document.SystemFailure(f"USER:{type(error).__name__}", str(error), time.time_ns(), repeats=True)
    stopping.finish()
    if not _upload(failure, prefix):
        # What the image lacks for the one store it lacks for the other: another start would upload nothing either.
        return _EXIT_FAILED if isinstance(error, MissingDependencyError) else stopping.EXIT_UNDECIDED
    stopping.decided(0)
    return 0


def _upload(failure: error_document.SystemFailure, prefix: str) -> bool:
    """Upload the attempt's verdict, unless it has one already; False, and a line in the log, where that fails."""
    try:
        with _access(prefix) as access:
            error_document.upload(failure, access, prefix)
    except Exception as trouble:  # whatever the store's client raises: this process ends undecided
        logger.error(f"the verdict cannot be uploaded: {one_line(trouble)}")
        return False
    return True


@contextmanager
def _access(prefix: str) -> Iterator[Any]:
    """flytekit's way to the store, as it will make it for the task."""
    from ..pod.store.verdict import Verdicts

    verdicts = Verdicts()
    verdicts.prefix, verdicts.is_shared = prefix, True
    with tempfile.TemporaryDirectory(prefix="safedist-early-") as sandbox:
        yield verdicts.access()(local_sandbox_dir=sandbox, raw_output_prefix=sandbox)


def output_prefix(arguments: Sequence[str]) -> str | None:
    """Where the attempt's verdict goes; None where the command is not flytekit's for one task (a mapped one has a place
    of its own below that, which only it knows)."""
    given = list(arguments)
    if _PREFIX not in given[:-1] or not any(os.path.basename(argument) == _COMMAND for argument in given):  # noqa: PTH119
        return None
    return given[given.index(_PREFIX) + 1]


def speaks(environment: Mapping[str, str]) -> bool:
    """Whether this pod is the one to upload: it is alone, or node 0; in a range any, for all would say the same."""
    if topology.is_alone(environment):
        return True
    try:
        registered = Registered.from_env(environment)
    except TopologyError:
        return True  # all have the same variable
    try:
        return registered is not None and not topology.from_env(environment, registered).node_rank
    except TopologyError:
        return False
