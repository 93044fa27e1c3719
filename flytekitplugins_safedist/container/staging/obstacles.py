"""What stands in a destination where the code archive has something else."""

# ruff: noqa: PTH102, PTH108, PTH112, PTH114, PTH120, PTH208
# bytes paths: names in archives need not be text

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from ...errors import PathBlockedError
from ..archive import DIRECTORY, IMPLIED, TreeEntry

_KIND_IN_THE_WAY = {
    False: "A file stands where a directory is needed",
    True: "A link to nothing stands where a directory is needed",
}
"""By whether it is a link."""

VISIBLE = 90.0
"""Seconds that a shared file system may take to show a directory that another node made (60 s have been reported)."""


def look(path: bytes, entry: TreeEntry) -> None:
    """Look whether an entry can be brought to a path, where tar would bring it; nothing changes.

    Raises:
        PathBlockedError: something is in the way that tar would not replace either.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        if entry.kind == DIRECTORY:
            if entry.mode == IMPLIED and os.path.lexists(path) and not os.path.isdir(path):
                raise _in_the_way(path, _KIND_IN_THE_WAY[os.path.islink(path)])
        elif stat.S_ISDIR(os.lstat(path).st_mode) and os.listdir(path):
            raise filled(path)


def filled(path: bytes) -> PathBlockedError:
    """The error for a directory that would have to make room for a file."""
    return PathBlockedError(
        "A directory that is not empty stands where the code archive has a file",
        where={"path": os.fsdecode(path)},
        hint="remove it from the image, or rename the file",
    )


def make_directory(
    path: bytes,
    look: Callable[[bytes], os.stat_result],
    *,
    replace: bool,
    changed: Callable[[], object] = lambda: None,
) -> bool:
    """Make ``path`` a directory that this client sees; False when that cannot be had within :data:`VISIBLE`.

    Args:
        replace: whether a file there makes room. As with tar, it does for a directory that the archive names, and not
            for one that it only implies.
        changed: called when what was there has changed: by a file that made room, by the directory.

    Raises:
        PathBlockedError: a file is in the way, and does not.

    On network file systems mkdir may say "exists" for what another node made, while a look at it still says "does not
    exist" from this node's cache; asking for the parent's listing refreshes that cache.
    """
    deadline, pause = time.monotonic() + VISIBLE, 0.002
    while True:
        try:
            os.mkdir(path)
        except FileExistsError:
            try:
                if stat.S_ISDIR(look(path).st_mode):
                    return True
                if not replace:
                    raise _in_the_way(path, _KIND_IN_THE_WAY[False]) from None
                os.unlink(path)
                changed()
                continue
            except FileNotFoundError:
                if os.path.islink(path):  # no waiting will help
                    raise _in_the_way(path, _KIND_IN_THE_WAY[True]) from None
        else:
            changed()
            return True
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(os.path.dirname(path))
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _in_the_way(path: bytes, what: str) -> PathBlockedError:
    return PathBlockedError(
        what,
        where={"path": os.fsdecode(path)},
        hint="remove it from the image, or use another --dest-dir",
    )
