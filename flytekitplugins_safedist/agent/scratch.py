"""Make and remove a job's directories on this node (:mod:`..rank.places` says which).

Where a whole container is killed (out of memory, say), the process that guards scratch goes with it. The kubelet starts
the container again in the same pod, whose volume is still there, and each such life would have that much less room. So
the next run in the same place removes it (:func:`sweep`): only what is provably dead, of whatever pod, a directory
whose owner had a lock that the kernel has released, on a file system that no other machine has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from ..config.caches import CACHES
from ..errors import ScratchError
from ..failures import of_errno
from ..fs.oserrors import mount_of
from ..rank.places import JobScratch, RankScratch, cache_variables
from ..rank_server.cleanup import remove

_PREFIX = "safedist-"
"""Of the name of a job's directory."""

_OWNER = "owner"
_KEPT, _GOES = b"kept", b"goes"
"""A file in it, locked while its owner lives; and its word: what becomes of the directory of one that was killed."""

SOCKET_PATH_BYTES = 107
"""The longest path of a socket: unix(7)'s ``sun_path`` has 108 bytes, one of them for the end."""
SOCKET_NAME_BYTES = 85, 40
"""Of these, kept for what is made below TMPDIR, and what is kept at least, where a link in /tmp cannot be made:
multiprocessing's ``/pymp-xxxxxxxx/listener-xxxxxxxx`` takes 32 bytes, torch's ``/torch-shm-dir-XXXXXX/manager.sock``
34, and those of Ray 83."""

_LONGEST_TMP = Path("999-9999")


@contextlib.contextmanager
def making(what: str, path: Path, **where: object) -> Iterator[None]:
    """Inside, a file of a job is made.

    Raises:
        ScratchError: it cannot; *what* says so.
    """
    try:
        yield
    except OSError as error:
        known = of_errno(error.errno)
        hint = "see the error: it is of that directory's file system" if known is None else known.hint
        hint = f"{hint} (Scratch(path=...) or SAFEDIST_SCRATCH_ROOT names the directory)"
        raise ScratchError(what, where={"path": path, **where}, seen=str(error.strerror), hint=hint) from error


def make_job(root: Path) -> JobScratch:
    """Make a job directory that no other job, attempt or process has (the kernel's mkdir decides).

    Raises:
        ScratchError: ``root`` cannot be written, takes no sockets, or is too long for them and no link can be made.
    """
    root = root.absolute()  # a rank's TMPDIR holds wherever it goes
    with _writing(root):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        try:
            job = JobScratch(path, short_for(path, below=_LONGEST_TMP))
            for each in (job.orders, job.logs, job.node, job.inputs):
                each.mkdir(mode=0o700)
            # What ranks and their agent meet at, and hand tensors over through; a mount of an object store takes none.
            with socket.socket(socket.AF_UNIX) as tried:
                tried.bind(str(job.short / "tried"))
            (path / "tried").unlink()
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
        for path in (scratch.path, scratch.path / "tmp", scratch.path / "flyte"):
            path.mkdir(mode=0o700)
        (job.path / scratch.tmp.name).symlink_to((scratch.path / "tmp").relative_to(job.path))
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


def make_caches(caches: Path, shared: Collection[str]) -> dict[str, str]:
    """Make compile caches for what is imported for all ranks; the variables that send it there, ``shared`` ones aside.

    Raises:
        ScratchError: they cannot be made.
    """
    with _writing(caches):
        _make_caches(caches)
    return cache_variables(caches, shared)


def remove_rounds_before(job: JobScratch, round_: int) -> None:
    """Remove what the ranks of earlier rounds left, their logs too, as far as possible. Their processes are gone."""
    for path in other_rounds(job, round_):
        if int(path.name.split("-")[1]) < round_:
            remove(path)
    for link in job.path.glob("[0-9]*-*"):
        if int(link.name.split("-")[0]) < round_:
            link.unlink()


def other_rounds(job: JobScratch, round_: int) -> list[Path]:
    """Directories and logs of all rounds but this one."""
    found = [*job.path.glob("round-*"), *job.logs.glob("round-*")]
    return [path for path in found if path.name.split("-")[1] != str(round_)]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ScratchError(
            "the scratch directory cannot be made",
            where={"path": path},
            seen=f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}",
            expected="a writable directory with room, which takes sockets",
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
    tried: dict[str, str] = {}
    for kept in SOCKET_NAME_BYTES:
        if _fits(directory, below, kept):
            return directory
        for place in dict.fromkeys([str(directory.parent), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):  # noqa: S108
            link = Path(place) / f"s-{secrets.token_hex(3)}"
            if not _fits(link, below, kept):
                tried[place] = "too long"
                continue
            try:
                link.symlink_to(directory)  # EEXIST where somebody has this name already
            except OSError as error:
                tried[place] = error.strerror or str(error)
            else:
                return link
    raise _too_long(directory, below, tried)


def _fits(directory: Path, below: Path, kept: int) -> bool:
    return len(os.fsencode(directory / below)) + kept <= SOCKET_PATH_BYTES


def _too_long(directory: Path, below: Path, tried: dict[str, str]) -> ScratchError:
    root = directory.parent
    taken = len(os.fsencode(root))
    allowed = taken + SOCKET_PATH_BYTES - SOCKET_NAME_BYTES[-1] - len(os.fsencode(directory / below))
    return ScratchError(
        "the scratch directory's path is too long for sockets: DataLoader workers would hang",
        where={"path": root, "tried for a link": "; ".join(f"{place}: {why}" for place, why in tried.items())},
        seen=f"{taken} bytes",
        expected=f"at most {allowed} bytes (a socket's path has at most {SOCKET_PATH_BYTES})",
        hint="set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to a shorter path, or make /tmp writable",
    )


# --- of those that were killed ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def own(job: JobScratch, *, is_kept: bool) -> Iterator[None]:
    """Inside, a job's directory is this process's; if that is killed, :func:`sweep` may remove it.

    Args:
        job: whose.
        is_kept: it is to stay, but for what may hold secrets.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where there is no room, it is only not removed later
            if mount_of(job.path).is_local:  # else a lock may be waited for without end
                # systemd removes what is old in /tmp, and leaves alone what is locked (tmpfiles.d(5)).
                _lock(job.path, os.O_DIRECTORY, held)
                owner = _lock(job.path / _OWNER, os.O_CREAT | os.O_EXCL | os.O_RDWR, held)
                # Under the lock: who gets it and finds nothing written has come between, and leaves it alone.
                os.write(owner, _KEPT if is_kept else _GOES)
        yield


def _lock(path: Path, how: int, held: contextlib.ExitStack) -> int:
    descriptor = os.open(path, how | os.O_CLOEXEC, 0o600)
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def sweep(root: Path) -> list[Path]:
    """Remove what dead owners have left in a directory; what was removed."""
    with contextlib.suppress(OSError):  # whoever wants to use it will say so
        if mount_of(root).is_local:
            return [path for path in sorted(root.glob(f"{_PREFIX}*")) if _is_removed(path)]
    return []


def _is_removed(path: Path) -> bool:
    try:
        if path.is_symlink() or path.lstat().st_uid != os.geteuid():
            return False
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is not a job's, or nobody could say so
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        word = os.read(descriptor, 4)  # the lock is held: of two that sweep, one removes
        if word == _KEPT:
            remove(JobScratch(path, path).orders)
        elif word == _GOES:
            remove(path)
        return not os.path.lexists(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
