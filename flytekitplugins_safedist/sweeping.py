"""Scratch of a run that was killed whole: found and removed by the next one in the same place.

A container that the kernel or the kubelet kills takes every process with it, the one that guards scratch too. Restarted
in place, its pod still has the volume, and the new run would have that much less room.

Only what is provably dead is removed: a directory whose owner held a lock that this very kernel has released. Locks of
other machines may not be seen here (network file systems differ), so the owner must have been on this boot of this
machine; and a volume may be mounted in several pods of one machine, each with locks of its own, so it must have had
this pod's name. What a user wants kept has no owner, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from .fs.process import boot_id
from .scratch import PREFIX, JobScratch, remove

_OWNER = "owner"


@contextlib.contextmanager
def owned(job: JobScratch) -> Iterator[None]:
    """Within it, a job's directory is this process's; should the process be killed, :func:`sweep` may remove it."""
    descriptor = None
    # Where this cannot be had (no locks, no room), the directory is only not removed later.
    with contextlib.suppress(OSError):
        descriptor = os.open(job.path / _OWNER, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Written under the lock: who gets the lock and finds nothing written has come before us, and leaves it alone.
        os.write(descriptor, _here())
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def sweep(root: Path) -> list[Path]:
    """Remove the directories below *root* whose owners are dead; gives those that were removed."""
    try:
        found = sorted(path for path in root.iterdir() if path.name.startswith(PREFIX))
    except OSError:
        return []  # whoever wants to use it will say so
    return [path for path in found if _is_mine(path) and _removed(path)]


def _is_mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return not path.is_symlink() and path.lstat().st_uid == os.geteuid()
    return False


def _removed(path: Path) -> bool:
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = _here()
        if not here or os.pread(descriptor, 1000, 0) != here:
            return False
        # The lock is held: of two that sweep, one removes.
        remove(path)
        return not os.path.lexists(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _here() -> bytes:
    """This pod on this boot of its machine; empty where the kernel does not say which boot."""
    boot = boot_id()
    return f"{socket.gethostname()} {boot}\n".encode() if boot else b""
