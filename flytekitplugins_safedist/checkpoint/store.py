"""Where saves are kept: a directory that the nodes share, or any address that fsspec reaches, by the same few calls.

On a file system what is written is made durable (fsync), and a small object appears by one rename; in an object store
an object appears when it is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from ..errors import CheckpointError, FsTimeoutError, PathBlockedError
from ..failures import Outlook, outlook
from ..fs import atomic_write, ensure_dir, wait_for
from ..fs.atomic import fsync_dir
from ..fs.oserrors import Backoff, explain
from ..fs.paths import refresh
from ..store.errors import one_line
from ..store.patience import Retry

crc32: Callable[..., int] = zlib.crc32
with contextlib.suppress(ImportError):  # not on every machine
    from isal import isal_zlib

    crc32 = isal_zlib.crc32  # of 1 GB in 0.02 s; zlib takes 0.3 s

logger = logging.getLogger(__name__)

Range = tuple[str, int, int]
"""Of a save: the name of a file in it, an offset, a length."""

PATIENCE_SECONDS = 120.0
"""How long one request to a store is tried again while its error may pass."""

LATE_SECONDS = 30.0
"""How long a file system may take to show one node what another has made."""

_AT_ONCE_BYTES = 64 << 20
_SLICE_BYTES = 32 << 20
"""Of a large tensor, handed on at once: what writes to an object store keeps several times as much in memory."""


class Written:
    """A file that is written in order, with the CRC-32 of what came since the last :meth:`begin`.

    Attributes:
        size: bytes so far.
        failure: the first error of the file system, of which torch.save makes another one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = self.crc = 0
        self.failure: Exception | None = None
        self.flush = file.flush

    def begin(self) -> int:
        """The next item begins here."""
        self.crc = 0
        return self.size

    def write(self, data: Any) -> int:
        """As a file's."""
        view = memoryview(data).cast("B")
        self.crc = crc32(view, self.crc)
        try:
            for at in range(0, view.nbytes, _SLICE_BYTES):
                self._file.write(view[at : at + _SLICE_BYTES])
        except Exception as error:
            self.failure = self.failure or error
            raise
        self.size += view.nbytes
        return view.nbytes


