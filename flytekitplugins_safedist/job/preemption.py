"""What an agent does between being told to stop and leaving: it lets the ranks of the whole job save first."""

from __future__ import annotations

import signal
import time

from torch.distributed.elastic.multiprocessing.api import SignalException

from .agreement import Agreement


class Preemption:
    """Whether this node was told to stop, and how long it stays.

    Args:
        seconds: at most so long after the signal.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._agreement: Agreement | None = None
        self._leaves_at: float | None = None

    @property
    def pending(self) -> bool:
        """Whether this node was told to stop and stays for a moment."""
        return self._leaves_at is not None

    def begin(self, agreement: Agreement) -> None:
        """A round begins: its ranks may save together from now on."""
        self._agreement = agreement
        agreement.start()

    def end(self) -> None:
        """The round is over here."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.stop()

    def defer(self, number: int) -> float:
        """The signal ``number`` has come; called in its handler. Seconds that this node may stay; 0 to leave at once.

        Only SIGTERM is deferred, which is what Kubernetes sends before it takes a pod away, and only where a rank would
        do something about it. Who presses Ctrl-C wants the end now.
        """
        agreement = self._agreement
        if number != signal.SIGTERM or agreement is None or not self._seconds or not agreement.is_listened_to():
            return 0.0
        self._leaves_at = time.monotonic() + self._seconds
        agreement.preempt()
        return self._seconds

    def leave_when_saved(self) -> None:
        """Called again and again while ranks run: leave once all ranks of the job have saved, or time is up.

        Raises:
            SignalException: the signal that was deferred.
        """
        agreement = self._agreement
        if self._leaves_at is None:
            return
        if agreement is None or agreement.settled or time.monotonic() >= self._leaves_at:
            self.leave()

    def leave(self) -> None:
        """Called when the round is over here: there is nothing left to wait for.

        Raises:
            SignalException: the signal that was deferred, if one was.
        """
        if self._leaves_at is not None:
            raise SignalException("told to stop before", sigval=signal.SIGTERM)
