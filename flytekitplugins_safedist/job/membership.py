"""Joining a job: as the node that hosts its coordinator, or as one that looks for it."""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from .. import envvars
from ..errors import RendezvousError, TopologyError
from ..meeting import own_address
from ..rank.backends.torch import LOOPBACK
from ..record.clocks import Offset
from ..topology import Topology
from . import ports
from .facts import Rules
from .link import Inbox, Link
from .messages import Hello, Message, Noted
from .server import SHUTDOWN_SECONDS, Prepare, Server
from .sign import Renewal, SignPlace

logger = logging.getLogger(__name__)

_PAUSE = 0.25
"""Seconds between two tries to listen."""


class Membership:
    """This process in its job: what it hears is in :attr:`inbox`, and what it says goes to the coordinator.

    Args:
        rules: the job's.
        place: this node's.
        open_round: opens what ranks meet at, where this is node 0.
        local: where a socket for this node's ranks may be made, if nobody else takes part.
        say: takes a sentence for the node's log.
        state: ``cannot``: this node can start no rank, and comes to say why.
        sign: where the leader's sign is put, if this process leads.

    Raises:
        TopologyError: there are other nodes, and nobody says where to meet.
        RendezvousError: this is node 0, and it cannot listen.
    """

    def __init__(
        self,
        rules: Rules,
        place: Topology,
        *,
        open_round: Prepare,
        local: Path | None,
        say: Callable[[str], object],
        state: Literal["new", "cannot"] = "new",
        sign: SignPlace | None = None,
    ) -> None:
        self.rules = rules
        self.me = Hello(
            run=rules.run,
            process=uuid.uuid4().hex,
            node=place.node_rank,
            started_ns=_started_ns(),
            host=socket.gethostname(),
            state=state,
            machine=place.machine,
        )
        self.inbox: Inbox = queue.SimpleQueue()
        self._place = place
        self._open_round = open_round
        self._meeting = ""
        self._reserved: ports.ReservedPort | None = None
        self._server: Server | None = None
        self._link: Link | None = None
        self._renewal: Renewal | None = None
        if place.endpoint is None and place.max_nodes > 1:
            what = "the address where the nodes of this job meet is not set"
            raise TopologyError(what, where={"source": place.source})
        if not self._host(local) and place.endpoint is not None:
            self._link = Link(rules, place.endpoint, hello=lambda: self.me, inbox=self.inbox, say=say)
        if self.hosts and sign is not None:
            self._renewal = Renewal(sign, self.me.process, say)

    @property
    def is_searching(self) -> bool:
        """Whether the coordinator was lost, and no round has come together since."""
        return self._link is not None and self._link.is_searching

    def heard(self, seconds: float) -> object | None:
        """What comes into the inbox within some seconds, or None.

        Raises:
            FencedError: another process is in this one's place.
            Exception: the coordinator in this process has failed.
        """
        try:
            item = self.inbox.get(timeout=seconds) if seconds > 0 else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def tell(self, message: Message) -> None:
        """Say something to the coordinator."""
        way = self._link or self._server
        assert way is not None  # noqa: S101  (it is the one or the other)
        way.say(message)

    @property
    def hosts(self) -> bool:
        """Whether the coordinator is in this process."""
        return self._server is not None

    def note(self, text: Callable[[], str]) -> None:
        """Send node 0 the record of this node's part in the run; there it is already."""
        if self._link is not None:
            self._link.say(Noted(text(), self._link.behind.least))

    def notes(self) -> list[tuple[str, Offset]]:
        """What other nodes have sent so, where this is node 0, and what to add to their times for this node's."""
        return [] if self._server is None else self._server.notes()

    def now(self, **changes: object) -> None:
        """This node is otherwise than it was: what its next hello says."""
        self.me = replace(self.me, **changes)  # type: ignore[arg-type]

    def close(self, *, ended: bool) -> None:
        """Leave. Where the coordinator is here and the job has *ended*, stay until the others have heard it."""
        if self._renewal is not None:
            self._renewal.close()
        if self._link is not None:
            self._link.close()
        if self._server is not None:
            self._server.close(seconds=SHUTDOWN_SECONDS if ended else 0.0)
        self._let_go()

    # --- node 0 ----------------------------------------------------------------------------------------------------
    def _host(self, local: Path | None) -> bool:
        place, endpoint = self._place, self._place.endpoint
        alone = place.max_nodes == 1
        is_at_home = place.is_elastic and endpoint is not None and ports.is_here(endpoint.host)
        if not alone and place.node_rank != 0 and not is_at_home:
            return False
        server = Server(self.rules, self.me.process, self.inbox, self._prepare)
        try:
            if self._listens(server, local):
                self._server = server
                server.say(self.me)
        finally:
            if self._server is None:
                server.close()
        return self._server is not None

    def _listens(self, server: Server, local: Path | None) -> bool:
        """Listen; False where another agent of a range does: of several on one machine the kernel chooses one."""
        until = time.monotonic() + self.rules.heartbeat
        while True:
            try:
                self._listen(server, local)
            except RendezvousError:
                if not self._place.is_elastic or time.monotonic() > until:
                    raise
            else:
                return True
            if ports.is_answered(self._place.endpoint):
                return False
            # Somebody's connection has the port, as the kernel gives them out: nobody would lead this job meanwhile.
            time.sleep(_PAUSE)

    def _listen(self, server: Server, local: Path | None) -> None:
        endpoint = self._place.endpoint
        if self._place.max_nodes > 1 and endpoint is not None:
            port = server.listen(endpoint)
            self._meeting = f"{{address}}:{port}"
        elif local is not None:
            server.listen_at(local)
            self._meeting = f"unix:{local}"

    def _prepare(self, nnodes: int) -> Mapping[str, str]:
        """What node 0 offers to a round: a port that is kept free for its ranks, and what its backend opens."""
        self._let_go()
        self._reserved = ports.ReservedPort()
        address = self._address(nnodes)
        offered = {envvars.MASTER_ADDR: address, envvars.MASTER_PORT: str(self._reserved.port)}
        if self._meeting:
            offered[envvars.MEETING] = self._meeting.format(address=f"[{address}]" if ":" in address else address)
        return {**offered, **self._open_round(nnodes)}

    def _address(self, nnodes: int) -> str:
        endpoint = self._place.endpoint
        if nnodes == 1 or endpoint is None:
            return LOOPBACK
        return own_address(endpoint.host, endpoint.port) if self._place.is_elastic else endpoint.host

    def _let_go(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def _started_ns() -> int:
    """When this process started, in nanoseconds since the epoch, by its machine's clock."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int((time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot) * 1e9)
