"""One node's membership in a job with a range of nodes (``nodes="2:4"``).

Who takes part is found out by torch elastic's own c10d rendezvous, used as it is: it counts arrivals, waits a little
longer when the minimum is there, and forgets nodes that stopped beating. What it leaves open is settled here, on the
same store: one number for each round, one list of who is in it, one end of the job (:mod:`.standing`). See
``docs/rendezvous.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from ..errors import FencedError, RendezvousError, StoreLostError
from . import slots
from .addresses import own_address
from .c10d import next_round, open_dynamic, step_down, stop_beating
from .carried import Carried
from .carried import change as change_carried
from .client import Connection
from .fence import Fence
from .forming import Formed, RoundStore
from .gathering import Gathering, count_again, too_few, too_many
from .job_state import JobState, change, supersede
from .outliving import Outliving
from .protocol import SUPERSEDED, End, EndKind, Keys
from .rangelinks import RangeLinks
from .rangewatch import RangeWatch
from .settings import RangeSettings

_STEP_DOWN = 2.0
"""Seconds that giving up a place may take: whoever does so is told to stop."""

_NEXT_CALL = 1.5
"""Seconds that a round after the first waits for further nodes: torch elastic's waiting nodes look once a second."""


class RangeGroup:
    """This node among the others: a :class:`~.membership.Membership`. For one thread, except :attr:`watch`.

    Args:
        settings: see :class:`RangeSettings`.
        prepare_round: called on node 0 of each round with its number and its size, before the others hear of the round.
    """

    def __init__(self, settings: RangeSettings, prepare_round: Callable[[int, int], Mapping[str, str]]) -> None:
        self.settings = settings
        self.keys = Keys(settings.run_id)
        self.heartbeat_timeout = settings.heartbeat_timeout
        self.kept = Outliving(f"the pod at {settings.host}, which holds the job's store,", settings.timeout)
        self._prepare_round = prepare_round
        self._links = RangeLinks(settings, self.keys)
        self._claimed = ""  # the store on which this node has its number
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
        return self._links["control"]

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
        return self._links.hosting

    def learn(self, known: Carried) -> None:
        """Keep what the store knew."""
        self.kept.learn(known)

    def gone(self) -> tuple[int, ...]:
        """Nodes of the latest round that have shown no sign of life for ``heartbeat_timeout`` seconds."""
        return self.watch.overdue() if self.watch is not None else ()

    @property
    def uploads(self) -> bool:
        """Whether the job ended in a round of which this was node 0. Another node's word on older rounds is void."""
        state = self._read()
        return state.round == self._round and state.uploader == self._number

    def beat_keys(self) -> tuple[str, ...]:
        """The heartbeat counter of each node of the latest round."""
        return tuple(self.keys.heartbeat(member) for member in self._members)

    def uploader_beat(self) -> str | None:
        """The heartbeat counter of the node that uploads: it need not be the one that holds the store."""
        return self.keys.heartbeat(self._read().uploader)

    # --- rounds --------------------------------------------------------------------------------------------------

    def join(self) -> Formed:
        """Take part in the next round.

        Raises:
            RendezvousTimeoutError: fewer than ``min_nodes`` nodes came in time.
            GroupClosedError: the job has ended.
            NodeLostError: too many processes have joined this job already.
            StoreLostError: the store's host is gone or frozen.
        """
        deadline = self.kept.deadline()
        if self.watch is None:
            self._enter(deadline)
        while True:
            self._watching().unsettle()
            self._last_call = self._gather(deadline)
            info = self._torch_round(deadline)
            formed = None if info is None else self._agree(info)
            if formed is not None:
                self._round, self._members = formed.round, formed.members
                self.kept.settle(formed.known)
                self._watching().settle(formed.round, formed.members)
                return formed

    def outlive(self, error: StoreLostError) -> bool:
        """The store is lost: let go of it, and look for its host when joining the next time. False on the host."""
        if self._links.hosting:
            return False
        self.kept.lose(error, self._round)
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        if self._dynamic is not None:
            dynamic, self._dynamic = self._dynamic, None
            self._links["join"].submit(lambda _: stop_beating(dynamic))
        if error.seen == SUPERSEDED:
            self._links.never_again()
        self._links.drop()
        return True

    def step_down(self) -> None:
        """Give up this node's place among the others: their next round need not wait until its heartbeat times out."""
        if self.watch is None or self.node_rank < 0:
            return
        self.watch.unsettle()
        going = self._links["join"].submit(lambda _: step_down(self._dynamic, _STEP_DOWN))
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
        after = self._change(lambda now: JobState(now.round, mine, end=wanted) if now.round < 0 else None)
        return after.end

    def read_end(self) -> End | None:
        """How the job ended, or None while it runs."""
        end = self._read().end
        self.kept.note(end)
        return end

    def leave(self) -> None:
        """Let go of all. The store's host stays, at most ``shutdown_grace`` seconds, until the others know the end."""
        if self.watch is not None:
            self.watch.stop()
        with suppress(RendezvousError):
            bye = self.keys.job(f"bye/{self._number}")
            self.control.call("leaving", lambda store: store.set(bye, "1"), timeout=2.0)
            if not self._links.hosting and self.read_end() is None:
                self.step_down()
            if self._links.hosting:
                self._await_byes()
        self._links.close()

    # --- entering ------------------------------------------------------------------------------------------------

    def _enter(self, deadline: float) -> None:
        settings = self.settings
        self._links.open(deadline, self.kept.vigil)
        if self._claimed != self._links.store:
            self._claim()
        if self.kept.vigil is not None:
            self._bring()
        self._dynamic = open_dynamic(
            settings,
            state=self._links["state"],
            rounds=self._links["rounds"].raw(),
            address=own_address(settings.host, settings.port),
            last_call=lambda: self._last_call,
        )
        self.watch = RangeWatch(
            self.control,
            self.keys,
            heartbeat_interval=settings.heartbeat_interval,
            heartbeat_timeout=settings.heartbeat_timeout,
            number=self._number,
            holds_store=self._links.hosting,
            move_on=self.move_on,
        )
        self.watch.start(self._dynamic)

    def _claim(self) -> None:
        settings = self.settings
        count = self.control.call("joining the job", lambda store: int(store.add(self.keys.claims, 1)))
        self._number, self._claimed = count - 1, self._links.store
        if count > settings.max_nodes + settings.max_replacements:
            # Each process that joins makes all others start over: a pod that dies again and again must not go on so.
            raise too_many(settings, count)

    def _bring(self) -> None:
        """This process was on a store that is lost with its host: tell the new one what the job knows."""
        settings, older, keys = self.settings, self._links.older, self.keys
        if older is not None:
            self.kept.left(older.store)
            Fence(older, settings.port, keys, settings.timeout, lambda store: supersede(store, keys.generation)).start()
        known = self.control.call("telling what the job knows", lambda store: self.kept.bring(store, keys.carried))
        # No round that may have begun on the store before gets its number again; whoever runs in one leaves it.
        self._change(lambda now: now.after(known.round))
        if known.lost > settings.max_replacements:
            text = f"{settings.host} was lost, and {settings.max_replacements} replacements are used up"
            self._change(lambda now: now.ended(End("replacements", -1, text)))
        failed = self.kept.failed
        if failed is not None:
            # This node then uploads it, unless another one was faster.
            self._round, mine = known.round, (self._number,)
            self._change(lambda now: JobState(known.round, mine, end=failed) if now.round == known.round else None)

    def _gather(self, deadline: float) -> float:
        """Wait for those of the round that is left who are to come; returns torch elastic's last call, in seconds."""
        if self._round < 0:
            return self.settings.last_call
        if self.kept.vigil is not None:
            hopes = min(deadline, time.monotonic() + self.settings.last_call)
            count_again(self.control, self.keys, len(self._members), lambda: self._watching().check(), hopes)
            return min(_NEXT_CALL, self.settings.last_call)
        waiting_for = Gathering(self.keys, self._round, self._members, self.gone)
        coming = waiting_for.meet(
            self.control,
            self.node_rank,
            lambda: self._watching().check(),
            lambda: time.monotonic() > deadline or self._read().round != self._round,
        )
        with suppress(Exception):  # of torch's: then somebody may be waiting
            if len(coming) <= self.settings.min_nodes and not self._dynamic.num_nodes_waiting():
                return 0.0
        return min(_NEXT_CALL, self.settings.last_call)

    def _torch_round(self, deadline: float) -> Any:
        # On a thread of its own: it may wait for a store that never answers, and the end of the job must be noticed.
        joining = self._links["join"].submit(lambda _: self._dynamic.next_rendezvous())
        return next_round(
            joining,
            check=lambda: self._watching().check(),
            too_few=self._too_few,
            deadline=deadline,
            patience=self.settings.heartbeat_timeout,
        )

    def _agree(self, info: Any) -> Formed | None:
        """Number the round and tell everybody; None if one of its nodes did not answer, and all must meet again."""
        round_store = RoundStore(
            info.store, self._links["rounds"], self.settings.heartbeat_timeout, lambda: self._watching().check()
        )
        round_store.enter(info.rank, self._number)
        if info.rank == 0:
            members = round_store.members(info.world_size)
            if members is None:
                return None
            number = self._change(lambda now: now.next(members), unless_ended=True).round
            offered = dict(self._prepare_round(number, len(members)))
            key = self.keys.carried
            known = self.control.call(
                "telling the round", lambda s: change_carried(s, key, lambda k: k.reached(number))
            )
            round_store.tell(number, members, offered, known)
        return round_store.hear()

    # --- small things --------------------------------------------------------------------------------------------

    def _watching(self) -> RangeWatch:
        if self.watch is None:
            raise RendezvousError(
                "this node is not in the group", where={"store": f"{self.settings.host}:{self.settings.port}"}
            )
        return self.watch

    def _read(self) -> JobState:
        return self._change(lambda _: None)

    def _change(self, wanted: Callable[[JobState], JobState | None], *, unless_ended: bool = False) -> JobState:
        """Move the job's standing by compare_set; returns how it stands then. An ended job stays as it is."""
        key = self.keys.generation
        state = self.control.call("reading where the job stands", lambda store: change(store, key, wanted))
        if unless_ended and state.end is not None:
            raise state.end.error(self.node_rank)
        return state

    def _too_few(self) -> RendezvousError:
        settings, end = self.settings, self.read_end()
        if end is not None:
            return end.error(self.node_rank)
        came = self.control.call("counting who came", lambda store: int(store.add(self.keys.claims, 0)))
        return too_few(settings, came, begun=self.kept.carried.round >= 0)

    def _await_byes(self) -> None:
        """The store's host: the others read the end from this process. Wait for the last round's nodes."""
        state = self._read()
        if state.end is None:
            return  # this process is leaving a job that goes on; nobody can go on without it
        keys = [self.keys.job(f"bye/{member}") for member in state.members]
        slots.await_farewells(self.control, lambda store: store.check(keys), self.settings.shutdown_grace)
