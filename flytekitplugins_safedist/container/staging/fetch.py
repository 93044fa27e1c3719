"""The archive's bytes in order, from any store that flytekit reaches: every call bounded, every failure told, and tried
again until the time for staging is over."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CodeNotFoundError, MissingDependencyError, SafedistError, StagingError
from ...flyte.storage_errors import Outlook, Retry, judge, one_line
from ...texts import how_far

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCK = 1 << 18
_RANGE = 4 << 20
_AHEAD = 3
"""Ranges asked for at once: enough to keep a store busy while one is unpacked, small enough to hold in memory."""

_LOOK, _TELL, _LONGEST_PAUSE = 0.2, 10.0, 15.0
"""Seconds between two looks at a call, between two lines about it, and of the longest pause between two tries."""

_DOWN = 300.0
"""Seconds for which one call may do nothing but fail: a pod that is replaced may come to a healthier node."""

_VALIDATORS = {
    *("size", "etag", "generation", "md5hash", "contentmd5", "digest", "md5", "versionid", "lastmodified", "mtime"),
    *("updated", "modified", "ino", "ctime"),
}
"""What stores call the things that change when an object does (s3fs, gcsfs, adlfs, http, files), in small letters and
without ``-`` and ``_``."""


class Patience:
    """One staging's time: how long a call may take, when it is tried again, and what people are told meanwhile.

    Args:
        label: the archive, for messages.
        seconds: for all of it.
        answer: seconds that the first try of a call may take without an answer; the n-th may take n times as long.
        pause: seconds before the second try; doubled for each further one, and jittered.
    """

    def __init__(self, label: str, seconds: float, answer: float, pause: float) -> None:
        self.label = label
        self._seconds, self._answer, self._pause = seconds, answer, pause
        self._limit = answer
        self._began = self._told = time.monotonic()

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(self._began + self._seconds - time.monotonic(), 0.0)

    def end_within(self, seconds: float) -> None:
        """Wait no longer than that for anything that is still asked."""
        self._seconds = min(self._seconds, time.monotonic() - self._began + seconds)

    def tell(self, text: Callable[[float], str]) -> None:
        """Say a line, given the seconds since the beginning, if the last one was some time ago."""
        now = time.monotonic()
        if now - self._told >= _TELL:
            self._told = now
            logger.info(f"code: {text(now - self._began)}")

    def result(self, asked: Future[T], grown: Callable[[], int] = int) -> T:
        """What a call brings; it is cancelled where that, or the next change of ``grown()``, takes too long.

        Raises:
            TimeoutError: it did.
        """
        size, since = grown(), time.monotonic()
        try:
            while not wait([asked], min(_LOOK, self._limit, self.remaining())).done:
                now = time.monotonic()
                if size != (size := grown()):
                    since = now
                if now - since >= self._limit or not self.remaining():
                    raise TimeoutError(f"no answer within {now - since:.3g} s")
                waited = now - since
                self.tell(lambda _: f"waiting for {self.label}: no answer for {waited:.0f} s")  # noqa: B023
            return asked.result()
        finally:
            asked.cancel()

    def tried(self, action: Callable[[], T]) -> T:
        """What ``action`` returns; again as long as it fails by something that may pass.

        Raises:
            SafedistError: it did not pass.
        """
        retry = Retry(_DOWN, first=self._pause, longest=_LONGEST_PAUSE)
        for attempt in itertools.count(1):
            self._limit = attempt * self._answer
            try:
                return action()
            except SafedistError:
                raise
            except Exception as error:
                pause = retry.pause(error)
                if pause is None or not self.remaining():
                    raise self._failed(error, attempt) from error
                seconds = min(pause, self.remaining())
                logger.info(
                    f"{self.label}: {one_line(error)}; trying again in {seconds:.1f} s (attempt {attempt} failed)"
                )
                time.sleep(seconds)
        raise AssertionError("unreachable: counting does not end")  # pragma: no cover

    def _failed(self, error: Exception, attempts: int) -> SafedistError:
        kind, what, hint = _MEANING[judge(error)]
        late = judge(error) is Outlook.TRANSIENT
        return kind(
            what,
            where={"uri": self.label, "host": os.uname().nodename},
            seen=f"{one_line(error)}, at attempt {attempts}" if late else one_line(error),
            expected=f"all of it within {self._seconds:g} s, an answer within {_DOWN:g} s" if late else None,
            hint=hint,
        )


_MEANING: Mapping[Outlook, tuple[type[SafedistError], str, str]] = {
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
    Outlook.TRANSIENT: (
        StagingError,
        "The task's code archive was not fetched in time",
        "check the store's health and the pod's network; Flyte will retry."
        " For an archive that takes longer, raise SAFEDIST_CODE_TIMEOUT (seconds)",
    ),
}


class Source:
    """One archive: a file, or an object in whatever store flytekit and fsspec know, reached as flytekit reaches it.

    Args:
        uri: a path, ``file://``, or an address.
        patience: for all that is asked of it.
        aside: where a private file may be made, for what cannot be fetched in ranges.

    Raises:
        MissingDependencyError: nothing installed here reaches such a store.
    """

    def __init__(self, uri: str, patience: Patience, aside: Path) -> None:
        self.patience = patience
        path = uri.removeprefix("file://")
        self._file = "" if "://" in path else path
        self._uri, self._aside = self._file or uri, aside
        self._fs: Any = None if self._file else patience.tried(partial(self._filesystem, anonymous=False))
        self._info: Mapping[str, Any] = {}
        self._before: object = None

    def whole(self) -> Iterator[bytes]:
        """The bytes of one version of it, in order.

        Raises:
            SafedistError: it cannot be fetched, or has changed meanwhile.
        """
        self._before = self._identity()
        yield from self._chunks()
        if self.differs():
            raise self.changed()

    def differs(self) -> bool:
        """Whether it is another one now. Raises SafedistError."""
        return self._identity() != self._before

    def changed(self) -> StagingError:
        """The error for an archive that is."""
        return StagingError(
            "The code archive changed while it was fetched",
            where={"uri": self.patience.label},
            hint="Flyte will retry; do not overwrite archives of running executions",
        )

    def _identity(self) -> object:
        """What changes when the archive does."""
        try:
            self._info = self.patience.tried(self._ask)
        except StagingError as refused:
            # As flytekit does: a public bucket needs no credentials, and wrong ones may be refused where none are not.
            if refused.__cause__ is None or judge(refused.__cause__) is not Outlook.DENIED:
                raise
            try:
                self._fs = self._filesystem(anonymous=True)
                self._info = self._ask()
            except Exception:
                raise refused from None
        plain = {name.lower().replace("-", "").replace("_", ""): value for name, value in self._info.items()}
        return {name: plain[name] for name in sorted(plain.keys() & _VALIDATORS)}

    def _filesystem(self, *, anonymous: bool) -> Any:
        """A client with the credentials flytekit is configured with. Making one may ask a server who we are."""
        from flytekit.core.context_manager import FlyteContextManager
        from fsspec.utils import get_protocol

        access, protocol = FlyteContextManager.current_context().file_access, get_protocol(self._uri)
        options: dict[str, Any] = {"anonymous": True} if anonymous else {}
        if protocol in ("http", "https"):
            # The bytes as they are stored: what a server calls Content-Encoding is the archive's own packing to us.
            options["client_kwargs"] = {"headers": {"Accept-Encoding": "identity"}, "auto_decompress": False}
        make = partial(access.get_filesystem, protocol, path=self._uri, **options)
        try:
            return self.patience.result(_in_thread(make))
        except KeyError as error:  # of flytekit's or fsspec's table
            raise ValueError(f"no file system for {self.patience.label}") from error

    def _begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the file system; its own loop can end it, a thread can only be left behind."""
        if getattr(self._fs, "async_impl", False):
            import asyncio

            call = getattr(self._fs, f"_{method}")(self._uri, *args, **kwargs)
            return asyncio.run_coroutine_threadsafe(call, self._fs.loop)
        return _in_thread(partial(getattr(self._fs, method), self._uri, *args, **kwargs))

    def _ask(self) -> Mapping[str, Any]:
        if self._file:
            found = os.stat(self._file)  # noqa: PTH116
            return {
                "size": found.st_size,
                "ino": found.st_ino,
                "mtime": found.st_mtime_ns,
                "ctime": found.st_ctime_ns,
            }
        self._fs.invalidate_cache()  # a listing from before an object changed would hide the change
        info: Mapping[str, Any] = self.patience.result(self._begin("info"))
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{self.patience.label} is a directory")
        return info

    def _chunks(self) -> Iterator[bytes]:
        """A file is read where it is; an object in ranges or, where the store knows none, all of it first."""
        size = self._info.get("size")
        http = self._uri.startswith(("http://", "https://"))
        if self._file:
            yield from self._read(self._file)
        elif size is None or not getattr(self._fs, "async_impl", False) or (http and not self._info.get("partial")):
            self.patience.tried(partial(self._whole, size))
            yield from self._read(str(self._aside))
        else:
            yield from self._ranges(int(size))

    def _read(self, path: str) -> Iterator[bytes]:
        with self.patience.tried(lambda: open(path, "rb", buffering=0)) as file:
            while chunk := self.patience.tried(lambda: file.read(_BLOCK)):
                yield chunk

    def _ranges(self, size: int) -> Iterator[bytes]:
        """A few ahead of the reader."""
        starts = iter(range(0, size, _RANGE))
        asked = deque((start, self._range(start, size)) for start in itertools.islice(starts, _AHEAD))
        try:
            while asked:
                start, first = asked.popleft()
                asked += ((later, self._range(later, size)) for later in itertools.islice(starts, 1))
                calls = itertools.chain([first], (self._range(start, size) for _ in itertools.count()))
                have = min(start + _RANGE, size)
                yield self.patience.tried(partial(self._arrived, calls, have - start))
                self.patience.tell(partial(how_far, have, size))
        finally:
            for _, call in asked:
                call.cancel()

    def _range(self, start: int, size: int) -> Future[bytes]:
        return self._begin("cat_file", start=start, end=min(start + _RANGE, size))

    def _arrived(self, calls: Iterator[Future[bytes]], length: int) -> bytes:
        data = self.patience.result(next(calls))
        if len(data) != length:
            if self.differs():
                raise self.changed()
            raise ConnectionError(f"{len(data)} of {length} bytes arrived")
        return data

    def _whole(self, size: int | None) -> None:
        def grown() -> int:
            with suppress(FileNotFoundError):
                have = self._aside.stat().st_size
                self.patience.tell(partial(how_far, have, size))
                return have
            return 0

        self._aside.unlink(missing_ok=True)
        self.patience.result(self._begin("get_file", str(self._aside)), grown)
        if size is not None and (have := grown()) != size:
            raise ConnectionError(f"{have} of {size} bytes arrived")


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call that nothing can end in a thread that nobody needs to wait for, not even the interpreter's end."""
    made: Future[T] = Future()

    def work() -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                made.set_result(call())
            except BaseException as error:  # whatever it is, it belongs to whoever waits
                made.set_exception(error)

    threading.Thread(target=work, name="safedist-fetch", daemon=True).start()
    return made
