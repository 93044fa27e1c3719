"""When what was asked of a store is tried again: the table of failures says what its error means."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import StorageError
from ..failures import Outlook, decisive, outlook, word_of_a_store
from ..jitter import jittered
from ..texts import public

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Retry:
    """When something that is asked of a store is tried again: while its error may pass, and for a time.

    The one for uploads, the task's code and checkpoints. Pauses double, and are jittered: all nodes of a job meet the
    same outage.

    Args:
        seconds: how long to go on after the first failure.
        first, longest: of the pauses, in seconds.
        clock: of seconds.
    """

    def __init__(
        self, seconds: float, *, first: float = 1.0, longest: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._pause, self._longest, self._clock = seconds, first, longest, clock
        self._end: float | None = None

    def left(self) -> float:
        """Seconds for which it is still tried."""
        return self._seconds if self._end is None else self._end - self._clock()

    def pause(self, error: BaseException) -> float | None:
        """Seconds to wait before the next try; None: the error will not pass, or the time is over."""
        self._end = self._clock() + self._seconds if self._end is None else self._end
        left = self.left()
        if outlook(error) is not Outlook.TRANSIENT or left <= 0:
            return None
        pause = min(jittered(self._pause, 0.5, 1.0), left)
        self._pause = min(self._pause * 2, self._longest)
        return pause


def outlasting(action: Callable[[], T], what: str, retry: Retry, *, tell: bool = True) -> T:
    """What ``action`` returns; again as long as a store is away. It may be any code that moves data to or from one, the
    user's types' own included: what is not known to be a store's error is theirs, and raised as it is.

    Args:
        action: may be done again from the beginning.
        what: it does, for the log.
        retry: for how long.
        tell: whether to say that it is tried again.

    Raises:
        StorageError: the store stayed away, or refuses.
    """
    while True:
        try:
            return action()
        except Exception as error:
            if word_of_a_store(error) not in (Outlook.TRANSIENT, Outlook.DENIED):
                raise
            pause = retry.pause(error)
            if pause is None:
                hint = "check the store's health, the pod's network and its credentials"
                raise StorageError(f"{what} failed", seen=one_line(decisive(error)), hint=hint) from error
            if tell:
                left = f"{pause:.1f} s, for {retry.left():.0f} s more"
                logger.info(f"{what} failed: {one_line(decisive(error))}; trying again in {left}")
            time.sleep(pause)


def one_line(error: BaseException) -> str:
    """``error`` with its type in at most 300 characters, without secrets."""
    text = public(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 300 else text[:297] + "..."
