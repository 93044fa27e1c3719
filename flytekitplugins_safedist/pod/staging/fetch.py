"""The archive in its store, and the private file that it is downloaded into: from any store that flytekit reaches."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CodeNotFoundError, MissingDependencyError, SafedistError, StagingError
from ...failures import Failure, Outlook, decisive, of_errnos, outlook
from ...store.errors import one_line
from ...store.patience import Patience, Request, in_thread
from ...texts import how_far

_VALIDATORS = {
    *("size", "etag", "generation", "md5hash", "contentmd5", "digest", "md5", "versionid", "lastmodified", "mtime"),
    *("updated", "modified", "ino", "ctime"),
}
"""What stores call the things that change when an object does (s3fs, gcsfs, adlfs, http, files), in small letters and
without ``-`` and ``_``."""

_ONE_AT_A_TIME = "max_concurrency"
"""How s3fs and adlfs call the number of parts that they fetch at once: ten of 50 MiB, each whole in memory."""

_TEXTS: Mapping[Outlook, tuple[type[SafedistError], str, str]] = {
    Outlook.MISSING: (
        CodeNotFoundError,
        "The task's code archive was not found",
        "register the task again (the archive was deleted, has expired, or is in another bucket)",
    ),
    Outlook.DENIED: (
        StagingError,
        "The store refused access to the task's code archive",
        "check that the pod's credentials exist, are not expired and may read this bucket"
        " (service account, FLYTE_AWS_*, AWS_*); a signed URL may have run out",
    ),
    Outlook.UNSUPPORTED: (
        MissingDependencyError,
        "This image cannot reach the store that holds the task's code archive",
        "install the store's fsspec package in the image (s3fs, gcsfs, adlfs, aiohttp)",
    ),
    Outlook.LOCAL: (
        StagingError,
        "The task's code archive cannot be read",
        "see the error: it is of the file system that holds it, or a limit of this container's",
    ),
    Outlook.TRANSIENT: (
        StagingError,
        "The task's code archive was not fetched in time",
        "check the store's address and health and the pod's network; Flyte will retry."
        " For an archive that takes longer, raise SAFEDIST_CODE_TIMEOUT (seconds)",
    ),
}


class Source:
    """One archive, reached as flytekit reaches it.

    Args:
        uri: a path, or an address.
        patience: for all that is asked of it.

    Raises:
        MissingDependencyError: nothing installed here reaches such a store.
        StagingError: no client can be made.
    """

    def __init__(self, uri: str, patience: Patience) -> None:
        self.patience = patience
        self._uri = uri
        self._store = self._client(anonymous=False)
        self._version: object = None
        self.size: int | None = None
        """Bytes of it; None where its store does not say."""

    def look(self) -> None:
        """Take what is there now for the archive.

        Raises:
            SafedistError: it cannot be found.
        """
        self._version = self._identity()

    def differs(self) -> bool:
        """Whether it is another one since :meth:`look`. Raises SafedistError."""
        return self._identity() != self._version

    def changed(self) -> StagingError:
        """The error for an archive that is."""
        return StagingError(
            "The code archive changed while it was fetched",
            where={"uri": self.patience.label},
            hint="Flyte will retry; do not overwrite archives of running executions",
        )

    def failed(self, error: Exception, attempts: int = 1) -> SafedistError:
        """What an error of its store comes to."""
        meaning, cause = outlook(error), decisive(error)
        late = meaning is Outlook.TRANSIENT
        kind, what, hint = _TEXTS[meaning]
        return kind(
            what,
            where={"uri": self.patience.label, "host": os.uname().nodename},
            seen=f"{one_line(cause)}, at attempt {attempts}" if late else one_line(cause),
            expected=f"all of it within {self.patience.seconds:g} s, an answer within {self.patience.down:g} s"
            if late
            else None,
            hint=hint,
        )

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Request a method of its file system; its own loop can end it, a thread can only be left behind."""
        function = self._function(method)
        if self._store.async_impl:
            return asyncio.run_coroutine_threadsafe(function(self._uri, *args, **kwargs), self._store.loop)
        return in_thread(partial(function, self._uri, *args, **kwargs))

    def in_one_stream(self) -> dict[str, Any]:
        """What tells the client to download one part after the other, if it takes that."""
        takes = inspect.signature(self._function("get_file")).parameters
        return {_ONE_AT_A_TIME: 1} if _ONE_AT_A_TIME in takes else {}

    def _function(self, method: str) -> Callable[..., Any]:
        """A method of its file system: the coroutine function that fsspec's asynchronous ones have under this name."""
        function: Callable[..., Any] = getattr(self._store, f"_{method}" if self._store.async_impl else method)
        return function

    def _client(self, *, anonymous: bool) -> Any:
        """A client with the credentials flytekit is configured with. Making one may ask a server who we are."""
        from fsspec.utils import get_protocol

        protocol = get_protocol(self._uri)
        if protocol == "file":
            from fsspec.implementations.local import LocalFileSystem

            return LocalFileSystem()
        from flytekit.core.context_manager import FlyteContextManager

        access = FlyteContextManager.current_context().file_access
        options: dict[str, Any] = {"anonymous": True} if anonymous else {}
        if protocol in ("http", "https"):
            # The bytes as they are stored: what a server calls Content-Encoding is the archive's own packing to us.
            options["client_kwargs"] = {"headers": {"Accept-Encoding": "identity"}, "auto_decompress": False}

        make = partial(access.get_filesystem, protocol, path=self._uri, **options)
        return self._answer(Request(self.patience, lambda _: in_thread(make)))

    def _identity(self) -> object:
        """What changes when the archive does."""
        try:
            info = self._info()
        except StagingError as refused:
            # As flytekit does: a public bucket needs no credentials, and wrong ones may be refused where none are not.
            if refused.__cause__ is None or outlook(refused.__cause__) is not Outlook.DENIED:
                raise
            try:
                self._store = self._client(anonymous=True)
                info = self._info()
            except SafedistError:
                raise refused from None
        self.size = None if info.get("size") is None else int(info["size"])
        plain = {name.lower().replace("-", "").replace("_", ""): value for name, value in info.items()}
        return {name: plain[name] for name in sorted(plain.keys() & _VALIDATORS)}

    def _info(self) -> Mapping[str, Any]:
        self._store.invalidate_cache()  # a listing from before an object changed would hide the change
        info: Mapping[str, Any] = self._answer(Request(self.patience, lambda _: self.begin("info")))
        if info.get("type") == "directory":
            raise self.failed(FileNotFoundError(f"{self.patience.label} is a directory"))
        return info

    def _answer(self, call: Request[Any]) -> Any:
        try:
            return call.result()
        except SafedistError:
            raise
        except Exception as error:
            raise self.failed(error, call.attempt) from error


