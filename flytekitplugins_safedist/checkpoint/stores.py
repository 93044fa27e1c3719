"""Where saves are kept: a directory of a file system, or any object store that fsspec reaches.

Both keep the same promise: what ``put_new`` has left is whole, and it was not there before. On file systems by a
temporary name, fsync and link(2) (:mod:`..flyte.put_new`); on object stores because an object appears when it is whole,
and by a conditional put where the store has one (S3: ``If-None-Match: *``; GCS: ``ifGenerationMatch=0``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from ..errors import CheckpointError, FsError, FsTimeoutError, PathBlockedError
from ..flyte.put_new import NoConditionError, put_new
from ..flyte.storage_errors import Outlook, judge, one_line
from ..fs import atomic_write, ensure_dir, wait_for
from ..fs.atomic import fsync_dir
from ..fs.calls import retry_os_call
from ..fs.waiting import refresh

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""How long one request to an object store is tried again while its error may pass."""

LATE_SECONDS = 30.0
"""How long a file system may take to show one node a part that another has made."""

Sink = IO[bytes]


class Store(Protocol):
    """A place for saves; names are relative to it, with "/" between."""

    url: str

    def names(self) -> list[str]:
        """What is at the top of the place; nothing where the place does not exist."""

    def make(self, save: str) -> None:
        """Make room for a save: a directory, where the store has such."""

    def part(self, name: str) -> contextlib.AbstractContextManager[Sink]:
        """A new part, written in one go; durable and visible when the block ends without an error."""

    def seal(self, save: str) -> None:
        """Bring the names of the parts to stable storage, before the manifest says that they are there."""

    def put_new(self, name: str, data: bytes) -> None:
        """Leave a small object that was not there, whole and durable.

        Raises:
            CheckpointError: another is there.
        """

    def put(self, name: str, data: bytes) -> None:
        """Leave or replace a small object, whole."""

    def get(self, name: str) -> bytes | None:
        """A small object, or None where there is none."""

    def read(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A part, to be read in one go.

        Raises:
            FileNotFoundError: it is not there.
        """

    def local(self, name: str) -> Path | None:
        """The part as a path, where the store is a file system."""

    def remove(self, name: str) -> None:
        """Remove an object, or a save with all that is in it; what is gone already is no error."""


def open_store(url: str) -> Store:
    """The store at a path, a ``file://`` address or any address that fsspec knows; credentials as flytekit has them."""
    if "://" not in url:
        return DirectoryStore(Path(url))
    if url.startswith("file://"):
        return DirectoryStore(Path(url.removeprefix("file://")))
    return ObjectStore(url)


class DirectoryStore:
    """A directory of a file system, perhaps one that many nodes share."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = str(self._root)

    def names(self) -> list[str]:
        def ask() -> list[str]:
            try:
                return sorted(entry.name for entry in self._root.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

        refresh(self._root)
        return retry_os_call(ask, self._root, "list the saves")

    def make(self, save: str) -> None:
        ensure_dir(self._root / save)

    @contextmanager
    def part(self, name: str) -> Iterator[Sink]:
        # No temporary name: nobody reads a part before the manifest that names it, and no two saves share one.
        with open(self._root / name, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def seal(self, save: str) -> None:
        fsync_dir(self._root / save)
        fsync_dir(self._root)

    def put_new(self, name: str, data: bytes) -> None:
        path = self._root / name
        ensure_dir(path.parent)
        try:
            made = retry_os_call(lambda: put_new(None, self._path(name), data), path, "commit the save")
        except NoConditionError:  # no hard links here. The save's name is random, so nobody else means this one
            made = not path.exists()
            if made:
                self.put(name, data)
        if not made:
            _expect_same(self, name, data)

    def _path(self, name: str) -> str:
        return str(self._root / name)

    def put(self, name: str, data: bytes) -> None:
        path = self._root / name
        ensure_dir(path.parent)
        with atomic_write(path) as file:
            file.write(data)

    def get(self, name: str) -> bytes | None:
        path = self._root / name

        def ask() -> bytes | None:
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

        found = retry_os_call(ask, path, "read it")
        if found is None:  # or this client only remembers so
            refresh(path)
            found = retry_os_call(ask, path, "read it")
        return found

    @contextmanager
    def read(self, name: str) -> Iterator[IO[bytes]]:
        path = self._root / name
        try:
            wait_for(path, kind="file", timeout=LATE_SECONDS)
        except (FsTimeoutError, PathBlockedError) as error:
            raise FileNotFoundError(str(path)) from error
        with open(path, "rb") as file:
            yield file

    def local(self, name: str) -> Path | None:
        return self._root / name

    def remove(self, name: str) -> None:
        path = self._root / name
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(FsError):
            # The manifest first, and for good: a crash must not bring it back without what it names.
            fsync_dir(path.parent)


class ObjectStore:
    """A prefix of an object store, reached through fsspec."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._found: tuple[int, Any] | None = None
        self._conditional = True

    @property
    def _fs(self) -> Any:
        # A forked child shares no connection with its parent.
        if self._found is None or self._found[0] != os.getpid():
            self._found = (os.getpid(), _filesystem(self.url))
        return self._found[1]

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        def ask() -> list[str]:
            self._fs.invalidate_cache()
            return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in self._fs.ls(self.url, detail=False)]

        found: list[str] = self._unless_missing(ask, [], "list")
        return sorted(found)

    def make(self, save: str) -> None:
        """Nothing: an object store has no directories."""

    @contextmanager
    def part(self, name: str) -> Iterator[Sink]:
        file = self._fs.open(self._path(name), "wb")
        try:
            yield file
        except BaseException:
            # Not closed: that would make an object of the half. The upload is given up where the store can.
            with contextlib.suppress(Exception):
                file.discard()
            raise
        file.close()

    def seal(self, save: str) -> None:
        """Nothing: an object that was closed without an error is durable."""

    def put_new(self, name: str, data: bytes) -> None:
        def once() -> bool:
            if self._conditional:
                return put_new(self._fs, self._path(name), data)
            self._fs.pipe_file(self._path(name), data)
            return True

        try:
            if not self._patiently(once, f"put {name}"):
                _expect_same(self, name, data)
        except NoConditionError as error:
            self._no_condition(name, data, str(error))

    def _no_condition(self, name: str, data: bytes, why: str) -> None:
        logger.info(f"{self.url}: from now on objects are put without a condition: {why}")
        self._conditional = False
        self.put_new(name, data)

    def put(self, name: str, data: bytes) -> None:
        self._patiently(lambda: self._fs.pipe_file(self._path(name), data), f"put {name}")

    def get(self, name: str) -> bytes | None:
        def ask() -> bytes:
            data: bytes = self._fs.cat_file(self._path(name))
            return data

        return self._unless_missing(ask, None, f"get {name}")

    @contextmanager
    def read(self, name: str) -> Iterator[IO[bytes]]:
        found = self._unless_missing(lambda: self._fs.open(self._path(name), "rb"), None, f"open {name}")
        if found is None:
            raise FileNotFoundError(self._path(name))
        with found as file:
            yield file

    def local(self, name: str) -> Path | None:
        return None

    def remove(self, name: str) -> None:
        self._unless_missing(lambda: self._fs.rm(self._path(name), recursive=True), None, f"remove {name}")

    def _unless_missing(self, ask: Callable[[], T], otherwise: T, what: str) -> T:
        try:
            return self._patiently(ask, what)
        except Exception as error:
            if judge(error) is Outlook.MISSING:
                return otherwise
            raise CheckpointError(
                f"the store did not {what}",
                where={"store": self.url},
                seen=one_line(error),
                hint="see whether the store answers, and whether the task's credentials may do this",
            ) from error

    def _patiently(self, action: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = 0.5
        while True:
            try:
                return action()
            except Exception as error:
                if (
                    isinstance(error, NoConditionError)
                    or judge(error) is not Outlook.TRANSIENT
                    or time.monotonic() > deadline
                ):
                    raise
                logger.info(f"{self.url}: {what} failed: {one_line(error)}; trying again in {pause:.1f} s")
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, 15.0)


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


def _expect_same(store: Store, name: str, data: bytes) -> None:
    """An earlier try of ours may have got through and its reply not: then what is there is ours."""
    if store.get(name) != data:
        raise CheckpointError(
            "another writer has committed under this name",
            where={"object": f"{store.url}/{name}"},
            hint="see whether two jobs save at one place",
        )
