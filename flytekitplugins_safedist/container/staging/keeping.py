"""Which staged trees are kept: those in use, always; of the others the ones used last, up to an age and a size.

Whoever uses a tree holds a shared lock on its directory for as long as it lives (:class:`Lease`); the kernel lets go of
it whatever ends the process. Whoever removes one takes that lock exclusively, gives the directory another name while it
holds it, and only then removes what is in it: nobody can find half a tree, and nobody who holds one can lose it.

This is the one place in staging where locks are trusted, so it does nothing at all where they cannot be:

- on file systems that grant every lock or none;
- to trees of another boot, unless the file system is a local one: a store on a network volume may be in use by another
  machine, whose locks this one does not see. (A tree of this boot is used by this kernel alone, docs/staging.md.)
- where the kernel does not tell its boot: several such may share a volume.
"""

# ruff: noqa: PTH104, PTH208
# names are listed, not paths made of them

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...fs.mount_info import mount_of
from .locks import UNKNOWN_BOOT, WorkDir, boot_id, exclusively, is_same

LOCAL_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay"})
"""File systems that only one kernel can have mounted for writing."""

LEAST_IDLE = 3600.0
"""Seconds for which a tree was not used before its size can count against it: somebody may be about to use it."""

_TRIES, _PAUSE = 100, 0.01
"""A lock that is in the way is held for a rename: a moment."""


@dataclass(frozen=True)
class Keep:
    """How much is kept of what nobody uses.

    Attributes:
        seconds: since a tree was last used.
        size: bytes of all trees together, unpacked.
    """

    seconds: float = 7 * 86400.0
    size: int = 20 << 30


class Lease:
    """A tree that stays for as long as this does, in this process and in the one that takes its place by exec."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """The tree may go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def lease(place: Path) -> Lease | None:
    """Use the tree at ``place`` from now on; None when it is not there, or just about to go."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    held = Lease(fd)
    if not _shared(fd) or not is_same(place, fd):  # it went between the two
        return None
    with suppress(OSError):
        os.utime(place / "manifest", ns=(time.time_ns(),) * 2)  # when it was last used
    os.set_inheritable(fd, True)  # noqa: FBT003
    return held


def _shared(fd: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return True  # no locks here, so nobody removes anything either
            time.sleep(_PAUSE)
        else:
            return True
    return False


def is_local(path: Path) -> bool:
    """Whether no other machine can be using what is at ``path``; when in doubt, one can."""
    with suppress(Exception):  # whatever keeps it from being told is doubt
        return mount_of(path).fstype in LOCAL_TYPES
    return False


@dataclass(frozen=True)
class _Unused:
    """A tree that is not needed, if nobody holds it."""

    place: Path
    size: int
    idle: float
    gone: bool


def prune(root: Path, work: WorkDir, keep: Keep) -> list[str]:
    """Remove trees below ``root / "trees"`` that nobody uses; returns their names.

    Args:
        work: a private directory on the same file system, in which they are removed.
    """
    if boot_id() == UNKNOWN_BOOT or not work.locks_exclude():
        return []
    local = is_local(root)
    trees = sorted(
        (found for name in os.listdir(root / "trees") if (found := _looked_at(root / "trees" / name, local=local))),
        key=lambda tree: -tree.idle,
    )
    total = sum(tree.size for tree in trees)
    removed = []
    for tree in trees:
        old = tree.gone or tree.idle > keep.seconds
        if (old or (total > keep.size and tree.idle > LEAST_IDLE)) and _removed(tree.place, work):
            removed.append(tree.place.name)
            total -= tree.size
    return removed


def _looked_at(place: Path, *, local: bool) -> _Unused | None:
    """None for what is not to be judged."""
    try:
        used = (place / "manifest").stat().st_mtime
        content = json.loads((place / "manifest").read_bytes())
        boot, size = str(content["boot"]), int(content["raw"])
    except FileNotFoundError:
        return _without_manifest(place) if local else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    gone = boot != boot_id()
    return None if gone and not local else _Unused(place, size, time.time() - used, gone)


def _without_manifest(place: Path) -> _Unused | None:
    try:
        return _Unused(place, 0, time.time() - place.stat().st_mtime, gone=False)
    except OSError:
        return None


def _removed(place: Path, work: WorkDir) -> bool:
    with suppress(OSError), exclusively(place) as alone:
        if alone:
            os.rename(place, work.path / place.name)
            return True
    return False


def forget_sources(root: Path, removed: list[str]) -> None:
    """Remove the notes that lead to trees which are gone; one too many costs a fetch, and no more."""
    digests = {name.partition(".")[0] for name in removed}
    left = {name.partition(".")[0] for name in os.listdir(root / "trees")}
    for note in (root / "sources").iterdir():
        with suppress(OSError):
            if note.read_text(encoding="utf-8") in digests - left:
                note.unlink()
