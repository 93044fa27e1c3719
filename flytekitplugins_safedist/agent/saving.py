"""A save by all ranks at one step, on one node: between its policy and the pages that its ranks share with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..coordinator.messages import Floor
from .actions import Action, SaveAt
from .policy import NodePolicy

if TYPE_CHECKING:
    from ..rank.shared_page import AgentPage

_STORES_DRAIN = 0.005
"""Seconds from calling the ranks to reading their floors. A processor may hold a store back while it already loads; it
does so for nanoseconds."""


class RoundSaving:
    """In one round.

    Args:
        pages: of this node's ranks.
        policy: decides.
        act: takes what it decides.
    """

    def __init__(
        self, pages: Sequence[AgentPage], policy: NodePolicy, act: Callable[[Sequence[Action]], object]
    ) -> None:
        self._pages = pages
        self._policy = policy
        self._act = act
        self._count = 0
        self._have_left = False
        self._save: SaveAt | None = None

    def look(self) -> None:
        """Called again and again: pass on what the ranks have written on their pages."""
        now = time.monotonic()
        if self._listens and not self._policy.status.listens:
            self._act(self._policy.on_fact(now, listens=True))
        count = sum(page.asked for page in self._pages)
        if count != self._count:
            self._count = count
            self._act(self._policy.on_ask(now))
        save = self._save
        has_saved = save is not None and all(page.finished(save.call, urgent=save.is_urgent) for page in self._pages)
        have_left = all(page.left for page in self._pages)  # after that: a rank that leaves has nothing to save
        if have_left and not self._have_left:
            self._have_left = True
            self._act(self._policy.on_left(now))
        if save is None or (save.is_urgent and have_left):
            return  # they are to return, which is more than a save: a pod must not leave before that
        if has_saved:
            self._save = None
            self._act(self._policy.on_fact(now, saved=save.call))

    def call(self, number: int) -> None:
        """Each rank says the first step that it has not passed, and does not pass it; and whether it would save."""
        for page in self._pages:
            page.call(number)
        time.sleep(_STORES_DRAIN)
        # Whoever asks from here on may be past the step, and is answered anew.
        self._count = sum(page.asked for page in self._pages)
        floors = [floor for page in self._pages if (floor := page.floor) is not None]
        answer = Floor(number, max(floors, default=-1))
        self._act(self._policy.on_fact(time.monotonic(), floor=answer, listens=self._listens))

    def save(self, save: SaveAt) -> None:
        """All ranks save at this step."""
        self._save = save
        for page in self._pages:
            if save.is_urgent:
                page.preempt()
            step = save.step if save.step >= 0 else None
            page.answer(save.call, step, urgent=save.is_urgent, forced=save.is_forced)

    @property
    def _listens(self) -> bool:
        return self._policy.status.listens or any(page.listens for page in self._pages)
