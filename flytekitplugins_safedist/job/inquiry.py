"""A suspicion that the job hangs, as the coordinator follows it up: evidence from all nodes, twice, a verdict.

Nothing is done at a suspicion, and nothing at one look: the next one, some seconds later, must show the same ranks in
the same operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..hangs.judge import Hang, judge
from ..hangs.picture import text
from ..hangs.snapshot import Snapshot
from .hang_messages import Look
from .messages import Message
from .nodes import Key

ANSWER_SECONDS = 10.0
"""For every node to say what its ranks do. One that is silent for longer is judged by its heartbeats."""

CONFIRM_SECONDS = 3.0
"""Between two looks that must agree."""

AGAIN_SECONDS = 30.0
"""After a hang that was found, and is not ended: at least."""

_MOST_MISSES = 4
"""Doublings of that pause, while each look shows another hang: most likely the job moves."""

_PICTURE_LINES = 60
_EVIDENCE_CHARACTERS = 1 << 19
"""They fit one message (:data:`..frames.NODE_BYTES`), also where each takes four bytes."""


@dataclass(frozen=True)
class Found:
    """A hang that two looks show.

    Attributes:
        hang: what they show.
        node: of the rank that is to fail for it.
        is_news: it is to be told: not again so soon.
    """

    hang: Hang
    node: Key
    is_news: bool


def in_a_thread(work: Callable[[], None]) -> None:
    """Thousands of ranks take a second: the coordinator hears its nodes meanwhile."""
    threading.Thread(target=work, name="safedist-judge", daemon=True).start()


class Inquiry:
    """One round.

    Args:
        round_no: its number.
        members: its nodes.
        tell_all: takes a message for all of them.
        run: has a function run that judges.
    """

    def __init__(
        self,
        round_no: int,
        members: Collection[Key],
        tell_all: Callable[[Message], None],
        run: Callable[[Callable[[], None]], object] = in_a_thread,
    ) -> None:
        self._round = round_no
        self._members = set(members)
        self._tell_all = tell_all
        self._run = run
        self._number = 0
        self._seen: dict[Key, tuple[Snapshot, ...]] = {}
        self._asked: float | None = None
        self._again = 0.0
        self._rest = 0.0
        self._suspected = self._is_urgent = False
        self._before: Hang | None = None
        self._news: tuple[str, float] = ("", 0.0)
        self._judged: list[Hang | None] = []
        self._misses = 0
        self._judges = False

    def stalled(self, is_urgent: bool, now: float) -> None:  # noqa: FBT001
        """A rank has waited for longer than it should; said again while it does."""
        self._suspected, self._is_urgent = True, self._is_urgent or is_urgent
        self.tick(now)

    def tick(self, now: float) -> Found | None:
        """Ask, where it is time; a hang, where the second look at it has been judged."""
        if self._asked is not None and now - self._asked > ANSWER_SECONDS:
            self._asked, self._before, self._suspected, self._is_urgent = None, None, False, False
        is_free = self._asked is None and not self._judges and now >= self._again
        is_due = self._suspected and (self._is_urgent or now >= self._rest)
        if is_free and (is_due or self._before is not None):
            self._number += 1
            self._asked, self._seen = now, {}
            self._tell_all(Look(self._round, self._number))
        return self._confirmed(now) if self._judged else None

    def seen(self, node: Key, number: int, snapshots: tuple[Snapshot, ...], now: float) -> Found | None:
        """What the ranks of a node do; where this is the last node's, it is judged."""
        if number != self._number or self._asked is None:
            return None
        self._seen[node] = snapshots
        if self._seen.keys() != self._members:
            return None
        self._asked, self._suspected, self._is_urgent, self._judges = None, False, False, True
        everybody = sorted((each for some in self._seen.values() for each in some), key=lambda each: each.rank)
        self._run(lambda: self._judged.append(_with_text(judge(everybody), everybody)))
        return self.tick(now)

    def _confirmed(self, now: float) -> Found | None:
        self._judges = False
        before, hang = self._before, self._judged.pop()
        self._before = hang
        is_other = hang is not None and before is not None and hang.key != before.key
        self._misses = min(self._misses + 1, _MOST_MISSES) if is_other else 0
        self._again = now + CONFIRM_SECONDS * 2**self._misses
        if hang is None or before is None or is_other:
            return None
        self._before = None
        self._again, self._rest = now + AGAIN_SECONDS, now + max(AGAIN_SECONDS, hang.seconds / 2)
        is_news = self._news[0] != hang.key or now >= self._news[1]
        if is_news:
            self._news = hang.key, self._rest
        homes = {each.rank: node for node, some in self._seen.items() for each in some}
        return Found(hang, homes[hang.rank], is_news)


def _with_text(hang: Hang | None, everybody: list[Snapshot]) -> Hang | None:
    if hang is None:
        return None
    main = [replace(each, threads=each.threads[:1]) for each in everybody]
    picture = "\n".join(text(main).splitlines()[:_PICTURE_LINES])
    evidence = text(everybody, whole=True)
    if len(evidence) > _EVIDENCE_CHARACTERS:
        evidence = f"{evidence[:_EVIDENCE_CHARACTERS]}\n[cut: {len(evidence)} characters in all]"
    return replace(hang, picture=picture, evidence=evidence)
