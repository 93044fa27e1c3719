"""Where the archive comes from: one object in any store, read in order, in chunks, with bounded retries."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from ...errors import SafedistError, StagingError
from ...flyte.storage_errors import Outlook, judge, one_line
from .clients import filesystem
from .failures import fetch_failed
from .watch import Abandoned, Call, Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCAL_CHUNK = 1 << 18
_RANGE = 4 << 20
_AHEAD = 3
"""Ranges asked for at once: enough to keep a store busy while one is unpacked, small enough to hold in memory."""

_VALIDATORS = (
    *("etag", "generation", "md5hash", "contentsettingsmd5", "contentmd5", "digest", "md5", "sha256", "checksum"),
    *("versionid", "lastmodified", "updated", "mtime", "modified"),
)
"""What stores call the thing that changes when an object does (s3fs, gcsfs, adlfs, http, local), best first; in small
letters, without ``-`` and ``_``: HTTP says ``Last-Modified`` where s3fs says ``LastModified``."""


@dataclass(frozen=True)
class Retry:
    """How to meet errors that may pass.

    Attributes:
        attempts: tries in all.
        base: seconds before the second; doubled for each further one, and jittered.
        most: seconds a pause can last.
        answer: seconds that one try of a remote store may take, for what its client does not bound by itself.
        sleep: waits.
        say: takes a line for the log: someone who waits must see what for.
    """

    attempts: int = 5
    base: float = 0.5
    most: float = 15.0
    answer: float = 120.0
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], object] = logger.info

    def pause(self, attempt: int, label: str, error: BaseException) -> None:
        """Wait after attempt number ``attempt`` (from 1) at ``label`` has failed with ``error``."""
        seconds = min(self.base * 2 ** (attempt - 1), self.most) * random.uniform(0.5, 1.0)  # noqa: S311
        self.say(
            f"{label}: {one_line(error)}; trying again in {seconds:.1f} s (attempt {attempt} of {self.attempts} failed)"
        )
        self.sleep(seconds)


@dataclass(frozen=True)
class ObjectIdentity:
    """Which object it is, as far as the store tells without sending it.

    Attributes:
        uri: the full address.
        size: bytes, where the store says.
        validator: what changes when the object does; "" where the store has nothing of the kind.
    """

    uri: str
    size: int | None
    validator: str


class ShortAnswerError(ConnectionError):
    """Fewer bytes arrived than were asked for: the connection broke, or a smaller object lies there now."""


class Source(Protocol):
    """One object."""

    label: str

    def identity(self) -> ObjectIdentity:
        """Ask the store. Raises StagingError."""

    def chunks(self) -> Iterator[bytes]:
        """Its bytes in order. Raises StagingError."""


def public(uri: str) -> str:
    """``uri`` for messages and logs: signatures in a query and passwords before the host are secrets."""
    parts = urlsplit(uri)
    if not parts.scheme:
        return uri
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return shown + ("?..." if parts.query else "")


def open_source(uri: str, retry: Retry, watch: Watch) -> Source:
    """The source for ``uri``: a path, ``file://``, or whatever flytekit and fsspec know.

    Raises:
        MissingDependencyError: nothing installed here reaches such a store.
    """
    if uri.startswith("file://"):
        return LocalSource(uri, uri[len("file://") :], retry, watch)
    if "://" not in uri:
        return LocalSource(uri, uri, retry, watch)
    return RemoteSource(uri, retry, watch)


def _retrying(label: str, retry: Retry, watch: Watch, action: Callable[[], T]) -> T:
    for attempt in range(1, retry.attempts + 1):
        try:
            return action()
        except (SafedistError, Abandoned):
            raise
        except Exception as error:
            _try_again(error, attempt, label, retry, watch)
    raise StagingError("No attempt to fetch the code archive was allowed", where={"uri": label})


def _try_again(error: Exception, attempt: int, label: str, retry: Retry, watch: Watch) -> None:
    """Pause before the next try, if there is to be one.

    Raises:
        SafedistError: there is not.
    """
    if judge(error) is not Outlook.TRANSIENT or attempt == retry.attempts:
        raise fetch_failed(error, label, attempt) from error
    retry.pause(attempt, label, error)
    watch.check(label, one_line(error))


class LocalSource:
    """A file. Read in place, without a copy."""

    def __init__(self, uri: str, path: str, retry: Retry, watch: Watch) -> None:
        self.label = public(uri)
        self._uri = uri
        self._path = path
        self._retry = retry
        self._watch = watch

    def identity(self) -> ObjectIdentity:
        """Size, inode and the time of the last change, which nobody can set."""
        found = self._tried(lambda: Path(self._path).stat())
        return ObjectIdentity(self._uri, found.st_size, f"{found.st_ino}-{found.st_mtime_ns}-{found.st_ctime_ns}")

    def chunks(self) -> Iterator[bytes]:
        """See :class:`Source`."""
        fd = self._tried(lambda: os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
        try:
            at = 0
            while chunk := self._tried(partial(os.pread, fd, _LOCAL_CHUNK, at)):
                at += len(chunk)
                self._watch.check(self.label, f"{at} bytes")
                yield chunk
        finally:
            os.close(fd)

    def _tried(self, action: Callable[[], T]) -> T:
        return _retrying(self.label, self._retry, self._watch, action)


class RemoteSource:
    """An object reached through fsspec, with the credentials flytekit is configured with."""

    def __init__(self, uri: str, retry: Retry, watch: Watch) -> None:
        self.label = public(uri)
        self._uri = uri
        self._retry = retry
        self._watch = watch
        self._fs = _retrying(self.label, retry, watch, lambda: filesystem(uri, self.label, anonymous=False))
        self._info: Mapping[str, Any] = {}

    def identity(self) -> ObjectIdentity:
        """What the store says of the object now."""
        try:
            self._info = _retrying(self.label, self._retry, self._watch, lambda: self._answer(self._ask))
        except StagingError as refused:
            # As flytekit does: a public bucket needs no credentials, and wrong ones may be refused where none are not.
            if not _worth_trying_anonymously(refused):
                raise
            signed, self._fs = self._fs, filesystem(self._uri, self.label, anonymous=True)
            try:
                self._info = self._answer(self._ask)
            except Exception:
                self._fs = signed
                raise refused from None
        size = self._info.get("size")
        return ObjectIdentity(self._uri, int(size) if size is not None else None, _validator(self._info))

    def _answer(self, action: Callable[[], T]) -> T:
        return self._watch.call(action, self.label, self._retry.answer)

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
            yield from self._stream(None if size is None else int(size))
        else:
            yield from self._ranges(int(size))

    def _ranges(self, size: int) -> Iterator[bytes]:
        asked: list[tuple[int, int, Call[bytes]]] = []
        for start in range(0, size, _RANGE):
            end = min(start + _RANGE, size)
            asked.append((start, end, self._ask_for(start, end)))
            if len(asked) >= _AHEAD:
                yield self._range(*asked.pop(0))
        for missing in asked:
            yield self._range(*missing)

    def _ask_for(self, start: int, end: int) -> Call[bytes]:
        return Call(lambda: self._fs.cat_file(self._uri, start=start, end=end))

    def _range(self, start: int, end: int, call: Call[bytes]) -> bytes:
        """What ``call`` brings, or another try of it: here and not in its thread, which may never end."""
        calls = itertools.chain([call], (self._ask_for(start, end) for _ in itertools.count()))

        def get() -> bytes:
            data = self._watch.result(next(calls), self.label, self._retry.answer)
            if len(data) != end - start:
                raise ShortAnswerError(f"{len(data)} of {end - start} bytes arrived")
            return data

        return _retrying(self.label, self._retry, self._watch, get)

    def _stream(self, size: int | None) -> Iterator[bytes]:
        done = 0
        for attempt in range(1, self._retry.attempts + 1):
            try:
                for chunk in self._opened(done):
                    done += len(chunk)
                    self._watch.check(self.label, f"{done} bytes")
                    yield chunk
                if size is not None and done != size:
                    raise ShortAnswerError(f"{done} of {size} bytes arrived")  # noqa: TRY301  (as any that breaks off)
            except (SafedistError, Abandoned):
                raise
            except Exception as error:
                _try_again(error, attempt, self.label, self._retry, self._watch)
            else:
                return

    def _opened(self, skip: int) -> Iterator[bytes]:
        """The object from its beginning, less ``skip`` bytes: a server without ranges starts anew."""
        stream = self._answer(lambda: self._fs.open(self._uri, "rb", block_size=0, cache_type="none"))
        try:
            while chunk := self._answer(lambda: stream.read(_LOCAL_CHUNK)):
                if fresh := chunk[skip:]:
                    yield fresh
                skip = max(skip - len(chunk), 0)
        except BaseException:
            Call(stream.close)  # nobody waits for it
            raise
        self._answer(stream.close)


def _validator(info: Mapping[str, Any]) -> str:
    told = {str(key).lower().replace("-", "").replace("_", ""): value for key, value in info.items()}
    return next((f"{key}={told[key]}" for key in _VALIDATORS if told.get(key)), "")


def _worth_trying_anonymously(refused: StagingError) -> bool:
    cause = refused.__cause__
    return cause is not None and judge(cause) is Outlook.DENIED
