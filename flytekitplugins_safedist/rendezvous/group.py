"""One node's membership in the group: claim the slot, arrive, wait for all, move on, end.

The rules, and the races they settle, are in ``docs/rendezvous.md``; names of keys in :mod:`.protocol`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from ..errors import RendezvousError, StoreLostError
from . import slots
from .carried import Carried
from .client import Connection
from .connections import Links
from .fence import Fence
from .generations import Generations, Round
from .outliving import Outliving
from .protocol import SUPERSEDED, End, EndKind, Go, Keys, Slot, State, supersede
from .settings import GroupSettings
from .vigil import NOT_THERE, Vigil
from .watch import GroupWatch

logger = logging.getLogger(__name__)

_LOOK = 0.5
"""Seconds between two looks at a round that goes on without this node."""

_WAKEUP_SECONDS = 0.2
"""Seconds for the wake-up key of the last generation to be seen, once its successor was."""


class FixedGroup:
    """This node's place in the group. Not for use from two threads, except :attr:`watch` and :meth:`close`.

    Args:
        settings: see :class:`GroupSettings`.
        prepare_round: called on node 0 before it arrives in a generation; returns what the others need for that round
            (addresses as text). Whatever it started must already listen.
    """

    def __init__(self, settings: GroupSettings, prepare_round: Callable[[int], Mapping[str, str]]) -> None:
        self.settings = settings
        self.keys = Keys(settings.run_id)
        self.kept = Outliving(settings.describe((0,)), settings.timeout)
        self._prepare_round = prepare_round
        self.links = Links(settings, self.keys)
        self._generations = Generations(self.links, self.keys, settings)
        self._wakeup: Future[None] | None = None
        self._incarnation = 0
        self._claimed = ""  # the store on which it was claimed
        self._arrived = -1
        self.expected = 0  # nodes that node 0 waits for when it leaves, also those that have not come yet
        self._finished_before: int | None = None
        self.watch: GroupWatch | None = None

    @property
    def node_rank(self) -> int:
        """This node."""
        return self.settings.node_rank

    @property
    def incarnation(self) -> int:
        """Which process this is in this node's place, from 1; 0 before it has claimed the place."""
        return self._incarnation

    @property
    def nodes(self) -> int:
        """Size of the group."""
        return self.settings.nodes

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds without a sign of life after which a node counts as gone."""
        return self.settings.heartbeat_timeout

    def beat_keys(self) -> tuple[str, ...]:
        """The heartbeat counter of each node."""
        return tuple(self.keys.heartbeat(node) for node in range(self.settings.nodes))

    def gone(self) -> tuple[int, ...]:
        """None: a new process says itself that it has taken the place of one that is gone."""
        return ()

    def uploader_beat(self) -> str | None:
        """None: node 0 uploads and holds the store, whose heartbeat timeout says the same."""
        return None

    @property
    def control(self) -> Connection:
        """The connection for short calls.

        Raises:
            RendezvousError: the node has not joined yet, or has left.
        """
        return self.links.control

    def connect(self, deadline: float) -> None:
        """Reach the store and claim this node's slot, unless done; ``deadline`` is on ``time.monotonic``'s clock.

        Raises:
            RendezvousTimeoutError: node 0 could not be reached.
            GroupClosedError: the job has ended, or this node was replaced too often.
            FencedError: a newer process is in this node's place.
        """
        if self.links.connected:
            return
        self.links.open(deadline, self.kept.vigil)
        if self._incarnation == 0 or self._claimed != self.links.store:
            self._claim()
        else:
            # Node 0 was only cut off: its store knows this process, and all that it has told.
            self.watch = GroupWatch(self.control, self.keys, self.settings, self._incarnation)

    def outlive(self, error: StoreLostError) -> bool:
        """The store is lost: let go of it, and look for node 0 when joining the next time. False where there is nobody
        to look for: this is node 0."""
        if self.settings.node_rank == 0:
            return False
        self.kept.lose(error, max(self._arrived, -1 if self.watch is None else self.watch.generation))
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
        self._wakeup = None
        if error.seen == SUPERSEDED:
            self.links.never_again()
        self.links.close()
        return True

    def learn(self, known: Carried) -> None:
        """Keep what a store knew."""
        self.kept.learn(known)

    def join(self) -> Round:
        """Arrive in the next generation and wait until every node has.

        Raises:
            RendezvousTimeoutError: a node was missing at the deadline; on every node, naming the missing.
            GroupClosedError: the job has ended.
            FencedError: another process took this node's place.
            StoreLostError: node 0 is gone or frozen.
        """
        deadline = self.kept.deadline()
        self.connect(deadline)
        generation = self._stand_by(self._current())
        if generation <= self._arrived:
            self.move_on(generation)
            generation = self._current()
        while True:
            go = self._arrive(generation, deadline)
            if go.go:
                self._wakeup = self.links.wakeup.wait_for_key(self.keys.wakeup(generation))
                if self.watch is not None:
                    self.watch.settle(generation, self._wakeup)
                self.kept.settle(Carried.parse(go.carried.encode()))
                return Round(generation, go.values)
            generation = self._current()

    def move_on(self, generation: int) -> None:
        """Ask every node to leave ``generation`` and form the next one. Asking twice, or from two nodes, moves once."""
        self._generations.replace(generation, str(generation + 1))

    def close(self, kind: EndKind, text: str, missing: tuple[int, ...] = ()) -> End:
        """End the group for every node; whoever ends it first gives the reason. Returns the reason that counts.

        Raises:
            FencedError: another process took this node's place; a fenced process ends nothing.
            StoreLostError: node 0 is gone or frozen.
        """
        wanted = End(kind, self.settings.node_rank, text, missing)
        while True:
            state = self._read_state()
            if state.end is not None:
                return state.end
            state.check(self.settings.node_rank, self._incarnation)
            self._generations.replace(state.generation, wanted.text_value())

    def finish(self, round_no: int) -> bool:
        """End the group as done, unless it has moved on from ``round_no``; whether it has ended as done."""
        self._generations.replace(round_no, End("done", self.node_rank, "").text_value())
        end = self.read_end()
        return end is not None and end.kind == "done"

    def read_end(self) -> End | None:
        """How the group ended, or None while it lives."""
        return self._read_state().end

    def leave(self) -> None:
        """Say goodbye, let go of every connection; node 0 stays until all have left, or ``shutdown_grace`` is over."""
        if self.watch is not None:
            self.watch.stop()
        key = self.keys.bye(self.settings.node_rank, self._incarnation)

        def say(store: Any) -> None:
            store.set(key, "1")
            store.add(self.keys.byes, 1)

        with suppress(RendezvousError):
            self.control.call("leaving", say, timeout=2.0)
            if self.links.hosting:
                # Where the job goes on, the others go over to the next node 0's store, and say goodbye to none.
                if self.read_end() is not None:
                    self._await_byes()
            elif self.settings.nodes == 1:
                # No server goes away under the waiting thread, so it must be woken to end.
                self._generations.wake(self._arrived)
        self.links.close()

    def _await_byes(self) -> None:
        """Node 0: the others read the end from this process."""
        slots.await_farewells(
            self.control, lambda s: slots.farewells(s, self.keys).all_left(self.expected), self.settings.shutdown_grace
        )

    # --- joining -------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        keys, node, survived = self.keys, self.settings.node_rank, self._incarnation

        def claim(store: Any) -> tuple[Slot, Slot]:
            claimed = slots.claim(store, keys.incarnation(node), survived)
            store.add(keys.claims, 1)
            return claimed

        before, after = self.control.call("claiming this node's slot", claim)
        self._incarnation, self._claimed = after.number, self.links.store
        self.watch = GroupWatch(self.control, keys, self.settings, self._incarnation)
        if survived:
            self._bring()
        elif before.number:
            self._replace(before.number)

    def _bring(self) -> None:
        """This process was on a store that is lost, and so is its holder: tell the new one what the job knows."""
        settings, older = self.settings, self.links.older
        keys, me = self.keys, settings.node_rank
        if older is not None:
            self.kept.left(older.store)
            Fence(older, settings.port, keys, settings.timeout, lambda store: supersede(store, keys, me)).start()
        known = self.control.call("telling what the job knows", lambda store: self.kept.bring(store, keys.carried))
        if known.lost > settings.max_replacements:
            text = f"{settings.describe((0,))} was lost, and {settings.max_replacements} replacements are used up"
            self.close("replacements", text)
        if self.kept.failed is not None:
            self.close("failed", self.kept.failed.text)
        # Before this node arrives in any: so no round that may have begun on the store before gets its number again.
        while (now := self._read_state()).end is None and now.generation <= known.round:
            self._generations.replace(now.generation, str(known.round + 1))

    def _replace(self, before: int) -> None:
        """This process takes a dead one's place: everyone must start over, and that costs the replacement budget."""
        settings, keys = self.settings, self.keys
        mine = self._incarnation
        replaced = self.control.call("replacing", lambda s: slots.replace(s, keys, settings, before=before, mine=mine))
        self._finished_before = replaced.finished
        logger.info("this is process %d of node %d", self._incarnation, settings.node_rank)
        if replaced.count > settings.max_replacements:
            node = settings.describe((settings.node_rank,))
            self.close("replacements", f"{node} came back, but {settings.max_replacements} replacements are used up")
        elif replaced.again:
            self.close("replacements", settings.relapse())
        # Read after the claim: whatever generation the fenced process may still count in, it is not above this one.
        # We move on past it, so its arrival and ours never count in the same generation.
        current = self._current()
        if current != self._finished_before:
            self.move_on(current)

    def _stand_by(self, generation: int) -> int:
        """Where this node's ranks had succeeded before its process was lost, the round goes on without it: wait until
        it ends in success, which raises, or is left for another round. Returns that one."""
        pause = threading.Event()
        while generation == self._finished_before:
            pause.wait(min(_LOOK, self.settings.heartbeat_interval))
            generation = self._current()
        return generation

    def _arrive(self, generation: int, deadline: float) -> Go:
        if self._wakeup is not None:
            try:
                self._wakeup.result(_WAKEUP_SECONDS)
            except FutureTimeoutError:
                # Whoever moved the generation died before it woke the others; our own wait would block that connection.
                self._generations.wake(self._arrived)
        if self.node_rank == 0:
            self._generations.offer(generation, self._prepare_round(generation))
        self._arrived = generation

        if self._generations.arrive(generation) == self.nodes:
            return self._generations.complete(generation)
        return self._await_go(generation, deadline)

    def _await_go(self, generation: int, deadline: float) -> Go:
        key, vigil = self.keys.go(generation), Vigil("", self.settings.timeout, self.kept.say)
        came = self.links.wakeup.submit(lambda store: bytes(store.get(key)))
        while True:
            left = deadline - time.monotonic()
            with suppress(FutureTimeoutError):
                return self._generations.heard(came, min(self.settings.heartbeat_interval, max(0.0, left)))
            if self.watch is not None:
                self.watch.check()
                if self.watch.generation > generation:
                    self._generations.wake(generation)
            if self.settings.node_rank == 0 and vigil.due():
                # Only here, where the store is: N nodes need not look at N keys each.
                vigil.look(*NOT_THERE, who=self.settings.describe(self._generations.missing(generation)))
            # The connection of the wake-up may be broken without a sign while this one works: look, once per beat.
            decided = self._generations.peek(generation)
            if decided is not None:
                return decided
            if left <= 0:
                return self._expire(generation, came)

    # --- deadlines -----------------------------------------------------------------------------------------------

    def _expire(self, generation: int, came: Future[bytes]) -> Go:
        """The deadline passed. One node finds out who is missing and tells all; nobody asks N keys on N nodes."""
        keys, settings = self.keys, self.settings
        me = str(settings.node_rank)
        judge = self.control.call(
            "finding out who is missing", lambda store: store.compare_set(keys.judge(generation), "", me)
        )
        if judge.decode() != me:
            with suppress(FutureTimeoutError):
                return self._generations.heard(came, settings.shutdown_grace)
        # From here the round cannot complete any more; if it just has, that is fine too.
        decided = self._generations.decide(generation, Go(go=False))
        if decided.go:
            return decided
        missing = self._generations.missing(generation)
        text = f"{settings.describe(missing)} of {settings.nodes} did not arrive within {settings.timeout:g} s"
        known = self.control.call("reading the losses", lambda store: bytes(store.compare_set(keys.carried, "", "")))
        self.close("lost" if Carried.parse(known).interrupted else "timeout", text, missing)
        return Go(go=False)

    # --- small things --------------------------------------------------------------------------------------------

    def _read_state(self) -> State:
        state = self._generations.read()
        self.kept.note(state.end)
        return state

    def _current(self) -> int:
        return self._read_state().check(self.settings.node_rank, self._incarnation)
