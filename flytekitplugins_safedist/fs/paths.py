"""``ensure_dir`` and ``wait_for``: a path that is there for the caller, however late its client sees it.

Network clients remember what they did *not* find: for up to a minute NFS (acdirmax, nfs(5)) and parallel file systems
answer "no such file" without asking the server. Opening the parent directory makes them ask again. So
``os.makedirs(exist_ok=True)``, which asks ``isdir`` right after EEXIST, raises FileExistsError for a directory that is
there (facebookresearch/lingua#49). Here mkdir arbitrates, and its EEXIST is believed: the caller waits to see it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import Literal

from ..errors import FsError, FsTimeoutError, FsUnsupportedError, PathBlockedError
from ..jitter import jittered
from . import oserrors
from .identity import known_identity, timeout_s
from .oserrors import Backoff, entries, explain, may_pass, mount_of, nearest_dir

Kind = Literal["any", "file", "dir"]
Content = bytes | Callable[[Path], bool] | None

LOOKS_PER_S = 200
"""In the long run all ranks of a job together look at one path no more often than this, however many they are."""


def ensure_dir(path: str | os.PathLike[str], *, mode: int = 0o777, timeout: float | None = None) -> Path:
    """Make a directory and its parents, or see that others have; return when the caller can use it.

    Args:
        path: the directory.
        mode: permission bits of ``path``, less the umask; parents get 0o777 less the umask.
        timeout: seconds for the directory to become visible; see ``wait_for``.

    Raises:
        PathBlockedError: a file, or a symbolic link to nothing, is in the way.
        FsAccessError, ReadOnlyFsError, NoSpaceError, StaleHandleError, FsIoError: as the errno says.
        FsUnsupportedError: nothing can be made there (proc, say).
        FsTimeoutError: the server says that it exists, but it did not become visible.
    """
    given, limit, began = os.fspath(path), timeout_s(timeout), time.monotonic()
    target = given.rstrip("/") or given  # with a slash at the end the kernel says other things of what is in the way
    pause, retry, parent, seen = _own_pauses(), Backoff(), _Parent(target), ""
    while True:
        try:
            os.mkdir(target, mode)  # noqa: PTH102  (the common case, at the price of one system call)
            break
        except OSError as error:
            if os.path.isdir(target):  # noqa: PTH112  (whatever mkdir said: EROFS, EACCES come for existing ones too)
                break
            left = limit - (time.monotonic() - began)
            if error.errno == errno.EEXIST:
                _see_whether_it_is_late(target)
                seen = "mkdir: it exists; stat: it does not"
            elif error.errno == errno.ENOENT:
                again, seen = bool(seen), parent.make(error, left)
                if not again:
                    continue
            elif retry.allows(error):
                continue
            else:
                raise explain(error, target, "make the directory") from error
        if left <= 0:
            raise waited_too_long(Path(target), limit - left, seen, expected="a directory")
        refresh(target)
        time.sleep(min(next(pause), left))
    return Path(target)


class _Parent:
    """The directory that another is to be made in, from try to try."""

    def __init__(self, target: str) -> None:
        # As it is written, which is what mkdir follows: "link/../x" is beside what the link points to, not beside the
        # link.
        self._target, self._path = target, os.path.dirname(target)  # noqa: PTH120
        self._which: tuple[int, int] | None = None
        self._since = 0.0

    def make(self, error: OSError, left: float) -> str:
        """Make it, where mkdir has said that it is not there; what is to be said of that where it says so again.

        Raises:
            FsError: it cannot be made; or has been there all the time.
        """
        if not self._path or self._path == self._target:  # nothing above it: the working directory itself is gone
            raise explain(error, self._target, "make the directory") from error
        before, self._which = self._which, self._identity()
        if self._which is None or self._which != before:
            self._since = time.monotonic()
            if left > 0:
                ensure_dir(self._path, timeout=left)
            return "its parent vanishes again and again"
        # A network's client may remember for a minute what is gone (acdirmax of nfs(5)).
        if time.monotonic() - self._since > 3 * oserrors.PATIENCE_S:
            raise FsUnsupportedError(
                "cannot make the directory: its parent is there, and the file system says that it is not",
                where={"path": self._target, "host": gethostname(), "file_system": str(mount_of(self._target))},
                seen="ENOENT",
                hint="choose another file system, or see whether what is mounted there takes files",
            ) from error
        return "mkdir: its parent is not there; stat: it is"

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return None
        return status.st_dev, status.st_ino


def _see_whether_it_is_late(target: str) -> None:
    """Of what mkdir takes for existing, and is no directory for this client: it may be late.

    Raises:
        PathBlockedError: it is something else.
        FsError: it cannot be seen.
    """
    try:
        status = os.stat(target)  # noqa: PTH116
    except FileNotFoundError:
        if not is_link_to_nothing(target):
            return
        what, seen = "a symbolic link to nothing", f"-> {os.readlink(target)}"  # noqa: PTH115
        hint = "make what it points to, or remove the link"
    except OSError as error:
        if may_pass(error):
            return
        raise explain(error, target, "make the directory") from error
    else:
        if stat.S_ISDIR(status.st_mode):
            return
        what, seen = "a file", f"mode {stat.filemode(status.st_mode)}, {status.st_size} bytes"
        hint = "move it away, or choose another path"
    raise PathBlockedError(
        f"{what} is in the way of a directory",
        where={"path": target, "file_system": str(mount_of(target))},
        seen=seen,
        expected="a directory, or nothing",
        hint=hint,
    )


def is_link_to_nothing(target: str | os.PathLike[str]) -> bool:
    """Whether a link is there, and never what it points to: only where one kernel serves everything; elsewhere that may
    merely be late."""
    try:
        points_to = Path(os.path.realpath(target))
        return Path(target).is_symlink() and not points_to.exists() and mount_of(points_to).is_local
    except OSError:
        return False


# --- waiting ---------------------------------------------------------------------------------------------------------
def wait_for(
    path: str | os.PathLike[str],
    *,
    kind: Kind = "any",
    size: int | None = None,
    content: Content = None,
    made_by: str = "",
    timeout: float | None = None,
) -> Path:
    """Wait until ``path`` is visible to the caller and, if asked, is what is expected.

    Args:
        path: what to wait for.
        kind: "file" or "dir" if only that will do. The other one in its place is an error at once.
        size: the size in bytes that the file must have.
        content: the bytes that the file must hold, or a function of the path that says whether it is right.
        made_by: who is to make it ("rank 0", "the download job"), for the message; an error of that one's then comes
            before this one.
        timeout: seconds; without it SAFEDIST_FS_TIMEOUT, without that five minutes.

    Raises:
        FsTimeoutError: it did not come. The message holds everything one would ask next.
        PathBlockedError: something of the wrong kind is there, or a file where a parent directory should be.
        FsAccessError: the caller may not look there.
    """
    target, limit = Path(path), timeout_s(timeout)
    if content is not None and not callable(content):
        content = bytes(memoryview(content))  # of text, a TypeError: it would count as nothing to compare with
    if size is None and isinstance(content, bytes):
        size = len(content)
    if kind == "any" and size is not None:
        kind = "file"
    expected = {"any": "anything", "file": "a file", "dir": "a directory"}[kind]
    expected += "" if size is None else f" of {size} bytes"
    expected += "" if content is None else " with the expected content"
    began = time.monotonic()
    pause = _own_pauses()
    while seen := _missing(target, kind, size, content, expected):
        waited = time.monotonic() - began
        if waited >= limit:
            raise waited_too_long(target, waited, seen, made_by=made_by, expected=expected)
        refresh(target)
        time.sleep(min(next(pause), max(0.0, limit - waited)))
    return target


def _missing(path: Path, kind: Kind, size: int | None, content: Content, expected: str) -> str:
    """What is not yet as expected, in words; empty if all is."""
    try:
        # open, not stat: close-to-open file systems (NFS) promise fresh size and content only to who opens.
        if kind == "file":
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                found = os.fstat(file.fileno()).st_size
                if size is not None and found != size:
                    return f"{found} bytes"
                if isinstance(content, bytes) and file.read(len(content) + 1) != content:
                    return "other content"
        elif kind == "dir" or content is not None:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | (os.O_DIRECTORY if kind == "dir" else 0)))
        else:
            path.stat()  # a link is there when what it points to is
        return "content that is not as expected yet" if callable(content) and not content(path) else ""
    except FsError:
        raise  # by the caller's own test of the content: some are OSErrors as well, and explained already
    except OSError as error:
        # A half-visible path gives any of these for a while; the deadline bounds how long we believe that.
        if may_pass(error) or isinstance(error, FileNotFoundError):
            return f"{error.strerror}"
        raise explain(error, path, f"look at what should be {expected}") from error


def waited_too_long(path: Path, waited: float, seen: str, *, made_by: str = "", expected: str = "") -> FsTimeoutError:
    """The error of a wait that ran out, with every fact one would ask for next."""
    parent = nearest_dir(path)
    return FsTimeoutError(
        f"waited {waited:.1f} s for a path that did not come",
        where={
            "path": path,
            "rank": known_identity() or "unknown",
            "to_be_made_by": made_by or "unknown (pass made_by=)",
            "host": gethostname(),
            "file_system": str(mount_of(parent)),
            "nearest_parent": f"{parent}: {entries(parent)}",
        },
        seen=seen,
        expected=expected or None,
        hint="see whether the process that makes it is alive and writes to this same file system; if the file system "
        "only is slow to show it, raise timeout= or SAFEDIST_FS_TIMEOUT",
        of_another=bool(made_by),
    )


def refresh(path: str | os.PathLike[str]) -> None:
    """Make this client ask the server about ``path`` again: open its parent and read one block of its entries."""
    with contextlib.suppress(OSError), os.scandir(Path(path).parent) as listing:
        next(listing, None)  # one getdents call, also in a directory of a million entries


def pauses(ranks: int, per_s: float = LOOKS_PER_S, first: float = 0.001, least: float = 0.25) -> Iterator[float]:
    """Seconds to pause between looks: from ``first`` up to a bound that grows with the number of ranks. Jittered.

    Steady state: ``ranks`` that pause ``max(least, ranks / per_s)`` seconds are at most ``per_s`` looks per second in
    all once there are ``least * per_s`` of them; and ranks that start together drift apart. No bound is kept below a
    thousandth of what was waited already: after that long, so little more does not matter.
    """
    began = time.monotonic()
    pause = max(first, ranks / 20_000)
    while True:
        pause = min(pause, max(least, ranks / per_s, (time.monotonic() - began) / 1_000))
        yield jittered(pause, 0.5, 1.5)
        pause *= 1.6


def _own_pauses() -> Iterator[float]:
    who = known_identity()
    yield from pauses(1 if who is None else who.world_size)
