"""What one node has open: the store's server on node 0, and this node's connections."""

from __future__ import annotations

import logging
import resource
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from ..errors import RendezvousError, RendezvousTimeoutError, StoreLostError
from .client import FOREVER, Connection, Server
from .protocol import VERSION, Hello, Keys
from .search import Search, addresses
from .settings import GroupSettings
from .strangers import own_hello
from .vigil import Vigil

logger = logging.getLogger(__name__)

_SLOW_CONNECT = 1.0
"""Seconds to connect to a running store that are worth a warning."""


_OWN_FILES = 256
"""Open files that node 0's agent needs besides the group's connections."""


@dataclass(frozen=True)
class Older:
    """A store that this node has left for another.

    Attributes:
        store: its id.
        addresses: where it was, as far as that is not where the new one is.
    """

    store: str
    addresses: tuple[str, ...]


class Links:
    """The connections of one node: one for short calls, one for the blocking wait, one for torch elastic's agent."""

    def __init__(self, settings: GroupSettings, keys: Keys) -> None:
        self._settings = settings
        self._keys = keys
        self._server: Server | None = None
        self._open: dict[str, Connection] = {}
        self.store = ""  # the id of the store in use, or of the last one
        self.older: Older | None = None
        self._left: set[str] = set()
        self._addresses: tuple[str, ...] = ()

    @property
    def hosting(self) -> bool:
        """Whether the store's server runs in this process."""
        return self._server is not None

    @property
    def control(self) -> Connection:
        """For short calls, from any thread; they queue."""
        return self._named("control")

    @property
    def wakeup(self) -> Connection:
        """For the one blocking wait of this node."""
        return self._named("wakeup")

    @property
    def raw(self) -> Connection:
        """Whose store torch elastic's agent may use directly."""
        return self._named("agent" if self._settings.raw_store else "control")

    def connections(self) -> tuple[Connection, ...]:
        """Every open connection."""
        return tuple(self._open.values())

    def open(self, deadline: float, vigil: Vigil | None = None) -> None:
        """Start the server on node 0; connect; check that this is the right group.

        Args:
            deadline: when to give up (``time.monotonic``).
            vigil: where node 0 was lost before, and is looked for.

        Raises:
            RendezvousTimeoutError: node 0 could not be reached before ``deadline``.
            StoreLostError: it was reached, and is gone again; or another job's node is there.
            RendezvousError: node 0 leads another group, or its port is taken.
        """
        try:
            if vigil is None:
                self._connect(deadline)
            else:
                self._connect_again(deadline, vigil)
        except RendezvousError:
            self.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether this node is on a store."""
        return bool(self._open)

    def never_again(self) -> None:
        """The store that is in use, or was last, has been superseded."""
        self._left.add(self.store)

    def close(self) -> None:
        """Drop every connection and stop listening. Calls that hang are abandoned with their thread."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _named(self, label: str) -> Connection:
        if label not in self._open:
            raise RendezvousError("this node is not in the group", where={"node": self._settings.node_rank})
        return self._open[label]

    def _connect(self, deadline: float) -> None:
        settings = self._settings
        if settings.nodes == 1:
            # Nothing to listen for, no name to look up: the store lives in this process.
            self._open_within()
            return
        host, port = settings.host, settings.port
        if settings.node_rank == 0:
            allow_open_files(len(self._labels) * settings.nodes + _OWN_FILES)
            self._server = Server(host, port)
            # Node 0's own name may not be in the DNS yet; it does not need it.
            host, port = "127.0.0.1", self._server.port
        self._dial("control", host, port, deadline)
        if self.hosting:
            self._greet()
        left = max(1.0, deadline - time.monotonic())
        hello = own_hello(self.control, self._keys, left)
        self._enter(hello, host, port, addresses(host))

    def _connect_again(self, deadline: float, vigil: Vigil) -> None:
        """To the store that node 0 has now: the one before, where it was only cut off, or a new one."""
        settings = self._settings
        search = Search(
            settings.host,
            settings.port,
            self._keys,
            settings.heartbeat_timeout,
            deadline,
            vigil,
            frozenset(self._left),
            settings.moved,
        )
        found = search.run()
        self._open["control"] = found.connection
        before, elsewhere = self.store, tuple(address for address in self._addresses if address != found.address)
        # By number: all connections lead to one store, whatever becomes of the name meanwhile.
        self._enter(found.hello, found.address, settings.port, (found.address,))
        if before and before != self.store:
            self._left.add(before)
            self.older = Older(before, elsewhere)

    def _enter(self, hello: Hello, host: str, port: int, at: tuple[str, ...]) -> None:
        self._check(hello)
        started = time.monotonic()
        for label in self._labels[1:]:
            self._dial_further(label, host, port)
        self._warn_if_slow(host, time.monotonic() - started)
        self.store, self._addresses = hello.store, at

    def _dial_further(self, label: str, host: str, port: int) -> None:
        settings = self._settings
        try:
            self._dial(label, host, port, time.monotonic() + settings.heartbeat_timeout)
        except RendezvousTimeoutError as error:
            raise StoreLostError(
                "the job's store went away while this node connected",
                where={"node": settings.node_rank, "store": f"{host}:{port}"},
                seen=error.seen,
                hint="look at node 0's pod first",
            ) from error

    @property
    def _labels(self) -> tuple[str, ...]:
        return ("control", "wakeup", "agent") if self._settings.raw_store else ("control", "wakeup")

    def _open_within(self) -> None:
        from torch.distributed import HashStore

        store = HashStore()
        store.set_timeout(FOREVER)
        for label in self._labels:
            self._open[label] = Connection.within(
                store, heartbeat_timeout=self._settings.heartbeat_timeout, label=label
            )
        self._greet()

    def _dial(self, label: str, host: str, port: int, deadline: float) -> None:
        left = max(0.1, deadline - time.monotonic())
        self._open[label] = Connection.dial(
            host, port, timeout=left, heartbeat_timeout=self._settings.heartbeat_timeout, label=label
        )

    def _greet(self) -> None:
        hello = Hello(self._settings.nodes, uuid.uuid4().hex, self._keys.run_id).text()
        self.control.call("opening the store", lambda store: store.set(self._keys.hello, hello))

    def _warn_if_slow(self, host: str, took: float) -> None:
        if took <= _SLOW_CONNECT:
            return
        started = time.monotonic()
        with suppress(OSError):
            socket.getnameinfo((socket.gethostbyname(host), 0), 0)
        # The store looks the name of every caller up, one after the other, and serves nobody meanwhile: look-ups that
        # fail slowly stop the whole group.
        logger.warning(
            "node %d needed %.1f s to connect to a store that was up; looking up the name of its address takes %.1f s. "
            "The store makes one such look-up for every connection of the %d nodes. Next step: if they are slow or "
            "get lost, give the pod network a working reverse zone, or let failing look-ups fail at once",
            self._settings.node_rank,
            took,
            time.monotonic() - started,
            self._settings.nodes,
        )

    def _check(self, hello: Hello) -> None:
        settings = self._settings
        if (hello.version, hello.nodes) != (VERSION, settings.nodes):
            raise RendezvousError(
                "node 0 leads another group, not the one that this node wants to join",
                where={"node": settings.node_rank, "store": f"{settings.host}:{settings.port}"},
                seen=f"{hello.nodes} nodes, protocol {hello.version}",
                expected=f"{settings.nodes} nodes, protocol {VERSION}",
                hint="every pod of the job must run the same image and configuration",
            )


def allow_open_files(needed: int) -> None:
    """Raise this process's limit of open files to ``needed``, if it is lower.

    Raises:
        RendezvousError: the hard limit is lower. The store would stop accepting nodes, and they would wait without end.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RendezvousError(
            "node 0 may not open enough connections for all nodes",
            where={"limit": "RLIMIT_NOFILE"},
            seen=f"{hard} open files at most",
            expected=f"at least {needed}",
            hint="raise the container's limit of open files (ulimit -Hn)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