class Download:
    """The archive on its way into a private file, from its first byte on: it can be read as it arrives.

    Each try has a file of its own, whose bytes are the same: an archive that changes meanwhile is found out by
    :meth:`Source.differs`. A client may write its file in another order than the archive's: who reads before
    :meth:`finish` may get what is not the archive, and must be able to tell.

    Args:
        source: the archive, looked at.
        directory: private; it must be there.

    Raises:
        OSError: of the disk.
        SafedistError: of the store, as every method.
    """

    def __init__(self, source: Source, directory: Path) -> None:
        from fsspec.callbacks import Callback

        self._source, self._directory = source, directory
        self._transfer, self._options = Callback(), source.in_one_stream()
        self.path = directory / "archive-0"
        self.is_whole = False
        self._call: Request[Any] = Request(
            source.patience,
            self._begin,
            check=self._see_its_size,
            stays=self._is_of_our_file,
            progress=self._progress,
            far=self._far,
        )

    def read(self, position: int, most: int) -> bytes:
        """Some bytes from there on; none at the end. Waits for what has not come yet."""
        while not self.is_whole and self._have() <= position:
            self._wait()
        with open(self.path, "rb", buffering=0) as file:
            file.seek(position)
            return file.read(most)

    def begins_with(self, text: bytes) -> bool:
        """Whether its first bytes, as far as they have come, are these."""
        start = b""
        while len(start) < len(text) and (more := self.read(len(start), len(text) - len(start))):
            start += more
        return start == text

    def finish(self) -> None:
        """Wait until all has come."""
        while not self.is_whole:
            self._wait()

    def close(self) -> None:
        """End it."""
        self._call.cancel()

    def _wait(self) -> None:
        try:
            self.is_whole = self._call.is_done()
        except SafedistError:
            raise
        except Exception as error:
            if self._is_of_our_file(error):
                raise
            raise self._source.failed(error, self._call.attempt) from error

    def _is_of_our_file(self, error: Exception) -> bool:
        """Whether it is our own disk that says so. Clients name the store's error as the cause of theirs."""
        if not isinstance(error, OSError):
            return False
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        bare = error.__cause__ is None and Failure.NODE_DISK in of_errnos((error.errno or 0,))
        return bare or str(self.path) in names or outlook(error) is Outlook.LOCAL

    def _see_its_size(self, _answer: object) -> None:
        have, size = self._have(), self._source.size
        if size is None or have == size:
            return
        if self._source.differs():
            raise self._source.changed()
        raise ConnectionError(f"{have} of {size} bytes arrived")

    def _begin(self, attempt: int) -> Future[Any]:
        with suppress(OSError):
            self.path.unlink()
        self.path = self._directory / f"archive-{attempt}"
        return self._source.begin("get_file", str(self.path), callback=self._transfer, **self._options)

    def _have(self) -> int:
        with suppress(FileNotFoundError):
            return self.path.stat().st_size
        return 0

    def _progress(self) -> tuple[int, int]:
        """Some clients make the file as long as the archive at once, others tell nothing while they write it."""
        return self._have(), self._transfer.value

    def _far(self) -> str:
        return how_far(self._transfer.value or self._have(), self._source.size, self._source.patience.passed())
