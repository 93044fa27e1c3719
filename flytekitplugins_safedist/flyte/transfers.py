"""How far a long download or upload is: a line of the log every ten seconds, and none where it takes less."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK, Callback

from ..handoff import Slot
from ..texts import how_far, public

logger = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""Between two lines."""

SILENT: Slot[bool] = Slot()
"""Another rank of this node says it: from the rank."""


def followed(what: str, address: str) -> Callback:
    """What fsspec is to tell of one download or upload. One rank of a node says it for all, which take the same."""
    return DEFAULT_CALLBACK if SILENT.value else Transfer(f"{what} {public(address)}")


class Transfer(Callback):  # type: ignore[misc]  # fsspec is untyped to mypy here
    """Of one file, or of all in a directory.

    Args:
        what: it is, for the log.
        clock: tells seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._what, self._clock = what, clock
        self._began = self._told = clock()
        self._bytes, self._known = 0, 0

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
        """What is told of one of the files."""
        return _OfFile(self)

    def come(self, new: int, known: int = 0) -> None:
        """Bytes have come, or are *known* to be there."""
        self._bytes, self._known = self._bytes + new, self._known + known
        now = self._clock()
        if now - self._told < TELL_SECONDS:
            return
        self._told, files = now, self.size or 1
        of_files = f"{self.value} of {files} files, " if files > 1 else ""
        told = how_far(self._bytes, self._known if files == 1 and self._known else None, now - self._began)
        logger.info(f"{self._what}: {of_files}{told}")


class _OfFile(Callback):  # type: ignore[misc]
    def __init__(self, whole: Transfer) -> None:
        super().__init__()
        self._whole = whole

    def set_size(self, size: int | None) -> None:
        self._whole.come(0, size or 0)

    def relative_update(self, inc: int = 1) -> None:
        self._whole.come(inc)
