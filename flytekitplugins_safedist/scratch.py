"""Scratch directories: one per job on each node, and in it one per round and rank.

Layout, all of it mode 0700::

    <root>/safedist-<execution>-a<attempt>-<random>/
        round-0/rank-3/        what current_rank().scratch names
            tmp/               TMPDIR
            flyte/             flytekit's local sandbox and working directory
            cache/<name>/      compile caches (caches.py)
        logs/round-0-rank-3.log
        orders/                what the agent hands to ranks, and what they hand back
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .caches import CACHES
from .envvars import TMPDIR
from .errors import ScratchError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class RankScratch:
    """The directories of one rank in one round."""

    path: Path

    @property
    def tmp(self) -> Path:
        """The rank's TMPDIR."""
        return self.path / "tmp"

    @property
    def flyte(self) -> Path:
        """flytekit's sandbox and ``current_context().working_directory`` live here."""
        return self.path / "flyte"

    @property
    def caches(self) -> Path:
        """Parent of the compile caches."""
        return self.path / "cache"

    def environment(self, shared: Collection[str]) -> dict[str, str]:
        """Variables that send temporary files and compile caches here.

        Args:
            shared: names of caches (``caches.CACHES``) that stay where the environment has them.
        """
        private = {cache.variable: str(self.caches / cache.name) for cache in CACHES if cache.name not in shared}
        return {TMPDIR: str(self.tmp), **private}


@dataclass(frozen=True)
class JobScratch:
    """The directory of one job on this node."""

    path: Path

    @property
    def orders(self) -> Path:
        """What the agent hands to its ranks and gets back."""
        return self.path / "orders"

    @property
    def logs(self) -> Path:
        """One file per round and rank."""
        return self.path / "logs"

    def rank(self, round_: int, rank: int) -> RankScratch:
        """The directories of a rank; they exist after :func:`make_rank`."""
        return RankScratch(self.path / f"round-{round_}" / f"rank-{rank}")

    def log(self, round_: int, rank: int) -> Path:
        """The file that holds all that a rank printed."""
        return self.logs / f"round-{round_}-rank-{rank}.log"


def make_job(root: Path, *, execution: str, attempt: int) -> JobScratch:
    """Make a job directory that no other job, attempt or process has (the kernel's mkdir decides).

    Raises:
        ScratchError: ``root`` cannot be written.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", execution)[:60] or "local"
    try:
        job = JobScratch(Path(tempfile.mkdtemp(prefix=f"safedist-{name}-a{attempt}-", dir=root)))
    except OSError as error:
        raise _cannot_write(root, error) from error
    try:
        job.orders.mkdir(mode=0o700)
        job.logs.mkdir(mode=0o700)
    except OSError as error:
        remove(job.path)
        raise _cannot_write(root, error) from error
    return job


def make_rank(job: JobScratch, round_: int, rank: int) -> RankScratch:
    """Make the directories of one rank.

    Raises:
        ScratchError: they cannot be made.
    """
    scratch = job.rank(round_, rank)
    try:
        # Several ranks of a round make its directory at once in a multi-process launch: let mkdir arbitrate.
        scratch.path.parent.mkdir(mode=0o700, exist_ok=True)
        for path in (scratch.path, scratch.tmp, scratch.flyte, scratch.caches):
            path.mkdir(mode=0o700)
        for cache in CACHES:
            (scratch.caches / cache.name).mkdir(mode=0o700)
    except OSError as error:
        raise _cannot_write(scratch.path, error) from error
    return scratch


def remove_rounds_before(job: JobScratch, round_: int) -> None:
    """Remove what the ranks of earlier rounds left, as far as possible. Their processes are gone."""
    for path in job.path.glob("round-*"):
        if int(path.name.removeprefix("round-")) < round_:
            remove(path)


def remove(path: Path) -> str | None:
    """Remove a tree as far as possible; what could not be removed is returned as text, None when all is gone."""
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return None
    problems: list[str] = []

    def note(_function: object, name: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        error = info[1]
        if not isinstance(error, FileNotFoundError):
            problems.append(f"{name}: {error.strerror if isinstance(error, OSError) and error.strerror else error}")

    _open_up(path)
    # onerror became onexc in 3.12 and is only deprecated there; one spelling serves every supported version.
    shutil.rmtree(path, onerror=note)
    return "; ".join(problems[:5]) or None


def _open_up(path: Path) -> None:
    """Give every directory of a tree back the permissions that a user took away; they are ours to remove all the same.

    Never of what is above the tree, nor behind a link.
    """
    if path.is_symlink():
        return
    with contextlib.suppress(OSError):
        path.chmod(0o700)
    for parent, names, _ in os.walk(path):
        # Top-down: a directory is opened before os.walk looks into it.
        for directory in (Path(parent) / name for name in names):
            with contextlib.suppress(OSError):
                if not directory.is_symlink():
                    directory.chmod(0o700)


def bytes_of(path: Path) -> int:
    """Bytes that the files below ``path`` take on disk; what vanishes meanwhile counts as nothing."""
    return sum(_sizes(path))


def _sizes(path: Path) -> Iterator[int]:
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue


@dataclass(frozen=True)
class Usage:
    """How much each rank of this node holds in a round, in bytes, and how much room the file system has left."""

    path: Path
    by_rank: tuple[tuple[int, int], ...]
    free: int

    @property
    def total(self) -> int:
        """Bytes of all ranks together."""
        return sum(size for _, size in self.by_rank)

    def largest(self) -> int:
        """The rank that holds most."""
        return max(self.by_rank, key=lambda item: item[1])[0]

    def __str__(self) -> str:
        ranked = sorted(self.by_rank, key=lambda item: -item[1])
        listed = ", ".join(f"rank {rank}: {human(size)}" for rank, size in ranked)
        return f"{human(self.total)} in {self.path} ({listed}); {human(self.free)} free on its file system"


def usage(job: JobScratch, round_: int, ranks: Iterable[int]) -> Usage:
    """Measure one round of a job."""
    by_rank = tuple((rank, bytes_of(job.rank(round_, rank).path)) for rank in ranks)
    return Usage(path=job.path, by_rank=by_rank, free=shutil.disk_usage(job.path).free)


def over_limit(measured: Usage, limit: int) -> ScratchError | None:
    """The error for a round that holds more than its limit, or None."""
    if measured.total <= limit:
        return None
    return ScratchError(
        "the ranks of this node wrote more than their scratch limit",
        where={"directory": measured.path},
        seen=str(measured),
        expected=f"at most {human(limit)} (Scratch(size_limit=...))",
        hint="write less to current_rank().scratch and temporary files, remove what is done with, or raise size_limit",
    )


def human(size: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _cannot_write(path: Path, error: OSError) -> ScratchError:
    return ScratchError(
        "scratch cannot be made",
        where={"path": path},
        seen=f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}",
        expected="a writable directory with room",
        hint="set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to a directory that this user may write",
    )
