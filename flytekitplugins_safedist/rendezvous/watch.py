"""The watcher: heartbeats, and what an agent may ask without ever blocking."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ..errors import RendezvousError
from .client import Connection
from .protocol import Keys, State
from .settings import GroupSettings


class Watch:
    """A thread that beats every ``heartbeat_interval``, and reads the group's state when the wake-up key changes.

    Args:
        control: connection for short calls.
        incarnation: the process number under which this node claimed its slot.
    """

    def __init__(self, control: Connection, keys: Keys, settings: GroupSettings, incarnation: int) -> None:
        self._control = control
        self._keys = keys
        self._node = settings.node_rank
        self._incarnation = incarnation
        self._beat = settings.heartbeat_interval
        self._settled = -1
        self._stopped = threading.Event()
        self._ring = threading.Event()
        # Written by the watcher's thread only, read by any: single references, so no lock.
        self._generation = -1
        self._trouble: RendezvousError | None = None
        threading.Thread(target=self._run, name="safedist-watch", daemon=True).start()

    @property
    def generation(self) -> int:
        """The latest generation seen; -1 before the first look."""
        return self._generation

    def settle(self, generation: int, bell: Future[None]) -> None:
        """The node now runs in ``generation``, until ``bell`` is done."""
        self._settled = generation
        bell.add_done_callback(lambda _: self._ring.set())

    def moved(self) -> bool:
        """Whether a later generation than the settled one was asked for."""
        return self._generation > self._settled

    def check(self) -> None:
        """Raise what the watcher found out; never blocks.

        Raises:
            GroupClosedError, RendezvousTimeoutError: the group ended.
            FencedError: another process took this node's place.
            StoreLostError: node 0 is gone, or has not replied for so long that a heartbeat was given up.
        """
        trouble = self._trouble
        if trouble is not None:
            raise trouble

    def stop(self) -> None:
        """Stop beating. Returns at once; a call that hangs is abandoned."""
        self._stopped.set()
        self._ring.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except RendezvousError as error:
                if not self._stopped.is_set():
                    self._trouble = error
                return
            self._ring.wait(self._beat)
            self._ring.clear()

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
