"""All ranks of a round save at one step: because one asks, a node is told to stop, or another joins. Pure.

The coordinator calls all nodes; each answers with its floor, the first step that none of its ranks has passed; the
highest floor is the step at which all save. Nobody waits for a rank to get anywhere, so ranks may be in native code.
Whether a rank would save at all is known when all have answered, and not before: a node says it as it is called.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .messages import Save, Status


class RoundSaves:
    """The saves of one round.

    Args:
        members: its processes.
    """

    def __init__(self, members: Collection[str]) -> None:
        self._there = set(members)
        self._silent = set(members)  # of those, who has not begun in this round: nobody knows what its ranks would do
        self._missing: set[str] = set()  # and who has not answered yet
        self._listeners: set[str] = set()
        self._preempted: set[str] = set()
        self._asks = 0  # the latest call that a rank wants
        self._forced = 0  # and the latest that is made though none is due
        self._highest = -1  # floor
        self.save: Save | None = None
        """The latest."""

    def on_status(self, status: Status) -> None:
        """A member says how it is in this round, and its ranks run."""
        process = status.process
        if process not in self._there:
            return
        self._silent.discard(process)
        self._asks = max(self._asks, status.asks)
        (self._listeners.add if status.listens else self._listeners.discard)(process)
        if status.is_preempted:
            self._preempted.add(process)
        if self.save is not None and not self.save.is_done and self._has_answered(status, self.save):
            self._missing.discard(process)
        self._advance()

    def on_leave(self, process: str) -> None:
        """A member's ranks have returned, or it is lost: nobody waits for it."""
        for each in (self._there, self._silent, self._missing, self._listeners, self._preempted):
            each.discard(process)
        self._advance()

    def on_end(self) -> None:
        """The leader is told to stop, and its own ranks have returned: with it the round ends for the others."""
        self._preempted.add("")
        self._advance()

    def ask(self) -> int:
        """All ranks are to save that would, soon, and whether or not that is due: the call after which they have
        (:meth:`have_saved`)."""
        call = self._forced = 1 + (self.save.call if self.save is not None else 0)
        self._asks = max(self._asks, call)
        self._advance()
        return call

    def have_saved(self, call: int) -> bool:
        """Whether a call is over; or comes no more, after a save for a node that leaves."""
        save = self.save
        return save is not None and (save.call > call or (save.is_done and (save.call == call or save.is_urgent)))

    @property
    def is_awaited(self) -> bool:
        """Whether a node that is told to stop stays for a save that is still to be made."""
        return bool(self._preempted) and (self.save is None or not (self.save.is_urgent and self.save.is_done))

    def _has_answered(self, status: Status, save: Save) -> bool:
        if save.step is not None:
            return status.saved >= save.call
        if status.floor.call == save.call:
            self._highest = max(self._highest, status.floor.step)
        return status.floor.call >= save.call

    def _advance(self) -> None:
        while self.save is None or self.save.is_done:
            if self.save is not None and self.save.is_urgent and not self._preempted:
                self.save = replace(self.save, is_urgent=False)  # whom it was for has done its part: the round goes on
            if not self._is_wanted():
                return
            last = self.save.call if self.save is not None else 0
            self._missing, self._highest = set(self._there), -1
            self.save = Save(last + 1, bool(self._preempted), is_forced=self._forced > last)
        if self.save.step is None and not self._missing:
            self._missing = set(self._there)
            self.save = replace(self.save, step=self._highest, is_empty=not self._listeners)
        if self.save.step is not None and not self._missing:
            # Whoever began to listen meanwhile was told, and has saved.
            self.save = replace(self.save, is_done=True, is_empty=self.save.is_empty and not self._listeners)
            self._advance()  # what was asked for meanwhile

    def _is_wanted(self) -> bool:
        save = self.save
        if self._silent or (save is not None and save.is_urgent and not (save.is_empty and self._listeners)):
            return False  # after a save for a node that leaves, ranks stand still until they are ended
        return bool(self._preempted) or self._asks > (save.call if save is not None else 0)
