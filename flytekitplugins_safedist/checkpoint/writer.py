"""The thread that writes saves: one at a time, beside the training."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable

from ..ranks import context

logger = logging.getLogger(__name__)

SAY_AFTER_SECONDS = 0.05
"""A wait for the save before is said in the log from here on."""


class Writer:
    """At most one save in flight."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._label = ""
        self._failed: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, label: str, work: Callable[[], None]) -> None:
        """Write a save; the one before must have ended (:meth:`drain`).

        What it raises is said in the log, and kept for :meth:`taken_failure` unless a later save succeeds.
        """
        self._label, self._began = label, time.monotonic()
        # Not a daemon: an interpreter that ends in good order waits for the save in flight.
        # In the caller's context: flytekit's way to the store, credentials and all, is found through it.
        inside = contextvars.copy_context()
        self._thread = threading.Thread(target=inside.run, args=(self._run, label, work), name="safedist-checkpoint")
        self._thread.start()

    @context.saving(background=True)
    def _run(self, label: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the training must not end by it, and it must not be lost
            self._failed = error
            logger.warning(
                f"the save of {label} failed; what was committed before stays: {type(error).__name__}: {error}"
            )
        else:
            self._failed = None

    def drain(self, because: str) -> None:
        """Wait until nothing is in flight, whatever becomes of it; said in the log where it takes a while."""
        thread = self._thread
        if thread is None:
            return
        thread.join(SAY_AFTER_SECONDS)
        if thread.is_alive():
            under_way = time.monotonic() - self._began
            logger.info(
                f"{because} waits for the save of {self._label}, which has been under way for {under_way:.1f} s"
            )
            thread.join()

    def taken_failure(self) -> BaseException | None:
        """What the last save failed with; told once."""
        failed, self._failed = self._failed, None
        return failed
