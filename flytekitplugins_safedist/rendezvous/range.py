"""One node's membership in a job with a range of nodes (``nodes="2:4"``).

Who takes part is found out by torch elastic's own c10d rendezvous, used as it is: it counts arrivals, waits a little
longer when the minimum is there, and forgets nodes that stopped beating. What it leaves open is settled here, on the
same store: one number for each round, one list of who is in it, one end of the job (:mod:`.standing`). See
``docs/rendezvous.md``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import FencedError, NodeLostError, RendezvousError
from .addresses import is_here, own_address
from .c10d import open_dynamic, step_down
from .carried import Carried
from .client import Connection, Server
from .gathering import Gathering, too_few
from .job_state import Standing, change
from .protocol import End, EndKind, Keys
from .rangewatch import RangeWatch
from .settings import RangeSettings

T = TypeVar("T")

_SLICE = 0.5
"""Seconds between looks at the watch while torch elastic waits for the others."""

_POLL = 0.05
"""Seconds between two looks for what another node is about to say."""

_STEP_DOWN = 2.0
"""Seconds that giving up a place may take: whoever does so is told to stop."""

_NEXT_CALL = 1.5
"""Seconds that a round after the first waits for further nodes: torch elastic's waiting nodes look once a second."""

_RECORD = "safedist/round"
_MEMBER = "safedist/member/"
"""Keys under torch elastic's own prefix of the round."""


@dataclass(frozen=True)
class Formed:
    """A round that came together.

    Attributes:
        round: its number.
        members: process numbers of its nodes, by node rank.
        values: what its node 0 offers.
        store: of this round alone, for torch elastic's agent.
    """

    round: int
    members: tuple[int, ...]
    values: Mapping[str, str]
    store: Any


