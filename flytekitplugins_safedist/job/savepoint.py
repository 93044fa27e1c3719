"""All ranks of a round save at one step: because one asked, or because a node is told to stop. Pure.

The coordinator calls all nodes; each answers with its floor, the first step that none of its ranks has passed; the
highest floor is the step at which all save. Nobody waits for a rank to get anywhere (:mod:`..ranks.shared_page`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

from .messages import AllSaved, Answer, Gather, Message

Tell = Callable[[Message], None]


class SavePoint:
    """One round.

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