class Store:
    """A place; names are relative to it, with "/" between.

    Args:
        url: a path or an address; credentials are as flytekit has them.

    Raises:
        CheckpointError: nothing that is installed here reaches it.
    """

    def __init__(self, url: str) -> None:
        from flytekit.core.context_manager import FlyteContextManager
        from fsspec.core import strip_protocol
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/") or url
        try:
            self._fs: Any = FlyteContextManager.current_context().file_access.get_filesystem_for_path(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                "nothing installed here reaches this store",
                where={"store": url},
                seen=str(error),
                hint="install its fsspec package in the image (s3fs, gcsfs, adlfs)",
            ) from error
        self._root = strip_protocol(self.url)
        self._on_disk = isinstance(self._fs, LocalFileSystem)

    def saves(self) -> dict[str, set[str]]:
        """What is in the place: by the name of each directory of a save, what is in it.

        By listing alone: a file system may remember for a minute that a file, asked for by its name, is not there.
        """
        return {name: {*self._list(name)} for name in self._list("") if name.startswith("step-")}

    def make(self, save: str) -> None:
        """Make room for a save: a directory, where the store has such."""
        if self._on_disk:
            fsync_dir(ensure_dir(self._path(save)).parent)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Written]:
        """A new file, written in one go; durable and visible when the block ends without an error, and not before."""
        self._fs.invalidate_cache()
        path = self._path(name)
        with atomic_write(path) if self._on_disk else self._fs.open(path, "wb") as file:
            written = Written(file)
            try:
                yield written
            except Exception as error:
                raise written.failure or error from None

    def withdraw(self, save: str, part: str) -> None:
        """Remove what one rank has written of a save that has failed; nothing else of it, where others see it."""
        self.remove(f"{save}/{part}")
        if self._on_disk:
            with contextlib.suppress(OSError):  # the others have theirs in it
                Path(self._path(save)).rmdir()

    def put(self, name: str, data: bytes) -> None:
        """Leave or replace a small object, whole and durable."""
        path = self._path(name)
        if self._on_disk:
            with atomic_write(ensure_dir(Path(path).parent) / Path(path).name) as file:
                file.write(data)
        elif self._ask("put", path, lambda: self._fs.pipe_file(path, data) or True) is None:
            raise CheckpointError("the place for checkpoints is not there", where={"store": self.url})

    def get(self, name: str) -> bytes | None:
        """A small object, or None where there is none."""
        path = self._path(name)
        if self._on_disk:
            refresh(path)  # or this client may only remember that it is not there
        data: bytes | None = self._ask("get", path, lambda: bytes(self._fs.cat_file(path)))
        return data

    def read(self, save: str, sizes: Mapping[str, int], ranges: Sequence[Range]) -> Iterator[bytes]:
        """Parts of files that are known to be there; nothing else of them is read.

        Args:
            save: its directory.
            sizes: of the files, in bytes.
            ranges: what to read, file by file.

        Raises:
            FileNotFoundError: a file is not there, or not of that size.
            FsError: it cannot be read.
        """
        if not self._on_disk:
            there = self._list(save)
            for batch in _batches(ranges):
                if missing := [name for name, _, _ in batch if there.get(name) != sizes[name]]:
                    raise FileNotFoundError(f"{save}/{missing[0]} is not there with {sizes[missing[0]]} bytes")
                paths = [self._path(f"{save}/{name}") for name, _, _ in batch]
                begins, ends = [at for _, at, _ in batch], [at + length for _, at, length in batch]
                read = partial(self._fs.cat_ranges, paths, begins, ends, on_error="raise")
                yield from _found(save, self._ask("read", save, read))
            return
        for name, some in itertools.groupby(ranges, lambda each: each[0]):
            path = self._path(f"{save}/{name}")
            try:
                wait_for(path, size=sizes[name], timeout=LATE_SECONDS)
            except (FsTimeoutError, PathBlockedError) as error:
                raise FileNotFoundError(f"{path} is not there with {sizes[name]} bytes") from error
            for batch in _batches([*some]):
                yield from _found(save, self._ask("read", path, partial(_parts_of, path, batch)))

    def remove(self, name: str) -> None:
        """Remove a file, or a save with all that is in it; what is gone already is no error."""
        path = Path(self._path(name))
        if self._on_disk:
            with contextlib.suppress(NotADirectoryError):  # a file is where the place should be: nothing is below it
                shutil.rmtree(path, onerror=_unless_gone) if path.is_dir() else path.unlink(missing_ok=True)
            return
        for each in [f"{name}/{inner}" for inner in self._list(name)] or [name]:  # rm() takes "[" for a pattern
            self._ask("remove", each, partial(self._fs.rm_file, self._path(each)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") or "/"

    def _list(self, name: str) -> dict[str, int]:
        """Names of what is in a directory; of objects with their sizes."""
        self._fs.invalidate_cache()
        path = self._path(name)
        if self._on_disk:  # names alone: fsspec of 2023 has nothing of a directory from which something goes meanwhile
            refresh(path)
            return dict.fromkeys(self._ask("list", path, lambda: [each.name for each in Path(path).iterdir()]) or [], 0)
        entries = self._ask("list", path, lambda: self._fs.ls(path, detail=True)) or []
        sizes = {str(entry["name"]).rstrip("/"): int(entry.get("size") or 0) for entry in entries}
        return {at.rpartition("/")[2]: size for at, size in sizes.items() if at != path}

    def _ask(self, what: str, path: str, action: Callable[[], Any]) -> Any:
        """What the store answers, asked again while its error may pass; None where nothing is there, as it says twice:
        by one wrong word training would begin anew, and remove what there is."""
        retry, of_disk = Retry(PATIENCE_SECONDS, first=0.5, longest=15.0), Backoff()
        is_missing = False
        while True:
            try:
                return action()
            except Exception as error:
                if isinstance(error, NotADirectoryError) or outlook(error) is Outlook.MISSING:
                    if is_missing:
                        return None
                    is_missing = True
                    continue
                if self._on_disk:
                    if not isinstance(error, OSError):
                        raise
                    if of_disk.allows(error):
                        continue
                    raise explain(error, path, f"{what} it") from error
                pause = retry.pause(error)
                if pause is None:
                    raise CheckpointError(
                        f"the store did not {what} {path}",
                        where={"store": self.url},
                        seen=one_line(error),
                        hint="see whether the store answers, and whether the task's credentials may do this",
                    ) from error
                logger.info(f"{self.url}: {what} {path} failed: {one_line(error)}; trying again in {pause:.1f} s")
            time.sleep(pause)


def _parts_of(path: str, ranges: Sequence[Range]) -> list[bytes]:
    """Opened once for all of them: a file system of many nodes may take as long to open a file as to read a tensor."""
    parts = []
    with Path(path).open("rb") as file:
        for _, at, length in ranges:
            file.seek(at)
            parts.append(file.read(length))
    return parts


def _found(save: str, data: Any) -> Any:
    if data is None:
        raise FileNotFoundError(f"{save} is being removed")
    return data


def _unless_gone(_work: object, _path: str, error: tuple[Any, BaseException, Any]) -> None:
    """Another rank may remove the same."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _batches(ranges: Sequence[Range]) -> list[list[Range]]:
    """What is asked of a store at once: it answers side by side, and all answers are in memory together."""
    ends = itertools.accumulate(length for *_, length in ranges)
    batches = itertools.groupby(zip(ranges, ends, strict=True), lambda each: each[1] // _AT_ONCE_BYTES)
    return [[each for each, _ in batch] for _, batch in batches]
