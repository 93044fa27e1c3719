"""Scratch of a run that was killed whole: the next one in its place finds and removes it.

Where a whole container is killed (out of memory, say), the process that guards scratch goes with it. The kubelet starts
the container again in the same pod, whose volume is still there, and each such life would have that much less room.

Only what is provably dead is removed, of whatever pod: a directory whose owner had a lock that the kernel has released,
on a file system that no other machine has.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..fs.oserrors import mount_of
from ..rank.places import JobScratch
from ..rank_server.cleanup import remove
from .scratch import PREFIX

_OWNER = "owner"
_KEPT, _GOES = b"kept", b"goes"


@contextmanager
def owned(job: JobScratch, *, is_kept: bool) -> Iterator[None]:
    """Inside, a job's directory is this process's; if that is killed, :func:`sweep` may remove it.

    Args:
        job: whose.
        is_kept: it is to stay, but for what may hold secrets.
    """
    with ExitStack() as held:
        with suppress(OSError):  # where there is no room, it is only not removed later
            _own(job, held, is_kept=is_kept)
        yield


def _own(job: JobScratch, held: ExitStack, *, is_kept: bool) -> None:
    if not mount_of(job.path).is_local:
        return  # a lock may be waited for without end
    # systemd removes what is old in /tmp, and leaves alone what is locked (tmpfiles.d(5)).
    _lock(job.path, os.O_DIRECTORY, held)
    # Under the lock: who gets it and finds nothing written has come between, and leaves the directory alone.
    os.write(_lock(job.path / _OWNER, os.O_CREAT | os.O_EXCL | os.O_RDWR, held), _KEPT if is_kept else _GOES)


def _lock(path: Path, how: int, held: ExitStack) -> int:
    descriptor = os.open(path, how | os.O_CLOEXEC, 0o600)
    held.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def sweep(root: Path) -> list[Path]:
    """Remove what dead owners have left in a directory; what was removed."""
    with suppress(OSError):  # whoever wants to use it will say so
        if mount_of(root).is_local:
            return [path for path in sorted(root.glob(f"{PREFIX}*")) if _is_removed(path)]
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
