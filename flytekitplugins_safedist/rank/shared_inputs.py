"""A task's inputs that are fetched from the store once per node: by the rank that needs one first, for all of them.

Each rank then has names of its own for the same files: a download of its own would hold the same bytes again. What is
whole has its name by one rename, so nobody takes a part for the whole, and a rank that is killed as it fetches leaves
its draft in its own scratch, which goes with its round. The lock only saves work, and the kernel drops it with its
holder.

One file in all ranks must stay as it was fetched. It is read-only, which does not stop a process that runs as root: so
its size and time of change are noted with it, and compared before a rank gets it and when a rank has done its work.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from fsspec.callbacks import Callback

from ..errors import PayloadError
from ..fs.atomic import discard
from ..store.patience import in_thread
from ..store.transfers import Transfer, Transfers
from ..texts import human, public

logger = logging.getLogger(__name__)

_CONTENT, _AS_FETCHED, _AMOUNT = "content", "as_fetched.json", "amount.json"


def amount(directory: Path) -> tuple[int, int]:
    """How many files, and bytes, the ranks of a node have downloaded there for all of them."""
    of_each = [json.loads(entry.read_text()) for entry in directory.glob(f"*/{_AMOUNT}")]
    return sum(files for files, _ in of_each), sum(size for _, size in of_each)


class SharedInputs:
    """What one rank of a node fetches for all, as each of them has it.

    Args:
        directory: of the node.
        own: the rank's own directory, on the same file system.
        waiting: entered for as long as another rank downloads what this one waits for.

    Attributes:
        sandbox: what is to be downloaded to a place below this is an input.
    """

    def __init__(self, directory: Path, own: Path, waiting: Callable[[], AbstractContextManager[object]]) -> None:
        self.sandbox = own / "inputs"
        self._directory, self._own, self._waiting = directory, own, waiting

    def has(self, place: str) -> bool:
        """Whether an input is to be downloaded there."""
        return Path(place).is_relative_to(self.sandbox)

    async def bring(self, address: str, to: str, fetch: Callable[[str], Awaitable[Any]], *, is_directory: bool) -> None:
        """Have an input at a place of this rank's own; return when all of it is there.

        Args:
            address: of the input in the store. What was fetched from there once is not looked at again: inputs of a
                task do not change.
            to: the path.
            fetch: downloads it to a path.
            is_directory: whether that is one.

        Raises:
            PayloadError: it is there, and a rank has changed it.
            Exception: what ``fetch`` raises. The next rank that comes tries for itself.
        """
        key = hashlib.sha256(os.fsencode(f"{'directory' if is_directory else 'file'} {address}")).hexdigest()
        entry = self._directory / key
        async with _alone(self._directory / f"{key}.lock", self._waiting):
            if not entry.exists():
                await self._fetch(address, entry, fetch, is_directory=is_directory)
        await asyncio.wrap_future(in_thread(partial(_see_it_unchanged, entry)))
        await asyncio.wrap_future(in_thread(partial(_give_names, entry / _CONTENT, Path(to))))

    def see_all_unchanged(self) -> None:
        """Compare everything that ranks of this node share with what was fetched.

        Raises:
            PayloadError: a rank has changed it: what others have read since is not their input.
        """
        for facts in sorted(self._directory.glob(f"*/{_AS_FETCHED}")):
            _see_it_unchanged(facts.parent)

    async def _fetch(
        self, address: str, entry: Path, fetch: Callable[[str], Awaitable[Any]], *, is_directory: bool
    ) -> None:
        began = time.monotonic()
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=self._own))
        content = draft / _CONTENT
        try:
            if is_directory:
                content.mkdir()
            await fetch(str(content))
            files, size = await asyncio.wrap_future(in_thread(partial(_protect, draft, address)))
            _publish(draft, entry)
        finally:
            discard(draft)  # where it has no other name
        seconds = time.monotonic() - began
        what = f"{public(address)}, {files} file{'s' * (files != 1)}, {human(size)}"
        logger.info(f"{what}, fetched in {seconds:.1f} s for all ranks of this node")


class RankTransfers(Transfers):
    """How a rank moves data to and from the store.

    Args:
        seconds, tells: as of all.

    Attributes:
        inputs: what the ranks of the node share; None: each downloads for itself.
    """

    inputs: SharedInputs | None = None

    async def download(
        self, address: str, to: str, once: Callable[[str, Callback], Awaitable[Any]], *, is_directory: bool
    ) -> Any:
        """As every download; an input may be what another rank of the node has downloaded.

        Args:
            address: what is downloaded.
            to: where.
            once: downloads it to a path, and tells how far it is.
            is_directory: whether it is one, and not a file.
        """
        if self.inputs is None or not self.inputs.has(to):
            return await super().download(address, to, once, is_directory=is_directory)
        transfer = Transfer(f"download of {public(address)}")  # whichever rank it is, it is the only one that knows
        await self.inputs.bring(address, to, lambda path: once(path, transfer), is_directory=is_directory)
        return to


def _publish(draft: Path, entry: Path) -> None:
    try:
        draft.rename(entry)
    except OSError:
        if not entry.exists():  # else another rank was first, where locks do nothing
            raise


@asynccontextmanager
async def _alone(path: Path, waiting: Callable[[], AbstractContextManager[object]]) -> AsyncIterator[None]:
    """Inside, no other process of the node is, nor another thread of this one."""
    file = await asyncio.wrap_future(in_thread(partial(_lock, path, waiting)))
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # children that were forked meanwhile have it open as well
        file.close()


def _lock(path: Path, waiting: Callable[[], AbstractContextManager[object]]) -> IO[bytes]:
    file = path.open("ab")
    # Many a file system has no locks, and says so by as many numbers; nothing is right because of one.
    with suppress(OSError), waiting():
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _files(content: Path) -> Iterator[Path]:
    """The files of an input: itself, or what is below it."""
    if not content.is_dir():
        yield content
    for parent, _, names in os.walk(content):
        yield from (Path(parent, name) for name in names)


def _protect(entry: Path, address: str) -> tuple[int, int]:
    """Make all files read-only, as they are to have several names, and note what they are; how many there are, and
    their bytes."""
    content, facts = entry / _CONTENT, {}
    for file in _files(content):
        found = file.stat()
        file.chmod(found.st_mode & 0o555)
        facts[str(file.relative_to(content))] = [found.st_size, found.st_mtime_ns]
    (entry / _AS_FETCHED).write_text(json.dumps({"address": public(address), "files": facts}))
    files, size = len(facts), sum(size for size, _ in facts.values())
    (entry / _AMOUNT).write_text(json.dumps([files, size]))
    return files, size


def _see_it_unchanged(entry: Path) -> None:
    noted, content = json.loads((entry / _AS_FETCHED).read_text()), entry / _CONTENT
    for name, was in noted["files"].items():
        found = (content / name).stat()
        if [found.st_size, found.st_mtime_ns] != was:
            raise PayloadError(
                "a rank has changed a file of an input in place, which all ranks of its node share",
                where={"input": noted["address"], "file": name},
                seen=f"{found.st_size} bytes, changed at {found.st_mtime_ns / 1e9:.3f}",
                expected=f"{was[0]} bytes, as fetched",
                hint="copy a file before you write to it (shutil.copyfile); or have each rank fetch its own: "
                "Scratch(share_inputs=False)",
            )


def _give_names(content: Path, to: Path) -> None:
    for parent, names, _ in os.walk(content):
        for name in ("", *names):
            (to / Path(parent, name).relative_to(content)).mkdir(parents=True, exist_ok=True)
    for file in _files(content):
        own = to / file.relative_to(content)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        try:
            os.link(file, own)
        except OSError:  # no hard links there, or too many: then a copy on the same disk
            shutil.copyfile(file, own)
