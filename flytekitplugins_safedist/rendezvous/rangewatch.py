"""The watcher of a node in a range: heartbeats, and what an agent may ask without ever blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError as TorchRendezvousError

from ..errors import StoreLostError
from . import departures
from .client import Connection
from .heartbeat import Heartbeat
from .heartbeat_monitor import HeartbeatMonitor
from .job_state import JobState
from .protocol import Keys
from .strangers import Visitors


class RangeWatch(Heartbeat):
    """A thread that beats every ``heartbeat_interval`` seconds and looks where the job stands and who wants to join.

    Args:
        control: connection for short calls.
        keys: names of the job's keys.
        heartbeat_interval: seconds between two looks.
        heartbeat_timeout: seconds without a sign of life after which a node counts as gone.
        number: process number of this node, under which it beats.
        holds_store: whether the store is in this process.
        move_on: asks the nodes of a round to leave it.
    """

    def __init__(
        self,
        control: Connection,
        keys: Keys,
        *,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        number: int,
        holds_store: bool,
        move_on: Callable[[int], None],
    ) -> None:
        super().__init__(heartbeat_interval)
        self._control = control
        self._keys = keys
        self._number = number
        self._holds_store = holds_store
        self._visitors = Visitors() if holds_store else None
        self._move_on = move_on
        self._dynamic: Any = None
        # Torch elastic's handler is not for two threads: nobody asks it who waits while it waits itself.
        self._asking = threading.Lock()
        self._settled: int | None = None
        # Written by the watcher's thread only, read by any: single references, so no lock.
        self._seen = JobState()
        self._members: tuple[int, ...] = ()
        self._monitor = HeartbeatMonitor(heartbeat_timeout)
        self._overdue: tuple[int, ...] = ()

    def start(self, dynamic: Any) -> None:
        """Begin to beat; ``dynamic`` is torch elastic's handler."""
        self._dynamic = dynamic
        self.begin()

    def settle(self, round_no: int, members: tuple[int, ...]) -> None:
        """The node now runs in ``round_no``, with these processes."""
        with self._asking:
            self._settled, self._members, self._overdue = round_no, members, ()

    def unsettle(self) -> None:
        """The node is between two rounds: torch elastic's handler is busy."""
        with self._asking:
            self._settled = None

    def moved(self) -> bool:
        """Whether the round that the node runs in is to be left, or has been left by the others."""
        seen, settled = self._seen, self._settled
        return settled is not None and (seen.round > settled or (seen.round == settled and seen.moving))

    def overdue(self) -> tuple[int, ...]:
        """Node ranks of the latest round whose processes have shown no sign of life for too long."""
        return self._overdue

    def _look(self) -> None:
        keys, number, members = self._keys, self._number, self._members

        def look(store: Any) -> tuple[JobState, list[int]]:
            store.add(keys.heartbeat(number), 1)
            state = JobState.parse(bytes(store.compare_set(keys.generation, "", "")))
            return state, [int(store.add(keys.heartbeat(member), 0)) for member in members]

        seen, beats = self._control.call("beating", look)
        self._seen = seen
        if self._visitors is not None:
            self._visitors.look(self._control)
        with self._asking:
            if members == self._members:
                self._overdue = self._monitor.overdue(members, beats)
        if seen.end is not None and self._trouble is None:
            # It goes on beating: the others wait for the upload for as long as its node is alive.
            self._trouble = seen.end.error(number, holds_store=self._holds_store)
        if seen.end is None and not seen.moving and self._someone_waits(seen.round):
            # In this order: whoever sees its peers leave finds the reason.
            self._control.call("making room", lambda store: departures.make_room(store, keys, seen.round))
            self._move_on(seen.round)

    def _someone_waits(self, round_no: int) -> bool:
        with self._asking:
            if self._settled != round_no:
                return False
            try:
                if not self._dynamic.num_nodes_waiting():
                    return False
            except TorchRendezvousError as error:
                raise StoreLostError(
                    "the job's store does not answer",
                    where={"while": "asking who wants to join"},
                    seen=str(error),
                    expected="a reply from the agent that holds it",
                    hint="look at worker 0's pod first: killed, evicted, paused, or cut off by the network",
                ) from error
        # Where a node's ranks have succeeded, the round is about to end: who comes now does not make all start over.
        done = departures.done_count(self._keys, round_no)
        return self._control.call("asking who is done", lambda store: int(store.add(done, 0))) == 0
