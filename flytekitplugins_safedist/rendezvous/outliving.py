"""What a node keeps from one store of its job to the next, and for how long it looks for the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ..errors import StoreLostError
from . import strangers
from .carried import Carried, Unit, change
from .protocol import End
from .vigil import Vigil

logger = logging.getLogger(__name__)


class Outliving:
    """One node's copy of what its job knows, and its search for a store after the one that was lost.

    Args:
        who: holds the store, for messages.
        seconds: that a search, with the round that follows, may take.
    """

    def __init__(self, who: str, seconds: float) -> None:
        self.say: Callable[[str], object] = logger.info
        self.carried = Carried()
        self.vigil: Vigil | None = None  # from the loss of a store until a round has come together
        self.failed: End | None = None  # an end that was to be uploaded when the store was lost
        self._who = who
        self._seconds = seconds
        self._why = ""

    def deadline(self) -> float:
        """When the next round must have come together (``time.monotonic``): losses in a row move it no further."""
        return time.monotonic() + self._seconds if self.vigil is None else self.vigil.deadline

    def lose(self, error: StoreLostError, round_no: int) -> None:
        """The store is lost; ``round_no`` is the highest round that may have begun there, as far as this node knows: -1
        where it had arrived in none, for without it none could begin."""
        if strangers.met(error):
            logger.warning(str(error))
        if self.vigil is None:
            self.vigil = Vigil(self._who, self._seconds, self.say)
            self._why = f"{error.what}: {error.seen}"
        self.carried = self.carried.reached(round_no)

    def left(self, store: str) -> None:
        """Another store has taken the place of ``store``."""
        lost = Unit(time.time_ns(), f"{self._who} was lost: {self._why}")
        self.carried = self.carried.without_store(store, lost)

    def learn(self, known: Carried) -> None:
        """Keep what a store knows."""
        self.carried = self.carried.merge(known)

    def bring(self, store: Any, key: str) -> Carried:
        """Tell a store what the job knows; returns what it knows then. One call of a raw store."""
        self.learn(change(store, key, self.carried.merge))
        return self.carried

    def settle(self, known: Carried) -> None:
        """A round has come together."""
        self.learn(known)
        self.vigil, self.failed = None, None

    def note(self, end: End | None) -> None:
        """The job was seen to have ended, or not."""
        if end is not None and end.kind == "failed":
            self.failed = end
