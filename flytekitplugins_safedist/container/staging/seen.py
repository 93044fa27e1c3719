"""Which files of a staged tree were read before and have not changed since, so that they need not be read again.

Comparing a tree with its checksums costs about a millisecond for each megabyte; asking for the state of its files, some
microseconds for each file. Nobody can set a file's change time: writing, chmod, utime, rename and link all move it. So
a file that was read after its last change, and is still the same inode with the same change time, holds what was read.

"After" is told by the file system's own clock, which may tick seldom (milliseconds, on some file systems seconds): two
changes within one tick show one time. Before anything is read a file is made; only what had changed in an earlier tick
than that one's is noted. Linking a file into a destination, and removing that link, are changes too: what lay in a
destination that is gone is read once more.
"""

# ruff: noqa: PTH104
# renamed as everything here is

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .locks import WorkDir

_NAME = "seen"
_NEVER = -(1 << 63)
"""A time before every change: where no file can be made, nothing is noted."""


class Seen:
    """The files of one tree, by their place in its manifest.

    Args:
        tree: the directory of the tree; what was found out is kept in it.
        files: how many entries there are.
        work: makes a private directory on the same file system.
    """

    def __init__(self, tree: Path, files: int, work: Callable[[], WorkDir]) -> None:
        self._path = tree / _NAME
        self._work = work
        self._states = _kept(self._path, files)
        self._clock: int | None = None

    def holds(self, index: int, found: os.stat_result, read: Callable[[], bool]) -> bool:
        """Whether the file is what it was, by its state, or by what *read* says.

        Args:
            index: of the file.
            found: its state, asked for before this.
            read: compares its content.

        Raises:
            OSError: it cannot be read.
        """
        state = [found.st_ino, found.st_ctime_ns]
        if self._states[index] == state:
            return True
        if self._clock is None:
            self._clock = self._ticked()
        if not read():
            return False
        self._states[index] = state if found.st_ctime_ns < self._clock else None
        return True

    def keep(self) -> None:
        """Note what was read, for those who come later; it only saves them work."""
        if self._clock is None:
            return
        with suppress(OSError), self._work() as work:
            note = work.path / _NAME
            note.write_text(json.dumps(self._states, separators=(",", ":")), encoding="utf-8")
            os.rename(note, self._path)  # replaced whole, as the states of another reader may be

    def _ticked(self) -> int:
        with suppress(OSError), self._work() as work, (work.path / "clock").open("xb") as probe:
            return os.fstat(probe.fileno()).st_ctime_ns
        return _NEVER


def _kept(path: Path, files: int) -> list[list[int] | None]:
    try:
        states = json.loads(path.read_bytes())
    except (OSError, ValueError):
        states = None
    return states if isinstance(states, list) and len(states) == files else [None] * files
