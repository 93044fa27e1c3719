"""The watcher: heartbeats, and what an agent may ask without ever blocking."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from .client import Connection
from .heartbeat import Heartbeat
from .protocol import Keys, State
from .settings import GroupSettings
from .strangers import Visitors


class GroupWatch(Heartbeat):
    """A thread that beats every ``heartbeat_interval``, and reads the group's state when the wake-up key changes.

    Args:
        control: connection for short calls.
        incarnation: the process number under which this node claimed its slot.
    """

    def __init__(self, control: Connection, keys: Keys, settings: GroupSettings, incarnation: int) -> None:
        super().__init__(settings.heartbeat_interval)
        self._control = control
        self._keys = keys
        self._node = settings.node_rank
        self._incarnation = incarnation
        self._settled = -1
        self._visitors = Visitors() if settings.node_rank == 0 else None
        self._generation = -1  # written by the watcher's thread only
        self.begin()

    @property
    def generation(self) -> int:
        """The latest generation seen; -1 before the first look."""
        return self._generation

    def settle(self, generation: int, wakeup: Future[None]) -> None:
        """The node now runs in ``generation``, until ``wakeup`` is done."""
        self._settled = generation
        wakeup.add_done_callback(lambda _: self._wake.set())

    def moved(self) -> bool:
        """Whether a later generation than the settled one was asked for."""
        return self._generation > self._settled

    def _look(self) -> None:
        keys, node = self._keys, self._node

        def look(store: Any) -> State | None:
            store.add(keys.heartbeat(node), 1)
            # Until a first node joins there is no generation, and a plain read would wait for it.
            if self._generation < 0 and not store.check([keys.generation]):
                return None
            return State.parse(*store.multi_get([keys.generation, keys.incarnation(node)]))

        state = self._control.call("beating", look)
        if state is not None:
            self._generation = state.check(node, self._incarnation)
        if self._visitors is not None:
            self._visitors.look(self._control)
