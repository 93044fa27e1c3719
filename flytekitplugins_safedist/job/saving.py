"""All ranks of a round save at one step: because one asked, or because a node is told to stop.

The coordinator calls all nodes; each answers with its floor, the first step that none of its ranks has passed; the
highest floor is the step at which all save. Nobody waits for a rank to get anywhere, so ranks may be in native code
(:mod:`..rank.shared_page`). Both sides are here: the coordinator's, which is pure, and a node's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING

from .messages import AllSaved, Answer, Asks, Floor, Gather, Listens, Message, Preempted, Saved

if TYPE_CHECKING:
    from ..rank.shared_page import AgentPage

Tell = Callable[[Message], None]
_STORES_DRAIN = 0.005
"""Seconds from calling the ranks to reading their floors. A processor may hold a store back while it already loads; it
does so for nanoseconds."""


class SavePoint:
    """The coordinator's side, in one round.

    Args:
        round_no: its number.
        members: its nodes.
        tell_all: takes a message for all of them.
    """

    def __init__(self, round_no: int, members: Collection[Hashable], tell_all: Tell) -> None:
        self._round = round_no
        self._waits_for = set(members)
        self._tell_all = tell_all
        self._listening: set[Hashable] = set()
        self._floors: dict[Hashable, int | None] = {}
        self._saved: set[Hashable] = set()
        self._call = 0
        self._answer: Answer | None = None
        self._open = False
        self._asked_again = False
        self._preempted = False
        self._settled = False

    def listens(self, node: Hashable) -> None:
        """A rank of this node would save when the job is preempted."""
        self._listening.add(node)

    def asks(self) -> None:
        """A rank wants a save."""
        if self._open:
            self._asked_again = True
        else:
            self._begin()

    def preempted(self) -> None:
        """A node is told to stop, and waits for this."""
        self._preempted = True
        if not self._listening or self._settled:
            self._tell_all(AllSaved(self._round, self._call, urgent=True))
        elif not self._open:
            self._begin()

    def floor(self, node: Hashable, call: int, step: int | None) -> None:
        """The answer of a node to a call."""
        if self._open and call == self._call and self._answer is None:
            self._floors[node] = step
            self._advance()

    def saved(self, node: Hashable, call: int) -> None:
        """Every rank of a node has done what was asked."""
        if self._open and call == self._call:
            self._saved.add(node)
            self._advance()

    def done(self, node: Hashable) -> None:
        """The ranks of a node have returned: nobody waits for it."""
        self._waits_for.discard(node)
        self._listening.discard(node)
        self._advance()

    def again(self, tell: Tell) -> None:
        """A node's connection is a new one: what it was told may have been lost, and what it said."""
        if self._open:
            tell(self._answer or Gather(self._round, self._call))
        elif self._settled:
            tell(AllSaved(self._round, self._call, urgent=True))

    def _begin(self) -> None:
        self._call += 1
        self._open, self._answer, self._asked_again = True, None, False
        self._floors.clear()
        self._saved.clear()
        self._tell_all(Gather(self._round, self._call))
        self._advance()

    def _advance(self) -> None:
        if not self._open:
            return
        if self._answer is None and self._waits_for <= self._floors.keys():
            floors = [step for step in self._floors.values() if step is not None]
            self._answer = Answer(self._round, self._call, max(floors, default=None), urgent=self._preempted)
            self._tell_all(self._answer)
        if self._answer is not None and self._waits_for <= self._saved:
            self._open = False
            urgent = self._answer.urgent
            self._settled = self._settled or urgent
            self._tell_all(AllSaved(self._round, self._call, urgent=urgent))
            if self._asked_again or (self._preempted and not urgent):
                self._begin()


class RoundSaving:
    """A node's side, in one round: between the coordinator and the pages that its ranks share with it.

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
