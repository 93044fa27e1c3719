"""Scratch of a run that was killed whole: the next one in its place finds and removes it.

Where a whole container is killed (out of memory, say), the process that guards scratch goes with it. The kubelet starts
the container again in the same pod, whose volume is still there, and each such life would have that much less room.

Only what is provably dead is removed: a directory whose owner had a lock that this very kernel has released. Other
machines' locks may not be seen here (network file systems differ), so the owner was on this boot of this machine, or
on an earlier one where no other machine has that file system; and a volume may be mounted in several pods, each with
locks of its own, so it was in this one.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..fs.oserrors import mount_of
from ..rank.places import JobScratch
from ..rank_server.cleanup import remove
from .life import pod_uid
from .scratch import PREFIX

_OWNER = "owner"


@contextmanager
def owned(job: JobScratch) -> Iterator[None]:
    """Inside, a job's directory is this process's; if that is killed, :func:`sweep` may remove it."""
    descriptor = None
    with suppress(OSError):  # where there are no locks, or is no room, it is only not removed later
        descriptor = os.open(job.path / _OWNER, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Under the lock: who gets it and finds nothing written has come between, and leaves the directory alone.
        os.write(descriptor, _here())
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def sweep(root: Path) -> list[Path]:
    """Remove what dead owners have left in a directory; what was removed."""
    with suppress(OSError):  # whoever wants to use it will say so
        return [path for path in sorted(root.glob(f"{PREFIX}*")) if _is_removed(path)]
    return []


def _is_removed(path: Path) -> bool:
    try:
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # what is to be kept, or not a job's, has no owner
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _was_here(os.pread(descriptor, 1000, 0), path) or _grants_every_lock(path):
            return False
        remove(path)  # the lock is held: of two that sweep, one removes
        return not os.path.lexists(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _grants_every_lock(path: Path) -> bool:
    """Whether a lock says nothing here: some file systems give what is taken."""
    with open(path / _OWNER, "rb") as again, suppress(OSError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _was_here(owner: bytes, path: Path) -> bool:
    here = _here()
    reaches = mount_of(path).is_local and here.rpartition(b" ")[0] == owner.rpartition(b" ")[0]
    return bool(here) and (owner == here or reaches)


def _here() -> bytes:
    """This pod, or host, on this boot of its machine; b"" where the kernel does not say which boot."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{socket.gethostname()} {pod_uid()} {boot}".encode()
    return b""
