"""The agent's part in letting all ranks of the job save at one step: because one asked, or a node is told to stop.

A thread for each round: it looks at the pages of this node's ranks and at the job's store, and goes through the stages
of a call (:mod:`..rendezvous.agreement`). It never waits for a rank, so ranks may be anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum

from ..errors import RendezvousError
from ..ranks.shared_page import AgentPage
from ..rendezvous.agreement import RoundAgreement

_BOARDS_EVERY = 0.05
"""Seconds between two looks at this node's pages: loads from memory."""

_NEWS_EVERY = 0.4
"""Seconds between two looks at the store while nothing goes on."""

_HURRY = 0.01
"""The same while ranks may be standing still."""

_READS_PER_SECOND = 5000
"""What all nodes together may ask of node 0's store; with more nodes each asks less often."""

_STORES_DRAIN = 0.005
"""Seconds from calling the ranks to reading their floors. A processor may hold a store back while it already loads; it
does so for nanoseconds."""


class _Stage(Enum):
    IDLE = "idle"
    BEGUN = "begun"
    READY = "ready"
    CALLED = "called"
    HEARD = "heard"
    ANSWERED = "answered"
    DONE = "done"


class Agreement:
    """This node's part in one round."""

    def __init__(self, pages: Sequence[AgentPage], store: RoundAgreement, *, say: Callable[[str], object]) -> None:
        """
        Args:
            pages: of this node's ranks.
            store: the round on the job's store.
            say: takes one sentence for the node's log.
        """
        self._pages = pages
        self._store = store
        self._say = say
        self._stopped = threading.Event()
        self._told = False  # by this node's signal; written by the main thread, also inside a signal handler
        self._heard_told = False
        self._preempted = False
        self._listening = False
        self._stage = _Stage.IDLE
        self._number = 0
        self._answered_requests = 0
        self._saved_since = False
        self._called_at = 0.0
        self._looked = 0.0
        self.settled = False
        """Whether a preemption has been dealt with by every rank of the job, as far as it can be."""
        self._listened = False  # on another node, as far as this one has heard

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="safedist-agreement", daemon=True).start()

    def stop(self) -> None:
        """The round is over. Returns at once; a call to the store that hangs is abandoned."""
        self._stopped.set()

    def is_listened_to(self) -> bool:
        """Whether a rank of the job would do something about a preemption. Never blocks; safe in a signal handler."""
        return self._listened or any(page.listens for page in self._pages)

    def preempt(self) -> None:
        """This node is told to stop. Safe in a signal handler: no lock."""
        self._told = True

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._stopped.wait(self._advance())
        except RendezvousError as error:
            # The round ends for the same reason; until then ranks must not stand still for an answer.
            for page in self._pages:
                page.answer(self._number + 1, None, urgent=self._preempted)
            if not self._stopped.is_set() and self._preempted:
                self._say(f"whether all ranks have saved cannot be known: {error}")
            self.settled = True

    def _advance(self) -> float:
        """Do what can be done now; returns seconds until it is worth looking again."""
        self._look_at_pages()
        step = {
            _Stage.IDLE: self._idle,
            _Stage.BEGUN: self._begun,
            _Stage.READY: self._ready,
            _Stage.CALLED: self._called,
            _Stage.HEARD: self._heard,
            _Stage.ANSWERED: self._answered,
            _Stage.DONE: self._done,
        }
        before = self._stage
        step[before]()
        if self._stage is not before:
            return 0.0
        hurry = before in (_Stage.READY, _Stage.CALLED, _Stage.HEARD)
        return max(_HURRY, self._store.nodes / _READS_PER_SECOND) if hurry else _BOARDS_EVERY

    def _look_at_pages(self) -> None:
        if not self._listening and any(page.listens for page in self._pages):
            self._listening = True
            self._store.listen()
        if self._told and not self._heard_told:
            self._heard_told = True
            self._store.tell()
            self._be_preempted()

    def _be_preempted(self) -> None:
        self._preempted = True
        for page in self._pages:
            page.preempt()

    def _news(self) -> int:
        """The latest call. Asked for only now and then."""
        now = time.monotonic()
        if now - self._looked < max(_NEWS_EVERY, 2 * self._store.nodes / _READS_PER_SECOND):
            return self._number
        self._looked = now
        news = self._store.look()
        if news.preempted and not self._preempted:
            self._be_preempted()
        self._listened = self._listened or news.listened
        return news.call

    def _idle(self) -> None:
        latest = self._news()
        if latest == self._number and self._wanted():
            latest = self._store.begin(self._number)
        if latest > self._number:
            self._number, self._stage = latest, _Stage.BEGUN

    def _wanted(self) -> bool:
        return self._requests() != self._answered_requests or (self._preempted and not self._saved_since)

    def _requests(self) -> int:
        return sum(page.asked for page in self._pages)

    def _begun(self) -> None:
        self._store.arrive("ready", self._number)
        self._stage = _Stage.READY

    def _ready(self) -> None:
        if self._store.all_at("ready", self._number):
            for page in self._pages:
                page.call(self._number)
            self._called_at, self._stage = time.monotonic(), _Stage.CALLED

    def _called(self) -> None:
        if time.monotonic() - self._called_at < _STORES_DRAIN:
            return
        self._answered_requests = (
            self._requests()
        )  # whoever asks from here on may be past the step, and is answered anew
        floors = [page.floor for page in self._pages]
        highest = max((floor for floor in floors if floor is not None), default=None)
        self._store.propose(self._number, highest, urgent=self._preempted)
        self._stage = _Stage.HEARD

    def _heard(self) -> None:
        if not self._store.all_at("heard", self._number):
            return
        agreed = self._store.agreed(self._number)
        if agreed.urgent and not self._preempted:
            self._be_preempted()
        self._saved_since = agreed.urgent
        for page in self._pages:
            page.answer(self._number, agreed.step, urgent=agreed.urgent)
        if agreed.urgent:
            at = "no rank saves by steps" if agreed.step is None else f"all ranks save at step {agreed.step}"
            self._say(f"a node was told to stop: {at}")
        self._stage = _Stage.ANSWERED

    def _answered(self) -> None:
        self._news()
        if all(page.finished(self._number, urgent=self._saved_since) for page in self._pages):
            self._store.arrive("done", self._number)
            self._stage = _Stage.DONE

    def _done(self) -> None:
        self._news()
        if self._store.all_at("done", self._number):
            self._stage = _Stage.IDLE
            self.settled = self._saved_since
