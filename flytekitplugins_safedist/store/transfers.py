"""flytekit's way to the store: uploads are tried again, and a long transfer says how far it is.

flytekit tries once. After hours of training that is too little: what is to be uploaded is still on this node's disk,
whole, and putting it again overwrites what a broken try left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.callbacks import Callback

from .. import stopping
from ..compat import flytekit as flytekit_inside
from ..texts import how_far, public
from .patience import Patience, Request, Retry, in_own_thread, outlasting

if TYPE_CHECKING:
    from flytekit.core.data_persistence import FileAccessProvider

T = TypeVar("T")

logger = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""Between two lines about one transfer."""

ANSWER_SECONDS = 300.0
"""For the first try of an upload to bring something on its way: a client says so for each part, which may be large."""

LONGEST_SECONDS = 600.0
"""How long an outage of the store may last at most; a GPU that waits longer costs more than a retry."""


_PATTERN = re.compile(r"[*?\[]")


def patience_of(upload_timeout: float) -> float:
    """Seconds for which an upload is tried again: half of the time that the other nodes wait for it, at most ten
    minutes."""
    return min(LONGEST_SECONDS, upload_timeout / 2)


class Transfers:
    """How a process moves data to and from the store.

    Args:
        seconds: for which an upload is tried again after its first failure.
        tells: whether it says how far it is. One rank of a node says it for all, which take the same.

    Attributes:
        seconds: see there; 0 within :meth:`outlast`.
    """

    def __init__(self, seconds: float = LONGEST_SECONDS, *, tells: bool = True) -> None:
        self.seconds = seconds
        self._tells = tells

    def access(self) -> type[FileAccessProvider]:
        """flytekit's ``FileAccessProvider``, which does so."""
        return flytekit_inside.file_access(self.upload, self.download)

    async def upload(
        self, _access: FileAccessProvider, path: str, to: str, once: Callable[[str, Callback], Awaitable[Any]]
    ) -> Any:
        """Do *once*, again and again while its error may pass; its last error else.

        Args:
            _access: the way to the store.
            path: what is uploaded.
            to: where.
            once: uploads a path there, and tells how far it is.
        """
        if stopping.stop_requested():
            stopping.end()  # what was to end the task has been swallowed: what it made since is not to count
        with _plainly_named(path) as plain:
            return await self._upload(plain, to, once)

    async def _upload(self, path: str, to: str, once: Callable[[str, Callback], Awaitable[Any]]) -> Any:
        loop, transfer = asyncio.get_running_loop(), self._followed("upload to", to)
        patience = Patience(f"upload to {public(to)}", down=self.seconds, answer=ANSWER_SECONDS)

        def begin(_attempt: int) -> Any:
            return asyncio.run_coroutine_threadsafe(_awaited(once(path, transfer)), loop)

        call = Request(patience, begin, progress=lambda: transfer.bytes)
        # Where no thread can look after it, this loop has to do it, and must not wait here: one try then.
        return await asyncio.wrap_future(in_own_thread(call.result) or call.current())

    async def download(
        self, address: str, to: str, once: Callable[[str, Callback], Awaitable[Any]], *, is_directory: bool
    ) -> Any:
        """Do *once*.

        Args:
            address: what is downloaded.
            to: where.
            once: downloads it to a path, and tells how far it is.
            is_directory: whether it is one, and not a file.
        """
        return await once(to, self._followed("download of", address))

    def outlast(self, what: str, action: Callable[[], T], *, only_once: bool = False) -> T:
        """What *action* returns, which moves data to or from the store by whatever client: it is done again as a whole
        while the store is away.

        Args:
            what: it does, for the log.
            action: may be done again from the beginning.
            only_once: it may not; each of its uploads is tried again instead.

        Raises:
            StorageError: the store stayed away, or refuses.
        """
        seconds = self.seconds
        if not only_once:
            self.seconds = 0.0  # what is tried again as a whole is not tried again in parts
        try:
            return outlasting(action, what, Retry(0.0 if only_once else seconds), tell=self._tells)
        finally:
            self.seconds = seconds

    def _followed(self, what: str, address: str) -> Transfer:
        return Transfer(f"{what} {public(address)}", tells=self._tells)


@contextmanager
def _plainly_named(path: str) -> Iterator[str]:
    """A path at which fsspec finds a file or directory whose own it would take for a pattern (``model[1].pt``): what is
    put from there comes to another address, or nowhere (fsspec's issue 838)."""
    if _PATTERN.search(path) is None or not Path(path).exists():  # what is not there is told by its name
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="safedist-upload-") as directory:
        link = Path(directory) / "content"
        link.symlink_to(Path(path).absolute())
        yield f"{link}{os.sep}" if path.endswith(os.sep) else str(link)


async def _awaited(action: Awaitable[Any]) -> Any:
    return await action


class Transfer(Callback):  # type: ignore[misc]  # fsspec is untyped to mypy here
    """Of one file, or of all in a directory: what fsspec is to tell about it, and a line of the log every ten seconds.

    Args:
        what: it is, for the log.
        tells: whether it says so.
        clock: tells seconds.

    Attributes:
        bytes: that have come.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic, *, tells: bool = True) -> None:
        super().__init__()
        self.bytes = 0
        self._what, self._clock, self._tells = what, clock, tells
        self._began = self._told = clock()
        self._known = 0

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
        """What is told of one of the files."""
        return _OfFile(self)

    def come(self, new: int, known: int = 0) -> None:
        """Bytes have come, or are *known* to be there."""
        self.bytes, self._known = self.bytes + new, self._known + known
        now = self._clock()
        if not self._tells or now - self._told < TELL_SECONDS:
            return
        self._told, files = now, self.size or 1
        of_files = f"{self.value} of {files} files, " if files > 1 else ""
        told = how_far(self.bytes, self._known if files == 1 and self._known else None, now - self._began)
        logger.info(f"{self._what}: {of_files}{told}")


class _OfFile(Callback):  # type: ignore[misc]
    def __init__(self, whole: Transfer) -> None:
        super().__init__()
        self._whole = whole

    def set_size(self, size: int | None) -> None:
        self._whole.come(0, size or 0)

    def relative_update(self, inc: int = 1) -> None:
        self._whole.come(inc)
