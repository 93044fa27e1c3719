"""Where the archive comes from: one object in any store, read in order, in chunks, with bounded retries."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from ..errors import StagingError
from ..storefaults import Verdict, judge, one_line
from .failures import fetch_failed

T = TypeVar("T")

_LOCAL_CHUNK = 1 << 18
_RANGE = 4 << 20
_AHEAD = 3
"""Ranges asked for at once: enough to keep a store busy while one is unpacked, small enough to hold in memory."""

_VALIDATORS = (
    *("ETag", "etag", "generation", "md5Hash", "content_settings_md5", "content_md5", "md5", "sha256", "checksum"),
    *("VersionId", "version_id", "LastModified", "last_modified", "updated", "mtime", "modified"),
)
"""What stores call the thing that changes when an object does (s3fs, gcsfs, adlfs, http, local), best first."""


@dataclass(frozen=True)
class Retry:
    """How to meet errors that may pass.

    Attributes:
        attempts: tries in all.
        base: seconds before the second; doubled for each further one, and jittered.
        most: seconds a pause can last.
        sleep: waits.
        say: takes a line for the log: someone who waits must see what for.
    """

    attempts: int = 5
    base: float = 0.5
    most: float = 15.0
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: T201

    def pause(self, attempt: int, label: str, error: BaseException) -> None:
        """Wait after attempt number ``attempt`` (from 1) at ``label`` has failed with ``error``."""
        seconds = min(self.base * 2 ** (attempt - 1), self.most) * random.uniform(0.5, 1.0)  # noqa: S311
        self.say(
            f"safedist: {label}: {one_line(error)}; trying again in {seconds:.1f} s "
            f"(attempt {attempt} of {self.attempts} failed)"
        )
        self.sleep(seconds)


@dataclass(frozen=True)
class Identity:
    """Which object it is, as far as the store tells without sending it.

    Attributes:
        uri: the full address.
        size: bytes, where the store says.
        validator: what changes when the object does; "" where the store has nothing of the kind.
    """

    uri: str
    size: int | None
    validator: str


class Source(Protocol):
    """One object."""

    label: str

    def identity(self) -> Identity:
        """Ask the store. Raises StagingError."""

    def chunks(self) -> Iterator[bytes]:
        """Its bytes in order. Raises StagingError."""

    def close(self) -> None:
        """Let go of threads and descriptors."""


def public(uri: str) -> str:
    """``uri`` for messages and logs: signatures in a query and passwords before the host are secrets."""
    parts = urlsplit(uri)
    if not parts.scheme:
        return uri
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return shown + ("?..." if parts.query else "")


def open_source(uri: str, retry: Retry) -> Source:
    """The source for ``uri``: a path, ``file://``, or whatever flytekit and fsspec know.

    Raises:
        StagingError: nothing installed here reaches such a store.
    """
    if uri.startswith("file://"):
        return LocalSource(uri, uri[len("file://") :], retry)
    if "://" not in uri:
        return LocalSource(uri, uri, retry)
    return RemoteSource(uri, retry)


def _retrying(label: str, retry: Retry, action: Callable[[], T]) -> T:
    for attempt in range(1, retry.attempts + 1):
        try:
            return action()
        except Exception as error:
            if judge(error) is not Verdict.TRANSIENT or attempt == retry.attempts:
                raise fetch_failed(error, label, attempt) from error
            retry.pause(attempt, label, error)
    raise StagingError("No attempt to fetch the code archive was allowed", where={"uri": label})


class LocalSource:
    """A file. Read in place, without a copy."""

    def __init__(self, uri: str, path: str, retry: Retry) -> None:
        self.label = public(uri)
        self._uri = uri
        self._path = path
        self._retry = retry

    def identity(self) -> Identity:
        """Size, inode and the time of the last change, which nobody can set."""
        found = _retrying(self.label, self._retry, lambda: Path(self._path).stat())
        return Identity(self._uri, found.st_size, f"{found.st_ino}-{found.st_mtime_ns}-{found.st_ctime_ns}")

    def chunks(self) -> Iterator[bytes]:
        """See :class:`Source`."""
        fd = _retrying(self.label, self._retry, lambda: os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
        try:
            at = 0
            while chunk := _retrying(self.label, self._retry, partial(os.pread, fd, _LOCAL_CHUNK, at)):
                at += len(chunk)
                yield chunk
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is held between calls."""


