"""The archive's bytes in order, from any store that flytekit reaches: every call bounded, every failure told, and tried
again until the time for staging is over."""

from __future__ import annotations

import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...errors import StagingError
from ...flyte.storage_errors import Outlook, judge
from .patience import Patience

T = TypeVar("T")

_BLOCK = 1 << 18
_RANGE = 4 << 20
_AHEAD = 3
"""Ranges asked for at once: enough to keep a store busy while one is unpacked, small enough to hold in memory."""

_VALIDATORS = {
    *("size", "etag", "generation", "md5hash", "contentmd5", "digest", "md5", "versionid", "lastmodified", "mtime"),
    *("updated", "modified"),
}
"""What stores call the things that change when an object does (s3fs, gcsfs, adlfs, http), in small letters and without
``-`` and ``_``."""


class Source(ABC):
    """One object.

    Attributes:
        patience: for all that is asked of it.
    """

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._before: object = None

    @abstractmethod
    def identity(self) -> object:
        """What changes when the object does. Raises SafedistError."""

    @abstractmethod
    def chunks(self) -> Iterator[bytes]:
        """Its bytes in order. Raises SafedistError."""

    def whole(self) -> Iterator[bytes]:
        """The bytes of one version of it, in order.

        Raises:
            SafedistError: it cannot be fetched, or has changed meanwhile.
        """
        self._before = self.identity()
        yield from self.chunks()
        if self.differs():
            raise self.changed()

    def differs(self) -> bool:
        """Whether it is another one now. Raises SafedistError."""
        return self.identity() != self._before

    def changed(self) -> StagingError:
        """The error for an object that is."""
        return StagingError(
            "The code archive changed while it was fetched",
            where={"uri": self.patience.label},
            hint="Flyte will retry; do not overwrite archives of running executions",
        )


def open_source(uri: str, patience: Patience, aside: Path) -> Source:
    """The source for ``uri``: a path, ``file://``, or whatever flytekit and fsspec know.

    Args:
        aside: where a private file may be made, for what cannot be fetched in ranges.

    Raises:
        MissingDependencyError: nothing installed here reaches such a store.
    """
    path = uri.removeprefix("file://")
    return ObjectSource(uri, patience, aside) if "://" in path else FileSource(path, patience)


class FileSource(Source):
    """An archive in a file; read where it is."""

    def __init__(self, path: str, patience: Patience) -> None:
        super().__init__(patience)
        self._path = path

    def identity(self) -> object:
        """What changes when the file does."""
        found = self.patience.tried(lambda _: os.stat(self._path))  # noqa: PTH116
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def chunks(self) -> Iterator[bytes]:
        """Its bytes in order."""
        with self.patience.tried(lambda _: open(self._path, "rb", buffering=0)) as file:
            while chunk := self.patience.tried(lambda _: file.read(_BLOCK)):
                yield chunk


class ObjectSource(Source):
    """An archive in a store, reached as flytekit reaches it."""

    def __init__(self, uri: str, patience: Patience, aside: Path) -> None:
        super().__init__(patience)
        self._uri, self._aside = uri, aside
        self._fs = patience.tried(partial(self._filesystem, anonymous=False))
        self._info: Mapping[str, Any] = {}

    def identity(self) -> object:
        """What the store says of the object now."""
        try:
            self._info = self.patience.tried(self._ask)
        except StagingError as refused:
            # As flytekit does: a public bucket needs no credentials, and wrong ones may be refused where none are not.
            if refused.__cause__ is None or judge(refused.__cause__) is not Outlook.DENIED:
                raise
            try:
                self._fs = self._filesystem(self.patience.answer, anonymous=True)
                self._info = self._ask(self.patience.answer)
            except Exception:
                raise refused from None
        plain = {name.lower().replace("-", "").replace("_", ""): value for name, value in self._info.items()}
        return {name: plain[name] for name in sorted(plain.keys() & _VALIDATORS)}

    def chunks(self) -> Iterator[bytes]:
        """Ranges, a few ahead of the reader; where the store knows none, all of it first."""
        size = self._info.get("size")
        http = self._uri.startswith(("http://", "https://"))
        if size is None or not getattr(self._fs, "async_impl", False) or (http and not self._info.get("partial")):
            self.patience.tried(partial(self._whole, size))
            yield from FileSource(str(self._aside), self.patience).chunks()
            return
        size = int(size)
        starts = iter(range(0, size, _RANGE))
        asked = deque((start, self._range(start, size)) for start in itertools.islice(starts, _AHEAD))
        try:
            while asked:
                start, first = asked.popleft()
                asked += ((later, self._range(later, size)) for later in itertools.islice(starts, 1))
                calls = itertools.chain([first], (self._range(start, size) for _ in itertools.count()))
                yield self.patience.tried(partial(self._arrived, calls, min(_RANGE, size - start)))
                have = min(start + _RANGE, size)
                self.patience.tell(lambda seconds: _progress(have, size, seconds))  # noqa: B023
        finally:
            for _, call in asked:
                call.cancel()

    def _filesystem(self, limit: float, *, anonymous: bool) -> Any:
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
            return self.patience.result(_in_thread(make), limit)
        except KeyError as error:  # of flytekit's or fsspec's table
            raise ValueError(f"no file system for {self.patience.label}") from error

    def _begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the file system; its own loop can end it, a thread can only be left behind."""
        if getattr(self._fs, "async_impl", False):
            import asyncio

            call = getattr(self._fs, f"_{method}")(self._uri, *args, **kwargs)
            return asyncio.run_coroutine_threadsafe(call, self._fs.loop)
        return _in_thread(partial(getattr(self._fs, method), self._uri, *args, **kwargs))

    def _ask(self, limit: float) -> Mapping[str, Any]:
        self._fs.invalidate_cache()  # a listing from before an object changed would hide the change
        info: Mapping[str, Any] = self.patience.result(self._begin("info"), limit)
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{self.patience.label} is a directory")
        return info

    def _range(self, start: int, size: int) -> Future[bytes]:
        return self._begin("cat_file", start=start, end=min(start + _RANGE, size))

    def _arrived(self, calls: Iterator[Future[bytes]], length: int, limit: float) -> bytes:
        data = self.patience.result(next(calls), limit)
        if len(data) != length:
            if self.differs():
                raise self.changed()
            raise ConnectionError(f"{len(data)} of {length} bytes arrived")
        return data

    def _whole(self, size: int | None, limit: float) -> None:
        def grown() -> int:
            with suppress(FileNotFoundError):
                have = self._aside.stat().st_size
                self.patience.tell(lambda seconds: _progress(have, size, seconds))
                return have
            return 0

        self._aside.unlink(missing_ok=True)
        self.patience.result(self._begin("get_file", str(self._aside)), limit, grown)
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


def _progress(done: int, size: int | None, seconds: float) -> str:
    of = f" of {size / 1e6:.1f} MB ({100 * done // max(size, 1)}%)" if size is not None else " MB"
    return f"{done / 1e6:.1f}{of}, {done / 1e6 / max(seconds, 1e-6):.1f} MB/s, {seconds:.0f} s"
