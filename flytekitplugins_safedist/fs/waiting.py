"""``wait_for``: until a path is there for the caller, as seen by a client that looks again in earnest.

Network clients remember what they did *not* find: for up to a minute NFS (acdirmax, nfs(5)) and parallel file systems
answer "no such file" without asking the server. Opening the parent directory makes them ask again.
"""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from ..errors import FsError, FsTimeoutError, PathBlockedError
from . import mount_info
from .calls import AGAIN, FAILED, STALE, explain
from .context import current_identity, timeout_s, who

Kind = Literal["any", "file", "dir"]

LOOKS_PER_S = 200
"""In the long run all ranks of a job together look at one path no more often than this, however many they are."""


def pauses(world_size: int) -> Iterator[float]:
    """Seconds to pause between looks: from milliseconds up to a bound that grows with the number of ranks. Jittered.

    Steady state: ``world_size`` ranks pausing ``max(0.25, world_size / LOOKS_PER_S)`` seconds are at most LOOKS_PER_S
    looks per second in all once there are 50 of them; and ranks that start together drift apart.
    """
    most = max(0.25, world_size / LOOKS_PER_S)
    pause = min(most, max(0.001, world_size / 20_000))
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311  (jitter, not a secret)
        pause = min(most, pause * 1.6)


def brisk_pauses(ranks: int) -> Iterator[float]:
    """Seconds to pause between looks that are cheap (a local disk, a store): at most 4 ms at first for few ranks.

    ``ranks`` together look no more often than 5,000 times per second, and one rank never more often than it takes to
    keep the delay below a thousandth of what was waited already.
    """
    began = time.monotonic()
    pause = 0.0003
    while True:
        yield pause * random.uniform(0.7, 1.0)  # noqa: S311  (jitter, not a secret)
        most = min(0.5, max(0.004, ranks / 5_000, (time.monotonic() - began) / 1_000))
        pause = min(most, pause * 1.5)


def job_pauses() -> Iterator[float]:
    """``pauses`` for the number of ranks of this job (one if that is not known)."""
    try:
        size = current_identity().world_size
    except FsError:
        size = 1
    return pauses(size)


def refresh(path: str | os.PathLike[str]) -> None:
    """Make this client ask the server about ``path`` again: open its parent and read one block of its entries."""
    try:
        handle = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fstat(handle)
        with os.scandir(handle) as listing:
            next(listing, None)  # one getdents call, also in a directory of a million entries
    except OSError:
        pass
    finally:
        os.close(handle)


def wait_for(
    path: str | os.PathLike[str],
    *,
    kind: Kind = "any",
    size: int | None = None,
    content: bytes | Callable[[Path], bool] | None = None,
    made_by: str = "",
    timeout: float | None = None,
) -> Path:
    """Wait until ``path`` is visible to the caller and, if asked, is what is expected.

    Args:
        path: what to wait for.
        kind: "file" or "dir" if only that will do. The other one in its place is an error at once.
        size: the size in bytes that the file must have.
        content: the bytes that the file must hold, or a function of the path that says whether it is right.
        made_by: who is to make it, for the message ("rank 0", "the download job").
        timeout: seconds; without it SAFEDIST_FS_TIMEOUT, without that five minutes.

    Raises:
        FsTimeoutError: it did not come. The message holds everything one would ask next.
        PathBlockedError: something of the wrong kind is there, or a file where a parent directory should be.
        FsAccessError: the caller may not look there.
    """
    target, limit = Path(path), timeout_s(timeout)
    expected = Expected(kind, len(content) if size is None and isinstance(content, bytes) else size, content)
    began = time.monotonic()
    pause = job_pauses()
    while True:
        seen = expected.missing(target)
        if not seen:
            return target
        waited = time.monotonic() - began
        if waited >= limit:
            raise waited_too_long(target, waited, seen, made_by=made_by, expected=str(expected))
        refresh(target)
        time.sleep(min(next(pause), max(0.0, limit - waited)))


class Expected:
    """What the path must be, and how to look at it freshly."""

    def __init__(self, kind: Kind, size: int | None, content: bytes | Callable[[Path], bool] | None) -> None:
        self.kind: Kind = "file" if kind == "any" and (size is not None or isinstance(content, bytes)) else kind
        self.size, self.content = size, content

    def __str__(self) -> str:
        parts = [{"any": "anything", "file": "a file", "dir": "a directory"}[self.kind]]
        if self.size is not None:
            parts.append(f"of {self.size} bytes")
        if self.content is not None:
            parts.append("with the expected content")
        return " ".join(parts)

    def missing(self, path: Path) -> str:
        """What is not yet as expected, in words; empty if all is.

        Raises:
            PathBlockedError, FsAccessError: waiting will not help.
        """
        try:
            return self._look(path)
        except FsError:
            raise  # by the caller's own test of the content: some are OSErrors as well, and explained already
        except OSError as error:
            # A half-visible path gives any of these for a while; the deadline bounds how long we believe that.
            if error.errno in AGAIN | STALE | FAILED or isinstance(error, FileNotFoundError):
                return f"{error.strerror}"
            raise explain(error, path, f"look at what should be {self}") from error

    def _look(self, path: Path) -> str:
        if self.kind == "any" and self.content is None:
            path.stat()  # a link is there when what it points to is
            return ""
        # open, not stat: close-to-open file systems (NFS) promise fresh size and content only to who opens.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        handle = os.open(path, flags | (os.O_DIRECTORY if self.kind == "dir" else 0))
        try:
            status = os.fstat(handle)
            if self.kind == "file" and stat.S_ISDIR(status.st_mode):
                raise PathBlockedError("a directory is where a file was expected", where={"path": str(path)})
            if self.size is not None and status.st_size != self.size:
                return f"{status.st_size} bytes"
            if isinstance(self.content, bytes) and not _holds(handle, self.content):
                return "other content"
        finally:
            os.close(handle)
        if callable(self.content) and not self.content(path):
            return "content that is not as expected yet"
        return ""


def _holds(handle: int, content: bytes) -> bool:
    at = 0
    while at < len(content):
        block = os.read(handle, min(1 << 20, len(content) - at))
        if not block or content[at : at + len(block)] != block:
            return False
        at += len(block)
    return not os.read(handle, 1)


def waited_too_long(path: Path, waited: float, seen: str, *, made_by: str = "", expected: str = "") -> FsTimeoutError:
    """The error of a wait that ran out, with every fact one would ask for next."""
    return FsTimeoutError(
        f"waited {waited:.1f} s for a path that did not come",
        where={
            "path": path,
            "rank": who(),
            "to_be_made_by": made_by or "unknown (pass made_by=)",
            **mount_info.describe(path),
        },
        seen=seen,
        expected=expected or None,
        hint=(
            "see whether the process that makes it is alive and writes to this same file system (fs.shared_scope "
            "tells); if the file system only is slow to show it, raise timeout= or SAFEDIST_FS_TIMEOUT"
        ),
    )
