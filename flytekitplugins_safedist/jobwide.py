"""What the agents of all nodes decide together about a round: its root cause, whether there is another, its end.

The same code serves one node and many: the store behind it is shared by all agents, and each step is one that several
nodes may take at once with one result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from .errors import NodeLostError
from .outcome import RankOutcome, is_consequence
from .rendezvous.handler import SafedistHandler
from .rendezvous.jobstore import TEXT_LIMIT, Failure
from .restart import Action, Decision, decide, would_repeat

REPORT_SECONDS = 15.0
"""How long the nodes of a failed round wait for each other's word beyond the time that ending ranks may take."""


@dataclass(frozen=True)
class Ended:
    """How the job ended in failure, as every node can read it.

    Attributes:
        cause: the root cause.
        decision: why there is no further restart.
        disk: what scratch held on the node of the root cause, as text.
    """

    cause: RankOutcome
    decision: Decision
    disk: str

    def to_json(self) -> str:
        """As stored for the other nodes."""
        return json.dumps(
            {"cause": self.cause.to_json(), "decision": asdict(self.decision), "disk": self.disk}, default=str
        )

    @classmethod
    def from_json(cls, text: str) -> Ended:
        """The inverse of :meth:`to_json`."""
        data = json.loads(text)
        decision = Decision(Action(data["decision"]["action"]), data["decision"]["reason"])
        return cls(RankOutcome.from_json(data["cause"]), decision, data["disk"])


class JobWide:
    """The job as all its agents see it."""

    def __init__(
        self,
        handler: SafedistHandler,
        *,
        nnodes: int,
        max_restarts: int,
        stop_seconds: float,
        say: Callable[[str], object],
    ) -> None:
        """
        Args:
            handler: this node's rendezvous; its store holds all that is shared.
            nnodes: nodes of the job.
            max_restarts: the job's budget.
            stop_seconds: how long a node may take to end its ranks.
            say: takes one sentence for the node's log.
        """
        self._handler = handler
        self._nnodes = nnodes
        self._max_restarts = max_restarts
        self._patience = stop_seconds + REPORT_SECONDS
        self._say = say
        self._reported = -1
        self._done = -1

    def report(self, cause: RankOutcome | None) -> None:
        """Say how the current round ended on this node: its first failure, or None where ranks were only torn down."""
        round_ = self._handler.round
        if self._reported == round_:
            return
        self._reported = round_
        self._handler.jobs.report(round_, None if cause is None else _failure(cause))

    def settle(self, cause: RankOutcome, disk: str) -> Decision:
        """After a failure on this node: stop the others, find the job's root cause, and decide with all of them.

        Args:
            cause: the first failure here; reported, with its ranks ended.
            disk: what scratch holds here.

        Returns:
            The decision. Giving up closes the job: every node then finds :class:`Ended`.

        Raises:
            NodeLostError: a node does not answer, and its ranks' end is all there is to explain the failure.
        """
        round_, jobs = self._handler.round, self._handler.jobs
        self.report(cause)
        if self._nnodes > 1:
            self._handler.request_round()
        found, silent = jobs.wait_reports(round_, self._patience)
        if found is not None:
            cause = RankOutcome.from_json(found.text)
        if silent and is_consequence(cause):
            return self._node_lost(round_, silent, cause)
        granted = None if would_repeat(cause) else jobs.spend_restart(self._max_restarts, round_no=round_)
        decision = decide(self._max_restarts, cause=cause, granted=granted)
        if decision.action is Action.RESTART:
            name = cause.raised.type if cause.raised is not None else cause.status.value
            self._say(f"rank {cause.rank} failed ({name}); all ranks start again: {decision.reason}")
        else:
            jobs.close("failed", Ended(cause, decision, disk).to_json())
        return decision

    def _node_lost(self, round_: int, silent: tuple[int, ...], cause: RankOutcome) -> Decision:
        limit = self._handler.settings.max_replacements
        names = ", ".join(map(str, silent))
        granted = self._handler.jobs.spend_replacement(limit, round_no=round_)
        if granted is None:
            raise NodeLostError(
                f"node(s) {names} were lost, and {limit} replacements are used up",
                where={"round": round_},
                seen=f"no word from node(s) {names}; on node {cause.node_rank}, rank {cause.rank} lost its peer",
                hint="look at the pods of those nodes: evicted, out of memory, or their machine gone",
            )
        self._say(f"node(s) {names} were lost; waiting for their pods to come back (replacement {granted} of {limit})")
        return Decision(Action.RESTART, f"node(s) {names} are replaced")

    def all_done(self) -> bool:
        """Whether the ranks of every node have succeeded in this round. Call it once this node's have."""
        round_, jobs = self._handler.round, self._handler.jobs
        if self._nnodes == 1:
            return True
        if self._done != round_:
            self._done = round_
            jobs.mark_done(round_)
        if not jobs.all_done(round_):
            return False
        jobs.close("done", "")
        return True

    def over(self) -> bool:
        """Whether the job has come to its end, in success or in a failure that every node can read."""
        end = self._handler.jobs.end()
        return end is not None and end.kind in ("done", "failed")

    def ended(self) -> Ended | None:
        """How the job failed, if an agent has closed it as failed."""
        end = self._handler.jobs.end()
        return Ended.from_json(end.text) if end is not None and end.kind == "failed" else None


def _failure(cause: RankOutcome) -> Failure:
    text = cause.to_json()
    if len(text.encode()) > TEXT_LIMIT // 2:
        text = cause.shortened(TEXT_LIMIT // 8).to_json()
    return Failure(
        node=cause.node_rank,
        rank=cause.rank,
        time_ns=cause.time_ns,
        consequence=is_consequence(cause),
        text=text,
    )
