"""A suspicion that the job hangs, as the coordinator follows it up: evidence from all nodes, twice, a verdict. Pure.

Nothing is done at a suspicion, and nothing at one picture: the next one, some seconds later, must show the same ranks
in the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..diagnosis.picture import Standing, told
from ..diagnosis.verdict import Hang, judge
from .hang_messages import Look
from .messages import Message
from .nodes import Key

ANSWER_SECONDS = 10.0
"""For every node to say what its ranks do. One that is silent for longer is judged by its heartbeats."""

CONFIRM_SECONDS = 3.0
"""Between two pictures that must agree."""

_PICTURE_LINES = 60
_EVIDENCE_CHARACTERS = 1 << 19
"""They fit one message (:data:`..frames.NODE_BYTES`), also where each takes four bytes."""


@dataclass(frozen=True)
class Found:
    """A hang that two pictures show.

    Attributes:
        hang: who holds up whom.
        node: of the rank that is to fail for it.
        rank: that is to fail for it: the first culprit, or the first that waits where nobody is one.
        waited: seconds.
        picture: all ranks, as text.
        evidence: the same with all that was seen of them.
    """

    hang: Hang
    node: Key
    rank: int
    waited: float
    picture: str
    evidence: str


class Inquiry:
    """One round.

    Args:
        round_no: its number.
        members: its nodes.
        tell_all: takes a message for all of them.
    """

    def __init__(self, round_no: int, members: Collection[Key], tell_all: Callable[[Message], None]) -> None:
        self._round = round_no
        self._members = set(members)
        self._tell_all = tell_all
        self._number = 0
        self._seen: dict[Key, tuple[Standing, ...]] = {}
        self._asked: float | None = None
        self._again = 0.0
        self._suspected = False
        self._waited = 0.0
        self._before: Hang | None = None

    def stalled(self, waited: float, now: float) -> None:
        """A rank has waited in a collective for longer than it should; said again while it does."""
        self._waited, self._suspected = waited, True
        self.tick(now)

    def tick(self, now: float) -> None:
        """Ask, where it is time."""
        if self._asked is not None and now - self._asked > ANSWER_SECONDS:
            self._asked, self._before, self._suspected = None, None, False
        if self._asked is None and now >= self._again and (self._suspected or self._before is not None):
            self._number += 1
            self._asked, self._seen = now, {}
            self._tell_all(Look(self._round, self._number))

    def seen(self, node: Key, number: int, standing: tuple[Standing, ...], now: float) -> Found | None:
        """What the ranks of a node do; a hang, where this is the last node's and confirms one."""
        if number != self._number or self._asked is None:
            return None
        self._seen[node] = standing
        if self._seen.keys() != self._members:
            return None
        self._asked, self._suspected = None, False
        everybody = sorted((each for some in self._seen.values() for each in some), key=lambda each: each.rank)
        before, self._before = self._before, judge(everybody)
        hang = self._before
        self._again = now + CONFIRM_SECONDS
        if hang is None or before is None or hang.key != before.key:
            return None
        self._before = None
        self._again = now + max(10 * CONFIRM_SECONDS, self._waited / 2)  # where nothing is done: not again so soon
        rank = (hang.culprits or hang.waiting)[0]
        home = next(node for node, some in self._seen.items() if any(each.rank == rank for each in some))
        main = [replace(each, threads=each.threads[:1]) for each in everybody]
        picture = "\n".join(told(main).splitlines()[:_PICTURE_LINES])
        evidence = told(everybody, whole=True)
        if len(evidence) > _EVIDENCE_CHARACTERS:
            evidence = f"{evidence[:_EVIDENCE_CHARACTERS]}\n[cut: {len(evidence)} characters in all]"
        return Found(hang, home, rank, self._waited + CONFIRM_SECONDS, picture, evidence)
