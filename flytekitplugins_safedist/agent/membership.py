"""Joining a job: as the node that leads it, or as one that looks for its leader."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..coordinator import ports
from ..coordinator.books import Cause
from ..coordinator.coordinator import JudgeReports
from ..coordinator.messages import Status
from ..coordinator.rules import Rules
from ..coordinator.server import SHUTDOWN_SECONDS, Inbox, Server, SignStore
from ..coordinator.wire import Note
from ..errors import RendezvousError, TopologyError
from ..record.clocks import Offset
from ..topology import Endpoint, Topology
from . import life
from .link import Link
from .meeting_place import MeetingPlace

logger = logging.getLogger(__name__)

_NOWHERE = Endpoint("localhost", 0)
"""Where the leader of a job of one node is not looked for: it is here."""

_PAUSE = 0.25
"""Seconds between two tries to listen."""


class Membership:
    """This process in its job: what it hears is in :attr:`inbox`, and what it says goes to the leader.

    Args:
        rules: the job's.
        place: this node's.
        store: where the leader's sign is.
        judge_reports: judges the checks of all nodes, if this process leads.
        local: where a socket for this node's ranks may be made; None where no rank needs one.
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
        judge_reports: JudgeReports | None = None,
        local: Path | None = None,
        cannot: Cause | None = None,
    ) -> None:
        self.rules, self.place = rules, place
        before = life.BEFORE.value
        self.first = Status(
            job=rules.job,
            process=uuid.uuid4().hex,
            node=place.node_rank if rules.is_fixed else None,
            started=_started(),
            host=socket.gethostname(),
            machine=place.machine,
            cannot=cannot,
            ranks=0 if cannot is not None else place.nproc_per_node,
            starts=0 if before is None else before.starts + 1,
            ended=before.memory if before is not None and before.code is None else None,
        )
        """The status that this process begins with."""
        self.inbox: Inbox = queue.SimpleQueue()
        self._server: Server | None = None
        self._store, self._looking = store, threading.Lock()
        self._judge_reports = judge_reports
        if place.endpoint is None and place.max_nodes > 1:
            what = "the address where the nodes of this job meet is not set"
            raise TopologyError(what, where={"source": place.source})
        self._host()
        own = self._server.connect if self._server is not None else None
        may_lead = self._is_at_home is None
        self.link = Link(rules, place.endpoint or _NOWHERE, inbox=self.inbox, own=own, may_lead=may_lead)
        self.meeting = MeetingPlace(local, rules.job, self.link.put) if local is not None else None
        """Where this node's ranks call."""
        self.link.place = self.meeting

    @property
    def leads(self) -> bool:
        """Whether the coordinator is in this process."""
        return self._server is not None

    def note(self, text: str) -> None:
        """Send node 0 the record of this node's part in the run; there it is already."""
        if not self.leads:
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

    def close(self, *, decided: bool, why: str = "") -> None:
        """Leave. Where the coordinator is here and the attempt is *decided*, its verdict in the store, stay until the
        others have heard it. *why* is what has failed here, for the others, who see a lost connection else."""
        status = self.link.status
        if status is not None and self.leads and decided:
            self.link.tell(replace(status, is_uploaded=True))
        elif status is not None and why and not status.leaving:
            self.link.tell(replace(status, leaving=why))
        if self.meeting is not None:
            self.meeting.close()
        self.link.close()
        if self._server is not None:
            self._server.close(seconds=SHUTDOWN_SECONDS if decided else 0.0)

    # --- node 0 -------------------------------------------------------------------------------------------------------
    def _host(self) -> None:
        """Lead the job, if it is this process's to do."""
        place, endpoint = self.place, self.place.endpoint
        alone = place.max_nodes == 1
        self._is_at_home = place.is_elastic and endpoint is not None and ports.is_here(endpoint.host)
        if not alone and place.node_rank != 0 and not self._is_at_home:
            return
        store = None if alone else self._store
        server = Server(self.rules, self.first.process, self.inbox, store=store, judge_reports=self._judge_reports)
        try:
            if alone or self._listens(server):
                self._server = server
        finally:
            if self._server is None:
                server.close()

    def _listens(self, server: Server) -> bool:
        """Listen; False where another agent of a range does: of several on one machine the kernel chooses one."""
        until, endpoint = time.monotonic() + self.rules.heartbeat, self.place.endpoint or _NOWHERE
        while True:
            try:
                server.listen(endpoint)
            except RendezvousError:
                if not self.place.is_elastic or time.monotonic() > until:
                    raise
            else:
                return True
            if ports.is_answered(endpoint):
                return False
            # Somebody's connection has the port, as the kernel gives them out: nobody would lead this job meanwhile.
            time.sleep(_PAUSE)


def _started() -> float:
    """When this process started, in seconds since the epoch, by its machine's clock."""
    stat = Path("/proc/self/stat").read_bytes()  # the name in it may be no text: the kernel cuts it after 15 bytes
    ticks = int(stat.rpartition(b")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
