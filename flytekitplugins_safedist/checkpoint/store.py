"""Where saves are kept: a directory that the nodes share, or any address that fsspec reaches, by the same few calls.

On a file system what is written is made durable (fsync), and a small object appears by one rename; in an object store
an object appears when it is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from ..errors import CheckpointError, FsTimeoutError, PathBlockedError
from ..flyte.storage_errors import Outlook, Retry, judge, one_line
from ..fs import atomic_write, ensure_dir, wait_for
from ..fs.atomic import fsync_dir
from ..fs.paths import refresh

crc32: Callable[..., int] = zlib.crc32
with contextlib.suppress(ImportError):  # not on every machine
    from isal import isal_zlib

    crc32 = isal_zlib.crc32  # of 1 GB in 0.02 s; zlib takes 0.3 s

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""How long one request to a store is tried again while its error may pass."""

_AT_ONCE_BYTES = 64 << 20

LATE_SECONDS = 30.0
"""How long a file system may take to show one node what another has made."""


class Written:
    """A file that is written in order, with the CRC-32 of what came since the last :meth:`begin`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = self.crc = 0

    def begin(self) -> None:
        """The next item begins here."""
        self.crc = 0

    def write(self, data: Any) -> int:
        """As a file's."""
        view = memoryview(data).cast("B")
        self.crc = crc32(view, self.crc)
        self._file.write(view)
        self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()


class Store:
    """A place; names are relative to it, with "/" between.

    Args:
        url: a path or an address; credentials are as flytekit has them.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import strip_protocol
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        self._fs = _filesystem(url)
        self._root = strip_protocol(self.url)
        self._on_disk = isinstance(self._fs, LocalFileSystem)

    def saves(self) -> dict[str, set[str]]:
        """What is in the place: by the name of each directory, what is in it.

        By listing alone: a file system may remember for a minute that a file, asked for by its name, is not there.
        """
        found: dict[str, set[str]] = {}
        for path in self._list(self._root):
            name = path.rstrip("/").rpartition("/")[2]
            if name.startswith("step-"):
                found[name] = {inner.rpartition("/")[2] for inner in self._list(path)}
        return found

    def make(self, save: str) -> None:
        """Make room for a save: a directory, where the store has such."""
        if self._on_disk:
            ensure_dir(self._path(save))

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Written]:
        """A new file, written in one go; durable and visible when the block ends without an error."""
        self._fs.invalidate_cache()
        with self._fs.open(self._path(name), "wb") as file:
            yield Written(file)
            file.flush()
            if self._on_disk:
                os.fsync(file.fileno())

    def seal(self, name: str) -> None:
        """Make the names durable of what is in a directory of the place."""
        for path in (self._path(name), self._root) if self._on_disk else ():
            fsync_dir(Path(path))

    def put(self, name: str, data: bytes) -> None:
        """Leave or replace a small object, whole and durable."""
        if not self._on_disk:
            self._patiently(lambda: self._fs.pipe_file(self._path(name), data), f"put {name}")
            return
        path = Path(self._path(name))
        ensure_dir(path.parent)
        with atomic_write(path) as file:
            file.write(data)

    def get(self, name: str) -> bytes | None:
        """A small object, or None where there is none."""
        return self._twice(lambda: bytes(self._fs.cat_file(self._path(name))), self._path(name), f"get {name}")

    def read(self, name: str, size: int, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Parts of a file that is known to be there, with its size, by offset and length; nothing else of it is read.

        Raises:
            FileNotFoundError: it is not there, or not of that size.
        """
        path = self._path(name)
        if self._on_disk:
            try:
                wait_for(path, size=size, timeout=LATE_SECONDS)
            except (FsTimeoutError, PathBlockedError) as error:
                raise FileNotFoundError(f"{path}: {error}") from error
        found = self._unless_missing(lambda: self._fs.size(path), f"look at {name}")
        if found != size:
            raise FileNotFoundError(f"{path} is not there with {size} bytes")
        for batch in _batches(ranges, 0 if self._on_disk else _AT_ONCE_BYTES):
            paths, begins, ends = zip(*((path, offset, offset + length) for offset, length in batch), strict=True)
            read = partial(self._fs.cat_ranges, list(paths), list(begins), list(ends), on_error="raise")
            data = self._unless_missing(read, f"read {name}")
            if data is None:
                raise FileNotFoundError(f"{path} is not there any more")
            yield from data

    def remove(self, name: str) -> None:
        """Remove an object, or a save with all that is in it; what is gone already is no error."""
        self._unless_missing(lambda: self._fs.rm(self._path(name), recursive=True) or True, f"remove {name}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _list(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        found = self._twice(lambda: self._fs.ls(path, detail=False), path, f"list {path}")
        return [str(one) for one in found or [] if str(one).rstrip("/") != path.rstrip("/")]

    def _twice(self, ask: Callable[[], T], path: str, what: str) -> T | None:
        found = self._unless_missing(ask, what)
        if found is None and self._on_disk:  # or this client only remembers so
            refresh(path)
            found = self._unless_missing(ask, what)
        return found

    def _unless_missing(self, ask: Callable[[], T], what: str) -> T | None:
        try:
            return self._patiently(ask, what)
        except Exception as error:
            if isinstance(error, NotADirectoryError) or judge(error) is Outlook.MISSING:
                return None
            raise CheckpointError(
                f"the store did not {what}",
                where={"store": self.url},
                seen=one_line(error),
                hint="see whether the store answers, and whether the task's credentials may do this",
            ) from error

    def _patiently(self, action: Callable[[], T], what: str) -> T:
        retry = Retry(PATIENCE_SECONDS, first=0.5, longest=15.0)
        while True:
            try:
                return action()
            except Exception as error:
                pause = None if self._on_disk else retry.pause(error)
                if pause is None:
                    raise
                logger.info(f"{self.url}: {what} failed: {one_line(error)}; trying again in {pause:.1f} s")
            time.sleep(pause)


def _batches(ranges: Iterable[tuple[int, int]], at_once: int) -> Iterator[list[tuple[int, int]]]:
    """What is asked of a store at once: it answers side by side, and all answers are in memory together.

    Args:
        ranges: offsets and lengths.
        at_once: bytes from which on no further range is added.
    """
    batch: list[tuple[int, int]] = []
    for one in ranges:
        batch.append(one)
        if sum(length for _, length in batch) >= at_once:
            yield batch
            batch = []
    if batch:
        yield batch


def _filesystem(url: str) -> Any:
    from flytekit.core.context_manager import FlyteContextManager

    try:
        return FlyteContextManager.current_context().file_access.get_filesystem_for_path(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            "nothing installed here reaches this store",
            where={"store": url},
            seen=str(error),
            hint="install its fsspec package in the image (s3fs, gcsfs, adlfs)",
        ) from error
