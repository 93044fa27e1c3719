"""The upload of an attempt's verdict, its outputs or its one error, and the exit status that it gives.

Several pods may upload one (node 0, cut off from the others, and those who gave it up): the first stays, nothing goes
over an ``outputs.pb`` or ``error.pb`` that is there. And it is the last thing that is there: whoever finds it finds all
that it refers to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from flyteidl.core import errors_pb2, execution_pb2, literals_pb2
from flytekit.core.constants import ERROR_FILE_NAME, FUTURES_FILE_NAME, OUTPUT_FILE_NAME
from flytekit.core.data_persistence import FileAccessProvider
from fsspec.callbacks import Callback

from .. import lastwords, stopping
from ..agent.verdict import Verdict
from ..compat import flytekit as flytekit_inside
from ..errors import SafedistError
from ..failures import Outlook, Payer, outlook
from ..rank import task_context
from ..store.errors import one_line
from ..store.patience import Patience, Request, in_thread
from ..store.put_new import NoConditionError, path_of, put_new
from ..store.transfers import Transfers
from ..texts import encodable

logger = logging.getLogger(__name__)

THERE = "the verdict of this attempt is uploaded already: nothing replaces it"

LOOK_SECONDS = 15.0
"""For the question whether there is a verdict. Its answer saves work; a store that is away is shown by the upload."""

ANSWER_SECONDS = 60.0
"""For the first try to put one."""

USUAL_LIMIT = 2 * 1024**2
"""Bytes of ``outputs.pb`` that Flyte's propeller reads where nothing else is configured
(``storage.limits.maxDownloadMBs`` and ``propeller.max-output-size-bytes``, which no pod sees; its charts set 10 MB)."""


_KEPT_FILES, _KEPT_BYTES = 8, 1 << 20
"""Kept by :func:`room_kept`: a disk may have no file left, too; and bytes in each. Of a small disk a quarter in all."""


class Decided(SystemExit):
    """Leaves a task whose attempt has ended with an error that flytekit could not tell: it knows one way to say
    ``origin SYSTEM``, an exception of its own from outside the task's function. Not an ``Exception``, which flytekit
    would call the user's.

    Where nobody takes it (a command of the user's own around ``pyflyte-execute``) the process ends non-zero, and
    nothing is uploaded.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(stopping.EXIT_FAILED if verdict.payer is Payer.NOBODY else stopping.EXIT_UNDECIDED)
        self.verdict = verdict


@contextmanager
def room_kept(beside: str) -> Iterator[None]:
    """Inside, room for a verdict is kept on the disk on which it lies before it is uploaded. What runs may fill that:
    the error that says so would be lost then, and with outputs the whole work.

    Args:
        beside: a directory there; flytekit's own, which goes with the container.
    """
    with ExitStack() as kept:
        with suppress(OSError):  # the disk is full already
            directory = kept.enter_context(tempfile.TemporaryDirectory(dir=beside, ignore_cleanup_errors=True))
            for number in range(_KEPT_FILES):  # by their names: what runs may close any descriptor, or have it forked
                with (Path(directory) / str(number)).open("wb") as file:
                    disk = os.fstatvfs(file.fileno())
                    size = min(_KEPT_BYTES, disk.f_bavail * disk.f_frsize // (4 * _KEPT_FILES))
                    os.posix_fallocate(file.fileno(), 0, max(1, size))
        yield


def on(error: SafedistError) -> Verdict:
    """The verdict on what ends an attempt outside its task: the platform's, or one that every start would meet."""
    return Verdict(Payer.FLYTE if error.is_platforms else Payer.NOBODY, error, time.time_ns())


def end_with(verdict: Verdict, access: FileAccessProvider, prefix: str) -> int:
    """End the attempt with this error, where it has no verdict yet; the exit status then. From here on nothing else is
    to come of this process.

    Args:
        verdict: what is uploaded.
        access: the way to the store, of :meth:`Verdicts.access`, which tries again where that may help.
        prefix: the directory of the attempt's outputs.
    """
    stopping.finish()
    lastwords.keep(str(verdict.error))
    text = document(verdict, flytekit_inside.worker_name()).SerializeToString()
    try:
        with tempfile.TemporaryDirectory(prefix="safedist-error-") as directory:
            (Path(directory) / ERROR_FILE_NAME).write_bytes(text)
            access.put_data(directory, prefix, is_multipart=True)
    except Exception as trouble:  # whatever the store's client raises
        logger.error(f"the verdict cannot be uploaded: {one_line(trouble)}")
        # What the image lacks for this store no start has.
        return stopping.EXIT_FAILED if outlook(trouble) is Outlook.UNSUPPORTED else stopping.EXIT_UNDECIDED
    stopping.decided(0)
    return 0


def document(verdict: Verdict, worker: str = "") -> errors_pb2.ErrorDocument:
    """As Flyte reads it (v1.16, flytepropeller's ``executor.go``, ``isEligibleForRetry``). Pure.

    Args:
        verdict: what to say.
        worker: the name of this pod, where the backend gave it one.
    """
    kinds, origins = errors_pb2.ContainerError, execution_pb2.ExecutionError
    error = errors_pb2.ContainerError(
        code=encodable(verdict.error.error_code),
        message=encodable(str(verdict.error)),
        kind=kinds.NON_RECOVERABLE if verdict.payer is Payer.NOBODY else kinds.RECOVERABLE,
        origin=origins.SYSTEM if verdict.payer is Payer.FLYTE else origins.USER,
        worker=worker,
    )
    error.timestamp.FromNanoseconds(verdict.time_ns)
    return errors_pb2.ErrorDocument(error=error)


class Verdicts(Transfers):
    """How a pod's own process moves data to and from the store.

    Args:
        seconds: for which an upload is tried again after its first failure.

    Attributes:
        prefix: where this attempt's verdict goes; None: not known yet.
        is_shared: whether other pods of the job may upload one, too.
    """

    prefix: str | None = None
    is_shared = False

    async def upload(
        self, access: FileAccessProvider, path: str, to: str, once: Callable[[str, Callback], Awaitable[Any]]
    ) -> Any:
        """As every upload; flytekit leaves a verdict as a directory of files.

        Args:
            access: the way to the store.
            path: what is uploaded.
            to: where.
            once: uploads a path there as flytekit does.
        """
        if to != self.prefix:
            return await super().upload(access, path, to, once)
        if self.is_shared and await self._is_decided(access, to):
            return to
        order = (OUTPUT_FILE_NAME, FUTURES_FILE_NAME, ERROR_FILE_NAME)
        for file in sorted(Path(path).iterdir(), key=lambda file: file.name in order):
            address = f"{to.rstrip('/')}/{file.name}"
            if file.name == OUTPUT_FILE_NAME and file.stat().st_size > USUAL_LIMIT:
                logger.warning(warning_of(file.read_bytes(), address))
            # Of outputs an object store does not arbitrate: there are servers that refuse what they are not asked for
            # every day. On a file system a copy is there before it has its content.
            arbitrates = file.name == ERROR_FILE_NAME or (file.name in order and path_of(address) is not None)
            if self.is_shared and arbitrates and await self._put_new(access, file, address):
                continue
            with tempfile.TemporaryDirectory(dir=Path(path).parent) as alone:
                file.rename(Path(alone) / file.name)
                await super().upload(access, alone, to, once)
        return to

    async def _is_decided(self, access: FileAccessProvider, prefix: str) -> bool:
        """Before the first try only: a later one would find what a broken one of our own left."""
        try:
            decided = await asyncio.wrap_future(in_thread(lambda: is_there(prefix, access)))
        except Exception:  # whatever the store's client raises: the upload will show whether the store is down
            return False
        if decided:
            logger.info(THERE)
        return decided

    async def _put_new(self, access: FileAccessProvider, file: Path, address: str) -> bool:
        """Put a file where none is; False where this store cannot arbitrate."""
        data = file.read_bytes()

        def put() -> bool | None:
            try:
                return put_new(access.get_filesystem_for_path(address), address, data)
            except NoConditionError:
                return None

        patience = Patience(f"upload to {address}", down=self.seconds, answer=ANSWER_SECONDS)
        call = Request(patience, lambda _: in_thread(put))
        is_first = await asyncio.wrap_future(in_thread(call.result))
        if is_first is False:
            logger.info(THERE)
        return is_first is not None


def is_there(prefix: str, access: FileAccessProvider) -> bool:
    """Whether an attempt's outputs, or its one error, are in the store. A question that is bounded, and told.

    Args:
        prefix: the directory of the attempt's outputs.
        access: the way to the store.

    Raises:
        Exception: whatever the store's client raises.
    """
    patience = Patience(f"the question whether this attempt has ended ({prefix})", LOOK_SECONDS)
    return Request(patience, lambda _: in_thread(lambda: task_context.uploaded_to(prefix, access))).result()


def warning_of(outputs: bytes, address: str) -> str:
    """What to say of outputs that Flyte may refuse. Pure.

    Args:
        outputs: the file.
        address: where it goes.
    """
    literals = literals_pb2.LiteralMap.FromString(outputs).literals
    sizes = sorted(((literal.ByteSize(), name) for name, literal in literals.items()), reverse=True)
    names = ", ".join(f"{name} {size:,}" for size, name in sizes[:5])
    return (
        f"outputs.pb has {len(outputs):,} bytes ({names}): Flyte reads {USUAL_LIMIT:,} at most unless the cluster says "
        "otherwise (storage.limits.maxDownloadMBs, max-output-size-bytes), and fails the execution with "
        f"OutputSizeExceeded where that is less. The values stay at {address} in any case (docs/tasks.md). Return "
        "large ones as FlyteFile, FlyteDirectory or a data frame"
    )
