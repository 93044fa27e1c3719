"""Two processes that both are node 0: the one that was cut off, and its replacement. The older one ends itself.

Nodes that have gone over to the new store tell the old one, at the address where they knew it, for as long as it may
come back. Until it hears that, the old node 0 can do nothing but wait: a round needs every node, and a node is on one
store at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import RendezvousError
from .connections import Older
from .protocol import Hello, Keys
from .search import connect_once

_EVERY = 5.0
"""Seconds between two tries, and that each may take."""


@dataclass(frozen=True)
class Fence:
    """What to tell an older store.

    Attributes:
        older: which one.
        port: where it listens.
        keys: names of the job's keys.
        seconds: how long to try.
        supersede: ends the group there, given the raw store; the group's own way of doing so.
    """

    older: Older
    port: int
    keys: Keys
    seconds: float
    supersede: Callable[[Any], None]

    def start(self) -> None:
        """Try on a thread of its own, which keeps no process alive."""
        if self.older.addresses:
            threading.Thread(target=self._run, name="safedist-fence", daemon=True).start()

    def _run(self) -> None:
        deadline, pause = time.monotonic() + self.seconds, threading.Event()
        untold: Sequence[str] = self.older.addresses
        while untold and time.monotonic() < deadline:
            untold = [address for address in untold if not self._told(address)]
            pause.wait(_EVERY)

    def _told(self, address: str) -> bool:
        connection = connect_once(address, self.port, within=_EVERY)
        if connection is None:
            return False
        with suppress(RendezvousError):
            hello = connection.call("greeting", lambda store: bytes(store.get(self.keys.hello)))
            if Hello.parse(hello).store == self.older.store:
                connection.call("telling an older store", self.supersede)
            connection.close()
            return True
        connection.close()
        return False