class RemoteSource:
    """An object reached through fsspec, with the credentials flytekit is configured with."""

    def __init__(self, uri: str, retry: Retry) -> None:
        self.label = public(uri)
        self._uri = uri
        self._retry = retry
        self._fs = _retrying(self.label, retry, lambda: _filesystem(uri, anonymous=False))
        self._info: Mapping[str, Any] = {}
        self._pool: ThreadPoolExecutor | None = None

    def identity(self) -> Identity:
        """What the store says of the object now."""
        try:
            self._info = _retrying(self.label, self._retry, self._ask)
        except StagingError as refused:
            # As flytekit does: a public bucket needs no credentials, and wrong ones may be refused where none are not.
            if not _worth_trying_anonymously(refused):
                raise
            signed, self._fs = self._fs, _filesystem(self._uri, anonymous=True)
            try:
                self._info = self._ask()
            except Exception:
                self._fs = signed
                raise refused from None
        size = self._info.get("size")
        validator = next((f"{key}={self._info[key]}" for key in _VALIDATORS if self._info.get(key)), "")
        return Identity(self._uri, int(size) if size is not None else None, validator)

    def _ask(self) -> Mapping[str, Any]:
        self._fs.invalidate_cache()  # a listing from before an object changed would hide the change
        info: Mapping[str, Any] = self._fs.info(self._uri)
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{self.label} is a directory")
        return info

    def chunks(self) -> Iterator[bytes]:
        """Ranges, a few ahead of the reader; one stream where the server knows no ranges."""
        size = self._info.get("size")
        http = self._uri.startswith(("http://", "https://"))
        if size is None or (http and not self._info.get("partial")):
            yield from self._stream()
        else:
            yield from self._ranges(int(size))

    def _ranges(self, size: int) -> Iterator[bytes]:
        self._pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="safedist-fetch")
        starts = iter(range(0, size, _RANGE))
        waiting: list[Future[bytes]] = []
        for start in starts:
            waiting.append(self._pool.submit(self._range, start, min(start + _RANGE, size)))
            if len(waiting) >= _AHEAD:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()

    def _range(self, start: int, end: int) -> bytes:
        def get() -> bytes:
            data: bytes = self._fs.cat_file(self._uri, start=start, end=end)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} of {end - start} bytes arrived")
            return data

        return _retrying(self.label, self._retry, get)

    def _stream(self) -> Iterator[bytes]:
        done = 0
        for attempt in range(1, self._retry.attempts + 1):
            try:
                with self._fs.open(self._uri, "rb", block_size=0, cache_type="none") as stream:
                    skip = done
                    while chunk := stream.read(_LOCAL_CHUNK):
                        fresh = chunk[skip:]
                        skip = max(skip - len(chunk), 0)
                        done += len(fresh)
                        if fresh:
                            yield fresh
            except Exception as error:
                if judge(error) is not Verdict.TRANSIENT or attempt == self._retry.attempts:
                    raise fetch_failed(error, self.label, attempt) from error
                self._retry.pause(attempt, self.label, error)
            else:
                return

    def close(self) -> None:
        """Join the threads: ranks must not be forked beside them, nor the task run beside them."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _worth_trying_anonymously(refused: StagingError) -> bool:
    cause = refused.__cause__
    return cause is not None and judge(cause) is Verdict.DENIED


def _filesystem(uri: str, *, anonymous: bool) -> Any:
    from flytekit.core.context_manager import FlyteContextManager
    from fsspec.utils import get_protocol

    access = FlyteContextManager.current_context().file_access
    kwargs: dict[str, Any] = {"anonymous": True} if anonymous else {}
    with suppress(KeyError):
        return access.get_filesystem(get_protocol(uri), path=uri, **kwargs)
    raise ValueError(f"no file system for {public(uri)}")
