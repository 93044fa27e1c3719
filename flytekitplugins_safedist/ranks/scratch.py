"""Scratch directories: one per job on each node, and in it one per round and rank.

Layout, all of it mode 0700::

    <root>/safedist-<random>/
        round-0/rank-3/        what current_rank().scratch names
            tmp/               TMPDIR
            flyte/             flytekit's local sandbox and working directory
        cache/rank-3/<name>/   compile caches (caches.py): a restart does not compile again
        cache/preload/<name>/  those of the process that imports for all ranks
        logs/round-0-rank-3.log
        orders/                what the agent hands to ranks, and what they hand back

Names are short because sockets are made below TMPDIR (:func:`short_for`); below a long root, TMPDIR goes through a
short link to the job's directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config.caches import CACHES
from ..envvars import TMPDIR
from ..errors import ScratchError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
SOCKET_PATH_BYTES = 107
"""The longest path of a socket: unix(7)'s ``sun_path`` has 108 bytes, one of them for the end."""
SOCKET_NAME_BYTES = 40
"""Of these, kept for what is made below TMPDIR: multiprocessing's ``/pymp-xxxxxxxx/listener-xxxxxxxx`` takes 32 bytes,
torch's ``/torch-shm-dir-XXXXXX/manager.sock`` 34."""

_LONGEST_TMP = Path("round-999") / "rank-9999" / "tmp"


@dataclass(frozen=True)
class RankScratch:
    """The directories of one rank in one round.

    Attributes:
        path: of its own directory.
        short: the same, short enough for sockets below its TMPDIR.
        caches: parent of its compile caches, in every round the same.
    """

    path: Path
    short: Path
    caches: Path

    @property
    def tmp(self) -> Path:
        """The rank's TMPDIR."""
        return self.short / "tmp"

    def environment(self, shared: Collection[str]) -> dict[str, str]:
        """Variables that send temporary files and compile caches here.

        Args:
            shared: names of caches (``caches.CACHES``) that stay where the environment has them.
        """
        return {TMPDIR: str(self.tmp), **_cache_variables(self.caches, shared)}


@dataclass(frozen=True)
class JobScratch:
    """The directory of one job on this node.

    Attributes:
        path: of the directory.
        short: the same, or a link to it where paths below it are too long for sockets.
    """

    path: Path
    short: Path

    @property
    def orders(self) -> Path:
        """What the agent hands to its ranks and gets back."""
        return self.path / "orders"

    @property
    def preload(self) -> Path:
        """Parent of the compile caches of what is imported for all ranks."""
        return self.path / "cache" / "preload"

    @property
    def logs(self) -> Path:
        """One file per round and rank."""
        return self.path / "logs"

    def rank(self, round_: int, rank: int) -> RankScratch:
        """The directories of a rank; they exist after :func:`make_rank`."""
        below = Path(f"round-{round_}") / f"rank-{rank}"
        return RankScratch(self.path / below, self.short / below, self.path / "cache" / f"rank-{rank}")

    def log(self, round_: int, rank: int) -> Path:
        """The file that holds all that a rank printed."""
        return self.logs / f"round-{round_}-rank-{rank}.log"


