"""What one node of a range has open: the store's server where it is its host, and this node's connections."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from datetime import timedelta

from ..errors import RendezvousError
from .addresses import is_here
from .client import Connection, Server
from .connections import Older
from .protocol import Hello, Keys
from .search import Search, addresses
from .settings import RangeSettings
from .strangers import own_hello
from .vigil import Vigil

CALLS = ("control", "state", "rounds")
"""Torch elastic waits for other nodes inside calls to the store; each kind of wait has its own connection, so that none
of them delays a heartbeat."""


class RangeLinks:
    """The connections of one node, by what they are for; ``join`` is a thread for torch elastic's own waits."""

    def __init__(self, settings: RangeSettings, keys: Keys) -> None:
        self._settings = settings
        self._keys = keys
        self._server: Server | None = None
        self._open: dict[str, Connection] = {}
        self._left: set[str] = set()
        self._addresses: tuple[str, ...] = ()
        self.store = ""  # the id of the store in use, or of the last one
        self.older: Older | None = None

    def __getitem__(self, label: str) -> Connection:
        """
        Raises:
            RendezvousError: the node has not joined yet, or has left.
        """
        if label not in self._open:
            settings = self._settings
            raise RendezvousError("this node is not in the group", where={"store": f"{settings.host}:{settings.port}"})
        return self._open[label]

    @property
    def hosting(self) -> bool:
        """Whether the store lives in this process."""
        return self._server is not None

    def open(self, deadline: float, vigil: Vigil | None) -> None:
        """Be the store's host, if this is its address; connect.

        Args:
            deadline: when to give up (``time.monotonic``).
            vigil: where the host was lost before, and is looked for.

        Raises:
            RendezvousTimeoutError: the store could not be reached before ``deadline``.
            StoreLostError: it was reached, and is gone again; or another job's node is there.
        """
        try:
            if vigil is None:
                self._enter(deadline)
            else:
                self._enter_again(deadline, vigil)
        except RendezvousError:
            self.close()
            raise
        self._open["join"] = Connection.within(None, heartbeat_timeout=self._settings.heartbeat_timeout, label="join")
        limit = timedelta(seconds=self._settings.heartbeat_timeout)
        self["rounds"].call("setting its timeout", lambda store: store.set_timeout(limit))

    def never_again(self) -> None:
        """The store that is in use, or was last, has been superseded."""
        self._left.add(self.store)

    def drop(self) -> None:
        """Let go of every connection. Calls that hang are abandoned with their thread."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def close(self) -> None:
        """Let go of every connection, and stop listening."""
        self.drop()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _enter(self, deadline: float) -> None:
        settings = self._settings
        host, port = settings.host, settings.port
        if is_here(host):
            # With several agents on one machine the kernel decides which of them listens.
            with suppress(RendezvousError):
                self._server = Server(host, port)
        if self.hosting:
            host = "127.0.0.1"
        self._dial(CALLS, host, deadline)
        hello, key = Hello(settings.max_nodes, uuid.uuid4().hex, self._keys.run_id).text(), self._keys.hello
        if self.hosting:
            self["control"].call("opening the store", lambda store: store.set(key, hello))
        left = max(1.0, deadline - time.monotonic())
        self.store, self._addresses = own_hello(self["control"], self._keys, left).store, addresses(host)

    def _enter_again(self, deadline: float, vigil: Vigil) -> None:
        settings, before = self._settings, self.store
        found = Search(
            settings.host,
            settings.port,
            self._keys,
            settings.heartbeat_timeout,
            deadline,
            vigil,
            frozenset(self._left),
        ).run()
        self._open["control"] = found.connection
        # By number: all connections lead to one store, whatever becomes of the name meanwhile.
        self._dial(CALLS[1:], found.address, time.monotonic() + settings.heartbeat_timeout)
        elsewhere = tuple(address for address in self._addresses if address != found.address)
        self.store, self._addresses = found.hello.store, (found.address,)
        if before and before != self.store:
            self._left.add(before)
            self.older = Older(before, elsewhere)

    def _dial(self, labels: tuple[str, ...], host: str, deadline: float) -> None:
        settings = self._settings
        for label in labels:
            left = max(0.1, deadline - time.monotonic())
            self._open[label] = Connection.dial(
                host, settings.port, timeout=left, heartbeat_timeout=settings.heartbeat_timeout, label=label
            )
