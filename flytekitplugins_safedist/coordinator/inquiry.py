"""When the nodes of a round take pictures of their ranks, because one of these has waited for too long. Pure.

Nothing is done at a suspicion, and nothing at one picture: the next one, some seconds later, must show the same. Whose
fault it is is judged elsewhere (it takes a while): this says when to look, and what two judgements come to.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .messages import HangNotice, Status

ANSWER_SECONDS = 20.0
"""For every node to take its picture: ten are needed where a rank does not answer at all. One that is silent for longer
is judged by its heartbeats."""

CONFIRM_SECONDS = 3.0
"""Between two pictures that must agree."""

AGAIN_SECONDS = 30.0
"""After a hang that was found, and is not ended: at least."""

_MOST_MISSES = 4
"""Doublings of that pause, while each picture shows another hang: most likely the job moves."""


class Inquiry:
    """That of one round."""

    def __init__(self) -> None:
        self.look = 0
        """Number of the picture that is to be taken; 0 for none so far."""
        self.hang: HangNotice | None = None
        """What two pictures have shown."""
        self._stalls: dict[str, float] = {}
        self._missing: set[str] = set()
        self._since: float | None = None  # when the picture was asked for, while it is not complete
        self._is_judged = True
        self._is_suspected = self._is_urgent = False  # since the last picture that was judged
        self._next = self._next_calm = float("-inf")
        self._before: HangNotice | None = None
        self._misses = 0
        self._news = "", 0.0

    def on_status(self, status: Status) -> None:
        """A member says how it is in this round. A wait that goes on is another number at each look of its node."""
        if status.stall and status.stall != self._stalls.get(status.process):
            self._is_suspected, self._is_urgent = True, self._is_urgent or status.is_urgent
        self._stalls[status.process] = status.stall
        if status.looked == self.look:
            self._missing.discard(status.process)

    def on_leave(self, process: str) -> None:
        """A member is lost."""
        self._stalls.pop(process, None)
        self._missing.discard(process)

    def is_due(self, now: float) -> bool:
        """Whether a picture is to be taken now (:meth:`begin`). One that is not complete in time shows nothing."""
        if self._since is not None and now - self._since > ANSWER_SECONDS:
            self._since, self._before, self._is_suspected, self._is_urgent = None, None, False, False
        is_free = self._since is None and self._is_judged and now >= self._next
        is_wanted = self._is_suspected and (self._is_urgent or now >= self._next_calm)
        return is_free and (is_wanted or self._before is not None)

    def begin(self, there: Collection[str], now: float) -> None:
        """Have these members take a picture: all that are not lost for good."""
        self.look, self._since, self._missing = self.look + 1, now, set(there)

    def complete(self) -> int:
        """Number of a look of which all pictures are there, once; 0 where none is: judge it, then :meth:`on_hang`."""
        if self._since is None or self._missing:
            return 0
        self._since, self._is_judged, self._is_suspected, self._is_urgent = None, False, False, False
        return self.look

    def on_hang(self, hang: HangNotice | None, now: float) -> None:
        """What a look has shown; None where the job moves, or nobody can say."""
        self._is_judged = True
        before, self._before = self._before, hang
        is_other = hang is not None and before is not None and hang.key != before.key
        self._misses = min(self._misses + 1, _MOST_MISSES) if is_other else 0
        self._next = now + CONFIRM_SECONDS * 2**self._misses
        if hang is not None and before is not None and not is_other:
            is_news = hang.key != self._news[0] or now >= self._news[1]
            self.hang, self._before = replace(hang, is_news=is_news), None
            # Where nothing is done about it: not again so soon.
            self._next, self._next_calm = now + AGAIN_SECONDS, now + max(AGAIN_SECONDS, hang.seconds / 2)
            self._news = (hang.key, self._next_calm) if is_news else self._news