def remedy(error: OSError) -> str:
    """What to do where a file of a job cannot be made."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "let the pod's processes open more files (ulimit -n): an agent needs some for each of its ranks"
    if error.errno in FULL_ERRNOS:
        return "free space there, or set Scratch(path=...) to a larger volume"
    if error.errno in (errno.ENODEV, errno.EINVAL):
        return "set Scratch(path=...) to a local disk: that file system's files cannot be mapped into memory"
    return "see the error: it is of that directory's file system"


def make_job(root: Path) -> JobScratch:
    """Make a job directory that no other job, attempt or process has (the kernel's mkdir decides).

    Raises:
        ScratchError: ``root`` cannot be written, or is too long for sockets and no link to it can be made.
    """
    root = root.absolute()  # a rank's TMPDIR holds wherever it goes
    with _writing(root):
        path = Path(tempfile.mkdtemp(prefix="safedist-", dir=root))
        try:
            job = JobScratch(path, short_for(path, below=_LONGEST_TMP))
            job.orders.mkdir(mode=0o700)
            job.logs.mkdir(mode=0o700)
        except BaseException:
            remove(path)
            raise
    return job


def make_rank(job: JobScratch, round_: int, rank: int) -> RankScratch:
    """Make the directories of one rank.

    Raises:
        ScratchError: they cannot be made.
    """
    scratch = job.rank(round_, rank)
    with _writing(scratch.path):
        # Several ranks of a round make its directory at once in a multi-process launch: let mkdir arbitrate.
        scratch.path.parent.mkdir(mode=0o700, exist_ok=True)
        for path in (scratch.path, scratch.tmp, scratch.path / "flyte"):
            path.mkdir(mode=0o700)
        _make_caches(scratch.caches)
    return scratch


def _make_caches(parent: Path) -> None:
    """Make them below ``parent``, or find them. No process that had them is left: what one had locked by a file's mere
    existence is free.

    Raises:
        OSError: they cannot be made.
    """
    parent.parent.mkdir(mode=0o700, exist_ok=True)
    parent.mkdir(mode=0o700, exist_ok=True)
    for cache in CACHES:
        own = parent / cache.name
        own.mkdir(mode=0o700, exist_ok=True)
        for lock in own.glob(cache.locks) if cache.locks else ():
            lock.unlink()


def _cache_variables(parent: Path, shared: Collection[str]) -> dict[str, str]:
    """What sends libraries there.

    Args:
        parent: of the directories.
        shared: names of caches that stay where the environment has them.
    """
    return {cache.variable: str(parent / cache.name) for cache in CACHES if cache.name not in shared}


def make_caches(caches: Path, shared: Collection[str]) -> dict[str, str]:
    """Make compile caches for what is imported for all ranks; the variables that send it there, ``shared`` ones aside.

    Raises:
        ScratchError: they cannot be made.
    """
    with _writing(caches):
        _make_caches(caches)
    return _cache_variables(caches, shared)


def remove_rounds_before(job: JobScratch, round_: int) -> None:
    """Remove what the ranks of earlier rounds left, their logs too, as far as possible. Their processes are gone."""
    for path in other_rounds(job, round_):
        if int(path.name.split("-")[1]) < round_:
            remove(path)


def other_rounds(job: JobScratch, round_: int) -> list[Path]:
    """Directories and logs of all rounds but this one."""
    found = [*job.path.glob("round-*"), *job.logs.glob("round-*")]
    return [path for path in found if path.name.split("-")[1] != str(round_)]


def remove(path: Path) -> str | None:
    """Remove a tree as far as possible; what could not be removed is returned as text, None when all is gone."""
    with contextlib.suppress(OSError):
        path.unlink()  # a link: never what is behind it
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return None
    # rmtree goes down by recursion in every Python before 3.13, by paths that may become too long, and stops at
    # directories whose permissions a user took away.
    path = path.absolute()
    try:
        mode = ["-type", "d", "!", "-perm", "-u=rwx", "-exec", "chmod", "u+rwx", "{}", ";"]
        # From "/": find does nothing where it may not come back to the directory that it is started in.
        subprocess.run(["find", path, *mode], capture_output=True, check=False, cwd="/")
        english = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(["rm", "-rf", "--", path], capture_output=True, check=False, env=english)
        said = done.stderr.decode(errors="replace").replace("rm: ", "").splitlines()
    except OSError as error:
        said = [f"{path}: {error}"]
    return "; ".join(said[:5]) or None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ScratchError(
            "the scratch directory cannot be made",
            where={"path": path},
            seen=f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}",
            expected="a writable directory with room",
            hint="set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to a directory that this user may write",
        ) from error


def short_for(directory: Path, *, below: Path) -> Path:
    """The directory itself, or a new link to it where sockets in ``directory / below`` would have too long a path.

    A DataLoader's workers hand tensors over through a socket in TMPDIR. Where its path is longer than the kernel takes,
    the worker prints ``OSError: AF_UNIX path too long``, and the rank waits for it for ever.

    The link is as private as the directory: nobody else may enter that. It is made in the first place that is short
    enough and can be written.

    Raises:
        ScratchError: there is no such place.
    """
    if _fits(directory, below):
        return directory
    tried: dict[str, str] = {}
    for place in dict.fromkeys([str(directory.parent), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):  # noqa: S108
        link = Path(place) / f"safedist-{secrets.token_hex(4)}"
        if not _fits(link, below):
            tried[place] = "too long"
            continue
        try:
            link.symlink_to(directory)  # EEXIST where somebody has this name already
        except OSError as error:
            tried[place] = error.strerror or str(error)
        else:
            return link
    raise _too_long(directory, below, tried)


def _fits(directory: Path, below: Path) -> bool:
    return len(os.fsencode(directory / below)) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES


def _too_long(directory: Path, below: Path, tried: dict[str, str]) -> ScratchError:
    root = directory.parent
    taken = len(os.fsencode(root))
    allowed = taken + SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - len(os.fsencode(directory / below))
    return ScratchError(
        "the scratch directory's path is too long for sockets: DataLoader workers would hang",
        where={"path": root, "tried for a link": "; ".join(f"{place}: {why}" for place, why in tried.items())},
        seen=f"{taken} bytes",
        expected=f"at most {allowed} bytes (a socket's path has at most {SOCKET_PATH_BYTES})",
        hint="set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to a shorter path, or make /tmp writable",
    )
