"""A suspicion that the ranks of a round hang: all nodes take a picture of theirs, twice. Pure.

Nothing is done at a suspicion, and nothing at one picture: the next one, some seconds later, must show the same. Whose
fault it is is judged elsewhere (it takes a while): this says when to look, and what two judgements come to.
"""

from __future__ import annotations

from collections.abc import Collection

from .messages import HangNotice, Status

ANSWER_SECONDS = 10.0
"""For every node to take its picture. One that is silent for longer is judged by its heartbeats."""

CONFIRM_SECONDS = 3.0
"""Between two pictures that must agree."""


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
        self._next = float("-inf")
        self._before: HangNotice | None = None

    def on_status(self, status: Status) -> None:
        """A member says how it is in this round."""
        if status.stall:
            self._stalls[status.process] = status.stall
        else:
            self._stalls.pop(status.process, None)
        if status.looked == self.look:
            self._missing.discard(status.process)

    def on_leave(self, process: str) -> None:
        """A member is lost."""
        self._stalls.pop(process, None)
        self._missing.discard(process)

    def is_due(self, now: float) -> bool:
        """Whether a picture is to be taken now (:meth:`begin`). One that is not complete in time shows nothing."""
        if self._since is not None and now - self._since > ANSWER_SECONDS:
            self._since, self._before, self._next = None, None, now + CONFIRM_SECONDS
        is_free = self._since is None and self._is_judged and now >= self._next
        return is_free and bool(self._stalls or self._before)

    def begin(self, there: Collection[str], now: float) -> None:
        """Have the members that are there take a picture."""
        self.look, self._since, self._missing = self.look + 1, now, set(there)

    def complete(self) -> int:
        """Number of a look of which all pictures are there, once; 0 where none is: judge it, then :meth:`on_hang`."""
        if self._since is None or self._missing:
            return 0
        self._since, self._is_judged = None, False
        return self.look

    def on_hang(self, hang: HangNotice | None, now: float) -> None:
        """What a look has shown; None where the job moves, or nobody can say."""
        self._is_judged, self._next = True, now + CONFIRM_SECONDS
        before, self._before = self._before, hang
        if hang is not None and before is not None and hang.key == before.key:
            self.hang, self._before = hang, None
            # Where nothing is done about it: not again so soon.
            self._next = now + max(10 * CONFIRM_SECONDS, max(self._stalls.values(), default=0.0) / 2)
