"""The thread that shows that a node is alive, and that finds out what an agent may then ask without ever blocking."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from ..errors import RendezvousError


class Heartbeat(ABC):
    """A thread that beats, and looks, every ``interval`` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._stopped = threading.Event()
        self._wake = threading.Event()
        # Written by the thread only, read by any: a single reference, so no lock.
        self._trouble: RendezvousError | None = None

    def begin(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="safedist-watch", daemon=True).start()

    def check(self) -> None:
        """Raise what was found out; never blocks.

        Raises:
            GroupClosedError, RendezvousTimeoutError: the job has ended.
            FencedError: another process took this node's place.
            StoreLostError: the store's host is gone, or has not replied for so long that a heartbeat was given up.
        """
        trouble = self._trouble
        if trouble is not None:
            raise trouble

    @abstractmethod
    def moved(self) -> bool:
        """Whether the round that the node runs in is to be left, or has been left by the others."""

    def stop(self) -> None:
        """Stop beating. Returns at once; a call that hangs is abandoned."""
        self._stopped.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except RendezvousError as error:
                if not self._stopped.is_set():
                    self._trouble = error
                return
            self._wake.wait(self._interval)
            self._wake.clear()

    @abstractmethod
    def _look(self) -> None:
        """Beat once, and look."""
