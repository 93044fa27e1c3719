"""What the agents of all nodes decide together about a round: its root cause, whether there is another, its end.

The same code serves one node and many: the store behind it is shared by all agents, and each step is one that several
nodes may take at once with one result.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from ..errors import NodeLostError, RendezvousError
from ..ranks.outcome import RankOutcome, echo, is_consequence
from ..rendezvous.failure import Failure
from ..rendezvous.heartbeat_monitor import HeartbeatMonitor
from ..rendezvous.jobstore import TEXT_LIMIT
from ..rendezvous.session import RendezvousSession
from ..texts import encodable
from .policy import Action, Decision, decide, would_repeat

REPORT_SECONDS = 15.0
"""How long, at most, the nodes of a failed round wait for each other's word beyond the time that ending ranks may take;
less where a heartbeat times out earlier."""

_LEAST_SECONDS = 5.0
"""The same at least: a node whose ranks only echo a failure waits some seconds for the one that they echo."""

_DISK_CHARACTERS = 4096
"""Of what is told about scratch: a line per rank, for more ranks than a node has."""

_NAMED_RANKS = 256
"""Of those that had returned: the first of a very large job say as much as all."""

LEAVE_SECONDS = 2.0
"""How long a node that is told to stop tries to tell the others: a store that hangs must not eat the time to stop."""


@dataclass(frozen=True)
class Ended:
    """How the job ended in failure, as every node can read it.

    Attributes:
        cause: the root cause.
        decision: why there is no further restart.
        disk: what scratch held on the node of the root cause, as text.
        returned: ranks that had already returned, where the failure only says that a peer was lost.
    """

    cause: RankOutcome
    decision: Decision
    disk: str
    returned: tuple[int, ...] = ()

    def to_json(self) -> str:
        """As stored for the other nodes: within what a note may hold, at the cost of the middle of long texts."""
        disk = encodable(self.disk[:_DISK_CHARACTERS])
        returned = self.returned[:_NAMED_RANKS]

        def dump(cause: RankOutcome) -> str:
            facts = {"cause": cause.to_json(), "decision": asdict(self.decision), "disk": disk, "returned": returned}
            return json.dumps(facts, default=str, ensure_ascii=False)

        return dump(self.cause.fitting(TEXT_LIMIT, dump))

    @classmethod
    def from_json(cls, text: str) -> Ended:
        """The inverse of :meth:`to_json`."""
        data = json.loads(text)
        decision = Decision(Action(data["decision"]["action"]), data["decision"]["reason"])
        return cls(RankOutcome.from_json(data["cause"]), decision, data["disk"], tuple(data["returned"]))


def is_to_report_the_lost(node_rank: int, overdue: Sequence[int]) -> bool:
    """Whether a node reports that the heartbeats of others are overdue: the first one whose own is not does."""
    return set(range(node_rank)) <= set(overdue) and node_rank not in overdue


class JobCoordinator:
    """The job as all its agents see it."""

    def __init__(
        self,
        handler: RendezvousSession,
        *,
        max_restarts: int,
        stop_seconds: float,
        heartbeat: float,
        say: Callable[[str], object],
    ) -> None:
        """
        Args:
            handler: this node's rendezvous; its store holds all that is shared.
            max_restarts: the job's budget.
            stop_seconds: how long a node may take to end its ranks.
            heartbeat: seconds without a heartbeat after which a node counts as lost.
            say: takes one sentence for the node's log.
        """
        self._handler = handler
        self._max_restarts = max_restarts
        self._patience = stop_seconds + max(_LEAST_SECONDS, min(REPORT_SECONDS, heartbeat))
        self._say = say
        self._monitor = HeartbeatMonitor(heartbeat)
        self._reported = -1
        self._done = -1
        self._missed = -1

    def leave(self, why: str) -> None:
        """This node is told to stop: tell the others before its ranks are ended, so that they act at once.

        A new round is asked for, which begins when this node's place is taken; or, in a range, when the others are
        there. A node whose ranks have succeeded already leaves without a word: its part is done, unless it holds rank
        0's outputs.

        Args:
            why: for the others' logs.
        """
        telling = threading.Thread(target=self._tell_that_it_leaves, args=(why,), daemon=True)
        telling.start()
        telling.join(LEAVE_SECONDS)

    def _tell_that_it_leaves(self, why: str) -> None:
        handler = self._handler
        # Whatever goes wrong here, the others will miss this node's heartbeat.
        with suppress(RendezvousError):
            round_, jobs = handler.round, handler.jobs
            if handler.nodes == 1 and handler.node_0_holds_store:
                return
            if handler.holds_store:
                # The others count the loss themselves, with that of the store; it stays until they know the reason.
                jobs.leave_round(round_, why, with_store=True)
                handler.request_round()
                jobs.wait_reports(round_, LEAVE_SECONDS)
                return
            if self._done == round_ and handler.node_rank != 0:
                return
            jobs.leave_round(round_, why)
            if (
                jobs.spend_replacement(
                    handler.max_replacements, round_no=round_, why=f"node {handler.node_rank} was {why}"
                )
                is None
            ):
                jobs.close("replacements", f"node {handler.node_rank} was {why}, and {_spent(handler)}")
                return
            handler.request_round()
            handler.step_down()

    def anybody_left(self) -> bool:
        """Whether a node has left this round: what fails after that is an echo, and there is nothing to wait for."""
        with suppress(RendezvousError):
            return bool(self._handler.jobs.left(self._handler.round))
        return False

    def timed_out(self) -> bool:
        """Whether this round has failed, so far as nodes have said, because a collective timed out."""
        with suppress(RendezvousError):
            found = self._handler.jobs.root_cause(self._handler.round)
            return found is not None and RankOutcome.from_json(found.text).timed_out
        return False

    def say_who_left(self) -> None:
        """For this node's log: why the round that it leaves is over, where nodes left it."""
        for node, why in self._handler.jobs.left(self._handler.round).items():
            self._say(f"node {node} has left: {why}")

    def report(self, cause: RankOutcome | None, returned: Sequence[int]) -> None:
        """Say how the current round ended on this node: its first failure, or None where ranks were only torn down; and
        which of its ranks had returned."""
        round_ = self._handler.round
        if self._reported == round_:
            return
        self._reported = round_
        self._handler.jobs.report(round_, None if cause is None else _failure(cause), returned=returned)

    def settle(self, cause: RankOutcome, disk: str, returned: Sequence[int] = ()) -> Decision:
        """After a failure on this node: stop the others, find the job's root cause, and decide with all of them.

        Args:
            cause: the first failure here; reported, with its ranks ended.
            disk: what scratch holds here.
            returned: ranks here that had returned.

        Returns:
            The decision. Giving up closes the job: every node then finds :class:`Ended`.

        Raises:
            NodeLostError: a node does not answer, and its ranks' end is all there is to explain the failure.
        """
        round_, jobs = self._handler.round, self._handler.jobs
        self.report(cause, returned)
        self._handler.request_round()
        found, overdue = jobs.wait_reports(round_, self._patience)
        self.say_who_left()
        if found is not None:
            cause = RankOutcome.from_json(found.text)
        if overdue and is_consequence(cause) and jobs.store_leaves(round_):
            return Decision(Action.RESTART, "the node with the job's store has left")
        if overdue and is_consequence(cause):
            seen = f"no report from them; on node {cause.node_rank}, rank {cause.rank} lost its peer"
            return self._replace(round_, overdue, seen)
        if is_consequence(cause) and jobs.replaced(round_):
            # Another node has said that one is lost, and the lost one has spoken since: still no restart of the user's.
            return Decision(Action.RESTART, "the round was ended for a lost node")
        if is_consequence(cause) and jobs.made_room(round_):
            # In a range: the ranks of another node were ended for the newcomer first, and these have lost their peers.
            return Decision(Action.RESTART, "the round was ended for a node that joins")
        granted = (
            None
            if would_repeat(cause)
            else jobs.spend_restart(
                self._max_restarts, round_no=round_, why=f"rank {cause.rank} on node {cause.node_rank}: {_name(cause)}"
            )
        )
        decision = decide(self._max_restarts, cause=cause, granted=granted)
        if decision.action is Action.RESTART:
            self._say(f"rank {cause.rank} failed ({_name(cause)}); all ranks start again: {decision.reason}")
        else:
            # What failed first is no cause: say who was not there any more.
            gone = jobs.returned(round_) if is_consequence(cause) else ()
            jobs.close("failed", Ended(cause, decision, disk, gone).to_json())
        return decision

    def _replace(self, round_: int, lost: tuple[int, ...], seen: str) -> Decision:
        limit = self._handler.max_replacements
        names = ", ".join(map(str, lost))
        granted = self._handler.jobs.spend_replacement(limit, round_no=round_, why=f"node(s) {names} lost ({seen})")
        if granted is None:
            text = f"node(s) {names} were lost, and {_spent(self._handler)}"
            self._handler.jobs.close("replacements", text)
            raise NodeLostError(
                text,
                where={"round": round_},
                seen=seen,
                hint="look at the pods of those nodes: evicted, out of memory, or their machine gone",
            )
        self._say(f"node(s) {names} lost ({seen}); waiting for them to come back: replacement {granted} of {limit}")
        return Decision(Action.RESTART, f"node(s) {names} are replaced")

    def watch_nodes(self) -> None:
        """While ranks run: when a node's heartbeat is overdue, ask all for a new round.

        Its peers may hang in a collective without any error, so nothing else would ever end this round. A frozen node
        that wakes finds that the round is over and joins the next; one that is recreated takes its own place.

        Raises:
            NodeLostError: the budget for lost nodes is spent.
        """
        here = self._handler.node_rank
        # Where node 0 holds the store, the others hear of its loss anyway; N nodes need not read N counters each.
        watches = here == 0 or not self._handler.node_0_holds_store
        if self._handler.nodes == 1 or not watches or not self._monitor.due():
            return
        round_, jobs = self._handler.round, self._handler.jobs
        overdue = self._monitor.overdue(round_, jobs.beats())
        if not overdue or not is_to_report_the_lost(here, overdue):
            return
        # Not node 0: in a range it may be lost without the store, but with rank 0's outputs.
        done = jobs.done_among(round_, [node for node in overdue if node != 0])
        if done and self._missed != round_:
            self._missed = round_
            self._say(f"node(s) {', '.join(map(str, done))} lost after their ranks had succeeded: the round goes on")
        lost = tuple(node for node in overdue if node not in done)
        if lost:
            self._monitor.forget()
            self._replace(round_, lost, f"no sign of life for {self._monitor.limit:g} s")
            self._handler.request_round()

    def all_done(self) -> bool:
        """Whether the ranks of every node have succeeded in this round. Call it once this node's have."""
        round_, jobs = self._handler.round, self._handler.jobs
        if self._done != round_:
            self._done = round_
            jobs.mark_done(round_)
        return jobs.all_done(round_) and jobs.finish(round_)

    def over(self) -> bool:
        """Whether the job has come to its end, in success or in a failure that every node can read."""
        end = self._handler.jobs.end()
        return end is not None and end.kind in ("done", "failed")

    def ended(self) -> Ended | None:
        """How the job failed, if an agent has closed it as failed."""
        end = self._handler.jobs.end()
        return Ended.from_json(end.text) if end is not None and end.kind == "failed" else None


def _spent(handler: RendezvousSession) -> str:
    return f"{handler.max_replacements} replacements are used up"


def _name(cause: RankOutcome) -> str:
    return cause.raised.type if cause.raised is not None else cause.status.value


def _failure(cause: RankOutcome) -> Failure:
    def failure(of: RankOutcome) -> Failure:
        return Failure(
            node=of.node_rank,
            rank=of.rank,
            time_ns=of.time_ns,
            consequence=echo(of),
            text=of.to_json(),
        )

    return failure(cause.fitting(TEXT_LIMIT, lambda shorter: failure(shorter).dump()))