class RangeGroup:
    """This node among the others: a :class:`~.membership.Membership`. For one thread, except :attr:`watch`.

    Args:
        settings: see :class:`RangeSettings`.
        lead: called on node 0 of each round with its number and its size, before the others hear of the round.
    """

    def __init__(self, settings: RangeSettings, lead: Callable[[int, int], Mapping[str, str]]) -> None:
        self.settings = settings
        self.keys = Keys(settings.run_id)
        self.silence = settings.silence
        self.carried = Carried()
        self._lead = lead
        self._server: Server | None = None
        self._open: dict[str, Connection] = {}
        self._number = -1
        self._round = -1
        self._members: tuple[int, ...] = ()
        self._dynamic: Any = None
        self._last_call = settings.last_call
        self.watch: RangeWatch | None = None

    @property
    def control(self) -> Connection:
        """The connection for short calls.

        Raises:
            RendezvousError: the node has not joined yet, or has left.
        """
        if "control" not in self._open:
            raise RendezvousError("this node is not in the group", where={"store": self._where})
        return self._open["control"]

    @property
    def node_rank(self) -> int:
        """This node in its latest round; -1 before its first."""
        return self._members.index(self._number) if self._number in self._members else -1

    @property
    def nodes(self) -> int:
        """Nodes of this node's latest round."""
        return len(self._members)

    @property
    def holds_store(self) -> bool:
        """Whether the store lives in this process."""
        return self._server is not None

    def learn(self, known: Carried) -> None:
        """Keep what the store knew."""
        self.carried = self.carried.merge(known)

    def gone(self) -> tuple[int, ...]:
        """Nodes of the latest round that have shown no sign of life for ``silence`` seconds."""
        return self.watch.silent() if self.watch is not None else ()

    @property
    def uploads(self) -> bool:
        """Whether the job ended in a round of which this was node 0. Another node's word on older rounds is void."""
        standing = self._read()
        return standing.round == self._round and standing.uploader == self._number

    def beat_keys(self) -> tuple[str, ...]:
        """The heartbeat counter of each node of the latest round."""
        return tuple(self.keys.beat(member) for member in self._members)

    def uploader_beat(self) -> str | None:
        """The heartbeat counter of the node that uploads: it need not be the one that holds the store."""
        return self.keys.beat(self._read().uploader)

    # --- rounds --------------------------------------------------------------------------------------------------

    def join(self) -> Formed:
        """Take part in the next round.

        Raises:
            RendezvousTimeoutError: fewer than ``min_nodes`` nodes came in time.
            GroupClosedError: the job has ended.
            NodeLostError: too many processes have joined this job already.
            StoreLostError: the store's host is gone or frozen.
        """
        deadline = time.monotonic() + self.settings.timeout
        if self.watch is None:
            self._enter(deadline)
        while True:
            self._watching().unsettle()
            self._last_call = self._gather(deadline)
            info = self._torch_round(deadline)
            formed = None if info is None else self._agree(info)
            if formed is not None:
                self._round, self._members = formed.round, formed.members
                self._watching().settle(formed.round, formed.members)
                return formed

    def step_down(self) -> None:
        """Give up this node's place among the others: their next round need not wait until it counts as silent."""
        if self.watch is None or self.node_rank < 0:
            return
        self.watch.unsettle()
        going = self._open["join"].submit(lambda _: step_down(self._dynamic, _STEP_DOWN))
        with suppress(FutureTimeoutError):
            going.result(_STEP_DOWN)

    def move_on(self, round_no: int) -> None:
        """Ask the nodes of ``round_no`` to leave it; once, however many ask, and never when it is over already."""
        self._change(lambda now: now.asked_to_move() if now.round == round_no else None)

    def finish(self, round_no: int) -> bool:
        """End the job as done, unless ``round_no`` is to be left or has been; whether the job has ended as done."""
        done = End("done", self.node_rank, "")
        after = self._change(lambda now: now.ended(done) if now.round == round_no and not now.moving else None)
        return after.end is not None and after.end.kind == "done"

    def close(self, kind: EndKind, text: str) -> End:
        """End the job for every node; whoever ends it first gives the reason. Returns the reason that counts.

        Raises:
            FencedError: the others have gone on to a round without this node; it ends nothing.
        """
        wanted = End(kind, self.node_rank, text)
        after = self._change(lambda now: now.ended(wanted) if now.round == self._round else None)
        if after.end is None:
            raise FencedError(
                "the others have gone on without this node",
                where={"node": self.node_rank},
                seen=f"round {after.round}",
                expected=f"round {self._round}, which this node was in",
                hint="look at this pod: it was paused, or cut off from the others, for longer than timeouts.heartbeat",
            )
        return after.end

    def refuse(self, text: str, deadline: float) -> End | None:
        """Without joining, end a job as failed that has had no round yet; this node then uploads. None: it has."""
        self._enter(deadline)
        wanted, mine = End("failed", -1, text), (self._number,)
        after = self._change(lambda now: Standing(now.round, mine, end=wanted) if now.round < 0 else None)
        return after.end

    def read_end(self) -> End | None:
        """How the job ended, or None while it runs."""
        return self._read().end

    def leave(self) -> None:
        """Let go of everything. The store's host stays, at most ``linger`` seconds, until the others know the end."""
        if self.watch is not None:
            self.watch.stop()
        with suppress(RendezvousError):
            bye = self.keys.job(f"bye/{self._number}")
            self.control.call("leaving", lambda store: store.set(bye, "1"), timeout=2.0)
            if self._server is None and self.read_end() is None:
                self.step_down()
            if self._server is not None:
                self._await_byes()
        for connection in self._open.values():
            connection.close()
        self._open.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    # --- entering ------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{self.settings.host}:{self.settings.port}"

    def _enter(self, deadline: float) -> None:
        settings = self.settings
        host, port = settings.host, settings.port
        if is_here(host):
            # With several agents on one machine the kernel decides which of them listens.
            with suppress(RendezvousError):
                self._server = Server(host, port)
        address = own_address(host, port)
        if self._server is not None:
            host = "127.0.0.1"
        # Torch elastic waits for other nodes inside calls to the store; each kind of wait has its own connection, so
        # that none of them delays a heartbeat.
        for label in ("control", "state", "rounds"):
            left = max(0.1, deadline - time.monotonic())
            self._open[label] = Connection.dial(host, port, timeout=left, silence=settings.silence, label=label)
        self._open["join"] = Connection.within(None, silence=settings.silence, label="join")
        self._claim()
        limit = timedelta(seconds=settings.silence)
        self._open["rounds"].call("setting its timeout", lambda store: store.set_timeout(limit))
        self._dynamic = open_dynamic(
            settings,
            state=self._open["state"],
            rounds=self._open["rounds"].raw(),
            address=address,
            last_call=lambda: self._last_call,
        )
        self.watch = RangeWatch(
            self.control,
            self.keys,
            beat=settings.beat,
            silence=settings.silence,
            number=self._number,
            move_on=self.move_on,
        )
        self.watch.start(self._dynamic)

    def _claim(self) -> None:
        settings = self.settings
        count = self.control.call("joining the job", lambda store: int(store.add(self.keys.claims, 1)))
        self._number = count - 1
        if count > settings.max_nodes + settings.max_replacements:
            # Each process that joins makes all others start over: a pod that dies again and again must not go on so.
            raise NodeLostError(
                "too many processes have joined this job",
                where={"store": self._where},
                seen=f"{count} processes",
                expected=f"at most {settings.max_nodes} nodes and {settings.max_replacements} replacements",
                hint="look at the pods of this job that ended: evicted, out of memory, or their machine gone",
            )

    def _gather(self, deadline: float) -> float:
        """Wait for those of the round that is left who are to come; returns torch elastic's last call, in seconds."""
        if self._round < 0:
            return self.settings.last_call
        waiting_for = Gathering(self.keys, self._round, self._members, self.gone)
        self.control.call("being ready", lambda store: waiting_for.ready(store, self.node_rank))
        pause = threading.Event()
        while True:
            self._watching().check()
            coming, missing = self.control.call("gathering", waiting_for.look)
            if not missing or time.monotonic() > deadline or self._read().round != self._round:
                break
            pause.wait(_POLL)
        with suppress(Exception):  # of torch's: then somebody may be waiting
            if len(coming) <= self.settings.min_nodes and not self._dynamic.num_nodes_waiting():
                return 0.0
        return min(_NEXT_CALL, self.settings.last_call)

    def _torch_round(self, deadline: float) -> Any:
        """Torch elastic's next round; None where it came together and fell apart again."""
        from torch.distributed import DistError
        from torch.distributed.elastic import rendezvous

        # On a thread of its own: it may wait for a store that never answers, and the end of the job must be noticed.
        joining = self._open["join"].submit(lambda _: self._dynamic.next_rendezvous())
        while True:
            try:
                return joining.result(_SLICE)
            except FutureTimeoutError:
                self._watching().check()
                if time.monotonic() > deadline + self.settings.silence:
                    raise self._too_few() from None
            except rendezvous.RendezvousTimeoutError as error:
                raise self._too_few() from error
            except (DistError, rendezvous.RendezvousError) as error:
                self._watching().check()
                if time.monotonic() > deadline:
                    raise self._too_few() from error
                return None

    def _agree(self, info: Any) -> Formed | None:
        """Number the round and tell everybody; None if one of its nodes did not answer, and all must meet again."""
        store = info.store
        self._within(lambda: store.set(f"{_MEMBER}{info.rank}", str(self._number)))
        if info.rank == 0:
            keys = [f"{_MEMBER}{rank}" for rank in range(info.world_size)]
            if self._await(lambda: store.check(keys)) is None:
                return None
            members = tuple(int(self._within(lambda key=key: store.get(key))) for key in keys)  # type: ignore[misc]
            number = self._change(lambda now: now.next(members), unless_ended=True).round
            offered = dict(self._lead(number, len(members)))
            record = json.dumps({"round": number, "members": members, "values": offered})
            self._within(lambda: store.set(_RECORD, record))
        elif self._await(lambda: store.check([_RECORD])) is None:
            return None
        found = json.loads(self._within(lambda: bytes(store.get(_RECORD))))
        return Formed(int(found["round"]), tuple(found["members"]), found["values"], store)

    def _within(self, op: Callable[[], T]) -> T:
        return self._open["rounds"].call("forming the round", lambda _: op())

    def _await(self, there: Callable[[], bool]) -> bool | None:
        """Wait, at most ``silence`` seconds; None if nothing came."""
        deadline, pause = time.monotonic() + self.settings.silence, threading.Event()
        while not self._within(there):
            self._watching().check()
            if time.monotonic() > deadline:
                return None
            pause.wait(_POLL)
        return True

    # --- small things --------------------------------------------------------------------------------------------

    def _watching(self) -> RangeWatch:
        if self.watch is None:
            raise RendezvousError("this node is not in the group", where={"store": self._where})
        return self.watch

    def _read(self) -> Standing:
        return self._change(lambda _: None)

    def _change(self, wanted: Callable[[Standing], Standing | None], *, unless_ended: bool = False) -> Standing:
        """Move the job's standing by compare_set; returns how it stands then. An ended job stays as it is."""
        key = self.keys.generation
        standing = self.control.call("reading where the job stands", lambda store: change(store, key, wanted))
        if unless_ended and standing.end is not None:
            raise standing.end.error(self.node_rank)
        return standing

    def _too_few(self) -> RendezvousError:
        settings, end = self.settings, self.read_end()
        if end is not None:
            return end.error(self.node_rank)
        came = self.control.call("counting who came", lambda store: int(store.add(self.keys.claims, 0)))
        return too_few(settings, came)

    def _await_byes(self) -> None:
        """The store's host: the others read the end from this process. Wait for the last round's nodes."""
        standing = self._read()
        if standing.end is None:
            return  # this process is leaving a job that goes on; nobody can go on without it
        keys = [self.keys.job(f"bye/{member}") for member in standing.members]
        deadline, pause = time.monotonic() + self.settings.linger, threading.Event()
        while time.monotonic() < deadline:
            if self.control.call("waiting for the others to leave", lambda store: store.check(keys), timeout=2.0):
                return
            pause.wait(_POLL)
