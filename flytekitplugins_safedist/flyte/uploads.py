"""Uploads that outlast a short outage of the store: what a job has worked for is not lost to a bad minute.

flytekit tries once. After hours of training that is too little: the outputs are still on this node's disk, whole, and
putting them again overwrites what a broken try left. So the way to the store that flytekit uses is replaced by one
that tries again while the error may pass, within a time.

An attempt has one verdict. Where several pods may upload one (node 0, cut off from the others, and those who gave it
up), the first stays: nothing goes over an ``outputs.pb`` or ``error.pb`` that is there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import stopping
from ..compat import flytekit as flytekit_inside
from ..handoff import Slot
from ..texts import chain
from . import task_context
from .put_new import NoConditionError, path_of, put_new
from .storage_errors import Retry, one_line

if TYPE_CHECKING:
    from flytekit.core.data_persistence import FileAccessProvider

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 600.0
"""How long an outage of the store may last at most; a GPU that waits longer costs more than a retry."""

THERE = "the verdict of this attempt is uploaded already: nothing replaces it"

_STAYING = {errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}

T = TypeVar("T")

_SECONDS: Slot[float] = Slot()
"""For how long an upload is tried again, and"""
_VERDICT: Slot[str] = Slot()
"""where this attempt's verdict goes: from the task, and the entrypoint, to the way to the store that flytekit makes for
itself."""


def be_patient(upload_timeout: float) -> float:
    """Set for how long this process tries: half of the time that the other nodes wait for the upload, at most ten
    minutes. Returns it, in seconds."""
    seconds = _SECONDS.value = min(LONGEST_SECONDS, upload_timeout / 2)
    return seconds


def first_stays(prefix: str) -> None:
    """What this process uploads to *prefix* is its attempt's verdict; other pods of the job may upload one as well."""
    _VERDICT.value = prefix


def _seconds() -> float:
    return LONGEST_SECONDS if _SECONDS.value is None else _SECONDS.value


def patient_access() -> type[FileAccessProvider]:
    """flytekit's ``FileAccessProvider``, whose uploads are tried again, and which says how far a long transfer is."""
    from .transfers import followed  # and fsspec, for which nobody waits before the rank server is forked

    async def patiently(access: Any, from_path: str, to_path: str, once: Callable[[], Awaitable[Any]]) -> Any:
        if (
            stopping.stop_requested()
        ):  # and what was to end the task has been swallowed: what it made since is not to count
            stopping.end()
        if to_path == _VERDICT.value:
            if _is_decided(access, to_path):
                return to_path
            once = _one_and_whole(access, Path(from_path), to_path, once)
        return await tried_again(once, to_path, seconds=_seconds())

    return flytekit_inside.file_access(patiently, followed)


def _is_decided(access: Any, prefix: str) -> bool:
    """Before the first try only: a later one would find what a broken one of our own left."""
    try:
        decided = task_context.uploaded_to(prefix, access)
    except Exception:  # whatever the store's client raises: the upload will show whether the store is down
        return False
    if decided:
        logger.info(THERE)
    return decided


def _one_and_whole(access: Any, directory: Path, prefix: str, once: Callable[[], Awaitable[Any]]) -> Callable[..., Any]:
    """The upload of a verdict, which flytekit leaves as one file in a directory. Of an error the store arbitrates.

    On a file system it does of outputs as well: flytekit's copy is there before it has its content, and what a pod that
    is killed then leaves would be the verdict. In an object store an object is there whole or not at all: outputs go
    there as flytekit puts them (*once*), for there are servers that refuse what they are not asked for every day.
    """
    from flytekit.core.constants import ERROR_FILE_NAME

    files = list(directory.iterdir())
    target = f"{prefix.rstrip('/')}/{files[0].name}" if len(files) == 1 else ""
    if not target or (path_of(target) is None and files[0].name != ERROR_FILE_NAME):
        return once

    async def put() -> str:
        try:
            if not put_new(access.get_filesystem_for_path(prefix), target, files[0].read_bytes()):
                logger.info(THERE)
        except NoConditionError:
            await once()
        return prefix

    return put


async def tried_again(
    action: Callable[[], Awaitable[T]],
    label: str,
    *,
    seconds: float,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Do *action*, again and again while its error may pass and *seconds* last; its last error else.

    Args:
        action: what to do.
        label: the object, for the log.
        seconds: how long to go on after the first failure.
        sleep, clock: how to wait, and for how long that was.
    """
    retry = Retry(seconds, clock=clock)
    while True:
        try:
            return await action()
        except Exception as error:
            pause = None if _stays(error) else retry.pause(error)
            if pause is None:
                raise
            logger.info(
                f"upload to {label} failed: {one_line(error)}; trying again in {pause:.1f} s, for {retry.left():.0f} s "
                "more"
            )
            await sleep(pause)


def _stays(error: BaseException) -> bool:
    """Whether a disk says by a number what will not change."""
    return any(isinstance(cause, OSError) and cause.errno in _STAYING for cause in chain(error))
