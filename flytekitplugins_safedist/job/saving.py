"""This node's part in letting all ranks of the job save at one step: between the coordinator and the ranks' pages.

It never waits for a rank, so ranks may be anywhere (:mod:`..ranks.shared_page`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..ranks.shared_page import AgentPage
from .messages import AllSaved, Answer, Asks, Floor, Gather, Listens, Message, Preempted, Saved

_STORES_DRAIN = 0.005
"""Seconds from calling the ranks to reading their floors. A processor may hold a store back while it already loads; it
does so for nanoseconds."""


class RoundSaving:
    """One round.

    Args:
        round_no: its number.
        pages: of this node's ranks.
        tell: takes what the coordinator is to hear.
        say: takes a sentence for the node's log.
    """

    def __init__(
        self,
        round_no: int,
        pages: Sequence[AgentPage],
        tell: Callable[[Message], object],
        say: Callable[[str], object],
    ) -> None:
        self._round = round_no
        self._pages = pages
        self._tell = tell
        self._say = say
        self._listening = False
        self._asked = 0
        self._answer: Answer | None = None
        self._asks = self._preempted = False
        self.settled = False
        """Whether a preemption has been dealt with by every rank of the job, as far as it can be."""

    @property
    def listens(self) -> bool:
        """Whether a rank here would do something about a preemption."""
        return any(page.listens for page in self._pages)

    def look(self) -> None:
        """Called again and again: pass on what the ranks have written on their pages."""
        if not self._listening and self.listens:
            self._listening = True
            self._tell(Listens(self._round))
        asked = sum(page.asked for page in self._pages)
        if asked != self._asked:
            self._asked = asked
            self._asks = True
            self._tell(Asks(self._round))
        answer = self._answer
        if answer is not None and all(page.finished(answer.call, urgent=answer.urgent) for page in self._pages):
            self._answer = None
            self._tell(Saved(self._round, answer.call))

    def again(self) -> None:
        """The connection is a new one: say again what may have been lost with the one before."""
        if self._listening:
            self._tell(Listens(self._round))
        if self._preempted:
            self._tell(Preempted(self._round))
        elif self._asks:
            self._tell(Asks(self._round))

    def preempt(self) -> None:
        """This node is told to stop."""
        self.look()  # what a rank has written a moment ago
        self._preempted = True
        self._tell(Preempted(self._round))

    def heard(self, message: Gather | Answer | AllSaved) -> None:
        """What the coordinator says; of another round, nothing."""
        if message.round != self._round:
            return
        if isinstance(message, Gather):
            for page in self._pages:
                page.call(message.call)
            time.sleep(_STORES_DRAIN)
            # Whoever asks from here on may be past the step, and is answered anew.
            self._asks = False
            self._asked = sum(page.asked for page in self._pages)
            floors = [floor for page in self._pages if (floor := page.floor) is not None]
            self._tell(Floor(self._round, message.call, max(floors, default=None)))
        elif isinstance(message, Answer):
            self._answered(message)
        else:
            self.settled = self.settled or message.urgent

    def _answered(self, answer: Answer) -> None:
        self._answer = answer
        for page in self._pages:
            if answer.urgent:
                page.preempt()
            page.answer(answer.call, answer.step, urgent=answer.urgent)
        if answer.urgent:
            at = "no rank saves by steps" if answer.step is None else f"all ranks save at step {answer.step}"
            self._say(f"a node was told to stop: {at}")
