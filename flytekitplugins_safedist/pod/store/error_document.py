"""An error of the platform's, uploaded as what it is.

flytekit knows one way to say ``origin SYSTEM``: an exception of its own, in its own words, from outside the task's
function. A job's verdict has a code and a text, and comes from inside. So the task leaves by an exception that flytekit
lets through, and the document is made here.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import lastwords, stopping
from ...compat import flytekit as flytekit_inside
from ...texts import encodable

if TYPE_CHECKING:
    from flyteidl.core.errors_pb2 import ErrorDocument

_EXIT_FAILED = 1


@dataclass(frozen=True)
class SystemFailure:
    """What is uploaded: an error that is RECOVERABLE, of origin SYSTEM; or one that would come again at every start.

    Attributes:
        code: its stable name.
        message: what the user reads.
        time_ns: when it happened, in nanoseconds since the epoch.
        repeats: NON_RECOVERABLE, of origin USER.
    """

    code: str
    message: str
    time_ns: int
    repeats: bool = False


class Decided(SystemExit):
    """Leaves a task whose attempt the platform has ended; not an ``Exception``, which flytekit would call the user's.

    Where nobody takes it (a command of the user's own around ``pyflyte-execute``) the process ends non-zero, and
    nothing is uploaded.
    """

    def __init__(self, failure: SystemFailure) -> None:
        super().__init__(_EXIT_FAILED if failure.repeats else stopping.EXIT_UNDECIDED)
        self.failure = failure


def document(failure: SystemFailure, worker: str = "") -> ErrorDocument:
    """As Flyte reads it.

    Args:
        failure: what to say.
        worker: the name of this pod, where the backend gave it one.
    """
    from flyteidl.core import errors_pb2, execution_pb2

    kinds, origins = errors_pb2.ContainerError, execution_pb2.ExecutionError
    made = errors_pb2.ErrorDocument(
        error=errors_pb2.ContainerError(
            code=encodable(failure.code),
            message=encodable(failure.message),
            kind=kinds.NON_RECOVERABLE if failure.repeats else kinds.RECOVERABLE,
            origin=origins.USER if failure.repeats else origins.SYSTEM,
            worker=worker,
        )
    )
    made.error.timestamp.FromNanoseconds(failure.time_ns)
    return made


def upload(failure: SystemFailure, access: Any, output_prefix: str) -> None:
    """Put the error where Flyte looks for it, by flytekit's way to the store.

    Args:
        failure: what to say.
        access: flytekit's ``FileAccessProvider``, which tries again where that may help (:mod:`.verdict`).
        output_prefix: the directory of the attempt's outputs in the store.

    Raises:
        Exception: whatever the store's client raises when it gives up.
    """
    from flytekit.core.constants import ERROR_FILE_NAME

    lastwords.keep(failure.message)
    text = document(failure, flytekit_inside.worker_name()).SerializeToString()
    with tempfile.TemporaryDirectory(prefix="safedist-error-") as directory:
        (Path(directory) / ERROR_FILE_NAME).write_bytes(text)
        access.put_data(directory, output_prefix, is_multipart=True)
