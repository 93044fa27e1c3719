"""Joining a job: as the node that leads it, or as one that looks for its leader."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..coordinator import ports
from ..coordinator.books import Cause
from ..coordinator.coordinator import Fitness
from ..coordinator.messages import Status
from ..coordinator.rules import Rules
from ..coordinator.server import SHUTDOWN_SECONDS, Inbox, Server, SignStore
from ..coordinator.wire import Note, RankPicture
from ..errors import RendezvousError, TopologyError
from ..hangs.snapshot import Snapshot
from ..record.clocks import Offset
from ..topology import Topology
from .link import Link

logger = logging.getLogger(__name__)

_PAUSE = 0.25
"""Seconds between two tries to listen."""


class Membership:
    """This process in its job: what it hears is in :attr:`inbox`, and what it says goes to the leader.

    Args:
        rules: the job's.
        place: this node's.
        store: where the leader's sign is.
        judge_reports: judges the checks of all nodes, if this process leads.
        local: where a socket for this node's ranks may be made, if nobody else takes part.
        say: takes a sentence for the node's log.
        cannot: why this node can start no rank.

    Raises:
        TopologyError: there are other nodes, and nobody says where to meet.
        RendezvousError: this is node 0, and it cannot listen.
    """

    def __init__(
        self,
        rules: Rules,
        place: Topology,
        store: SignStore,
        *,
        judge_reports: Callable[..., Fitness] | None = None,
        local: Path | None = None,
        say: Callable[[str], object],
        cannot: Cause | None = None,
    ) -> None:
        self.rules, self.place = rules, place
        self.first = Status(
            job=rules.job,
            process=uuid.uuid4().hex,
            node=place.node_rank if rules.is_fixed else None,
            started=_started(),
            host=socket.gethostname(),
            machine=place.machine,
            cannot=cannot,
        )
        """The status that this process begins with."""
        self.inbox: Inbox = queue.SimpleQueue()
        self.meeting = ""
        """Where ranks meet, as :mod:`..meeting` takes it, with ``{address}`` for node 0's; "" where nothing listens."""
        self.link: Link | None = None
        self._status = self.first
        self._server: Server | None = None
        self._store, self._looking = store, threading.Lock()
        self._judge_reports, self._say = judge_reports, say
        if place.endpoint is None and place.max_nodes > 1:
            what = "the address where the nodes of this job meet is not set"
            raise TopologyError(what, where={"source": place.source})
        if not self._host(local) and place.endpoint is not None:
            self.link = Link(rules, place.endpoint, inbox=self.inbox, say=say)

    @property
    def leads(self) -> bool:
        """Whether the coordinator is in this process."""
        return self._server is not None

    def begin(self, status: Status) -> None:
        """Say it to the leader, which is looked for: at first, and whenever it was lost."""
        self._status = status
        if self._server is not None:
            self._server.hear(status)
        elif self.link is not None:
            self.link.begin(status)

    def tell(self, status: Status) -> None:
        """Say it to the leader, if it is another than it knows."""
        if status == self._status:
            return
        self._status = status
        if self._server is not None:
            self._server.hear(status)
        elif self.link is not None:
            self.link.tell(status)

    def show(self, round_: str, look: int, snapshots: Sequence[Snapshot]) -> None:
        """Put a picture of this node's ranks where the coordinator is."""
        picture = RankPicture(round_, look, tuple(snapshots))
        if self._server is not None:
            self._server.take(picture)
        elif self.link is not None:
            self.link.put(picture.frame())

    def note(self, text: str) -> None:
        """Send node 0 the record of this node's part in the run; there it is already."""
        if self.link is not None:
            self.link.put(Note(text, self.link.behind.least).frame())

    def notes(self) -> list[tuple[str, Offset]]:
        """What other nodes have sent so, where this is node 0, and what to add to their times for this node's."""
        return [] if self._server is None else self._server.notes()

    def look(self) -> None:
        """Look at the store, in a thread: what it says comes into the inbox, and nothing where it cannot be read."""

        def look() -> None:
            with self._looking:
                try:
                    self.inbox.put(self._store.look())
                except Exception as error:  # whatever the store's client raises: it is no sign of anything
                    logger.debug(f"the store cannot be read: {type(error).__name__}: {error}")

        if not self._looking.locked():
            with suppress(RuntimeError):  # the container may have no further thread now: at the next look
                threading.Thread(target=look, name="safedist store", daemon=True).start()

    def close(self, *, ended: bool, uploaded: bool = False) -> None:
        """Leave. Where the coordinator is here and the job has *ended*, stay until the others have heard it: that the
        verdict is *uploaded*."""
        if self.link is not None:
            self.link.close()
        if self._server is not None:
            if uploaded:
                self._server.hear(replace(self._status, is_uploaded=True))
            self._server.close(seconds=SHUTDOWN_SECONDS if ended else 0.0)

    # --- node 0 -------------------------------------------------------------------------------------------------------
    def _host(self, local: Path | None) -> bool:
        place, endpoint = self.place, self.place.endpoint
        alone = place.max_nodes == 1
        is_at_home = place.is_elastic and endpoint is not None and ports.is_here(endpoint.host)
        if not alone and place.node_rank != 0 and not is_at_home:
            return False
        store = None if alone else self._store
        options = {"store": store, "judge_reports": self._judge_reports, "say": self._say}
        server = Server(self.rules, self.first.process, self.inbox, **options)  # type: ignore[arg-type]
        try:
            if self._listens(server, local):
                self._server = server
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
                if not self.place.is_elastic or time.monotonic() > until:
                    raise
            else:
                return True
            if ports.is_answered(self.place.endpoint):
                return False
            # Somebody's connection has the port, as the kernel gives them out: nobody would lead this job meanwhile.
            time.sleep(_PAUSE)

    def _listen(self, server: Server, local: Path | None) -> None:
        endpoint = self.place.endpoint
        if self.place.max_nodes > 1 and endpoint is not None:
            port = server.listen(endpoint)
            self.meeting = f"{{address}}:{port}"
        elif local is not None:
            server.listen_at(local)
            self.meeting = f"unix:{local}"


def _started() -> float:
    """When this process started, in seconds since the epoch, by its machine's clock."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
