"""Looking for a node 0 that was lost, until it answers under its name again: from a new address, with a new store.

Nothing here trusts an address for longer than it is the name's: a connection to a machine that is gone, or to a process
that is frozen, is given up when the name leads elsewhere.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Container
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ..errors import NotReplacedError, StoreLostError
from .client import Connection
from .protocol import Hello, Keys
from .strangers import met, own_hello
from .vigil import Vigil

_PAUSE = 0.25
"""Seconds between two looks."""

_PROBE = 2.0
"""Seconds that a machine is given to accept a connection, at each look."""

_TURN = 5.0
"""Seconds that a store is given to answer where the name has other addresses as well."""

_SLICE = 0.5
"""Seconds between two looks at the name while a store is slow to answer."""

NO_ADDRESS = "its name has no address", "a machine with room for the pod, or the end of the pod before it"
REFUSED = "nothing listens there", "the container's image; or its agent still fetches the code, or imports"
NO_ANSWER = "no answer from there", "its machine to be given up: the process there is frozen, or cut off"
_STRANGER_LEAVES = "the end of that job's pod, or this job's name to lead to its own"
LEFT = "an older store answers, which this node has left", "the end of the pod before it"


@dataclass(frozen=True)
class FoundStore:
    """A store that answers.

    Attributes:
        address: where, as a number.
        connection: to it.
        hello: what it says of itself.
    """

    address: str
    connection: Connection
    hello: Hello


def addresses(host: str) -> tuple[str, ...]:
    """What a name stands for now; () where that is nothing."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return ()


def whereabouts(host: str, moved: str) -> tuple[str, ...]:
    """Where node 0 may be: what its name stands for, and first what the file ``moved`` says, if there is one."""
    text = ""
    if moved:
        with suppress(OSError):
            text = Path(moved).read_text(encoding="utf-8").strip()
    return tuple(dict.fromkeys((*((text,) if text else ()), *addresses(host))))


@dataclass(frozen=True)
class Search:
    """How to look.

    Attributes:
        host, port: node 0's name, and its store's port.
        moved: see :func:`whereabouts`.
        keys: names of the job's keys.
        heartbeat_timeout: seconds without a reply after which a store counts as lost.
        deadline: when to give up (``time.monotonic``).
        vigil: says who is waited for.
        left: ids of stores that are not to be used again.
    """

    host: str
    port: int
    keys: Keys
    heartbeat_timeout: float
    deadline: float
    vigil: Vigil
    left: Container[str]
    moved: str = ""

    def run(self) -> FoundStore:
        """Look until a store answers.

        Raises:
            NotReplacedError: none did before the deadline.
        """
        pause = threading.Event()
        while True:
            seen, awaits = NO_ADDRESS
            for address in whereabouts(self.host, self.moved):
                found, (seen, awaits) = self._look(address)
                if found is not None:
                    return found
            self.vigil.look(seen, awaits)
            if time.monotonic() >= self.deadline:
                raise NotReplacedError(
                    f"{self._trouble(awaits)} within {self.vigil.limit:g} s",
                    where={"store": f"{self.host}:{self.port}"},
                    seen=seen,
                    expected="a new process that answers under the same name",
                    hint="see what Kubernetes waits for: kubectl describe the pod of that name; or raise "
                    "timeouts.rendezvous",
                )
            pause.wait(_PAUSE)

    def _trouble(self, awaits: str) -> str:
        if awaits == _STRANGER_LEAVES:
            return f"another job's node is at this job's address, and {self.vigil.who} did not come there"
        return f"{self.vigil.who} was lost, and none took its place"

    def _look(self, address: str) -> tuple[FoundStore | None, tuple[str, str]]:
        try:
            # First without the store's client, which waits longer and longer after each refusal.
            socket.create_connection((address, self.port), timeout=_PROBE).close()
        except ConnectionRefusedError:
            return None, REFUSED
        except OSError:
            return None, NO_ANSWER
        connection = self._connect(address)
        if connection is None:
            return None, NO_ANSWER
        try:
            hello = own_hello(connection, self.keys, self.heartbeat_timeout)
            if hello.store not in self.left:
                return FoundStore(address, connection, hello), LEFT
            found = LEFT
        except StoreLostError as error:
            stranger = f"{error.what}: {error.seen}, not {error.expected}", _STRANGER_LEAVES
            found = stranger if met(error) else NO_ANSWER
        connection.close()
        return None, found

    def _connect(self, address: str) -> Connection | None:
        from torch.distributed import DistError, TCPStore

        where = f"{self.host}:{self.port}, at {address}"
        connection = Connection(where, heartbeat_timeout=self.heartbeat_timeout, label="control")
        opening = connection.open(
            lambda: TCPStore(
                address,
                self.port,
                is_master=False,
                timeout=timedelta(seconds=max(1.0, self.deadline - time.monotonic())),
                wait_for_workers=False,
            )
        )
        started = time.monotonic()
        while True:
            try:
                opening.result(_SLICE)
            except DistError:
                break
            except FutureTimeoutError:
                self.vigil.look(*NO_ANSWER)
                there, now = whereabouts(self.host, self.moved), time.monotonic()
                # A frozen one takes the connection and never answers: it must not keep this node from the others.
                turn_is_over = len(there) > 1 and now >= started + _TURN
                if now >= self.deadline or address not in there or turn_is_over:
                    break
            else:
                return connection
        connection.close()
        return None


def connect_once(address: str, port: int, *, within: float) -> Connection | None:
    """A connection to a store at an address, or None where none is made within some seconds."""
    from torch.distributed import DistError, TCPStore

    connection = Connection(f"{address}:{port}", heartbeat_timeout=within, label="older")
    limit = timedelta(seconds=within)
    opening = connection.open(lambda: TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False))
    with suppress(DistError, FutureTimeoutError):
        opening.result(within)
        return connection
    connection.close()
    return None
