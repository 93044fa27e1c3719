"""The node agent: one per pod. It does what the coordinator says, and says what becomes of this node's ranks.

All decisions about the job are the coordinator's (:mod:`.coordinator`); this is a loop over one inbox, which also
signals come into, and over the ranks of one round.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import stopping
from ..agent import scratch
from ..agent.disk import DiskWatch
from ..agent.rank_set import Ranks
from ..config.grace_period import END_SECONDS
from ..errors import JobInterruptedError, NodeLostError, SafedistError
from ..hangs import picture
from ..rank.outcome import RankOutcome, root_cause
from . import messages as m
from . import reports, signals
from .arrival import NOT_STARTED, cannot_do_its_part
from .ending import Finish, refusal, verdict_of
from .hang_messages import Hung, Look
from .hang_watch import HangWatch
from .link import GivenUp, LinkLost
from .membership import Membership
from .preflight import PreflightGate
from .preflight_messages import Cleared
from .prepare import NodePlan
from .reports import Report
from .round_start import orders
from .saving import RoundSaving
from .seen import RunSeen
from .signals import Signalled, StacksWanted
from .verdict import judge

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Between two looks at the ranks, where the inbox brings nothing."""

GRACE_SECONDS = 3.0
"""How long ranks run on while the coordinator cannot be heard: a broken connection is no lost node yet."""

_BUG = "report this as a bug of safedist, with the log"


class NodeAgent:
    """Drives the ranks of one node until the job has ended, or this process is told to stop.

    Args:
        plan: what to do.
        job: this process in its job.
        show: takes the ranks' output, in blocks of whole lines.
        say: takes one sentence of the agent's own.
    """

    def __init__(
        self,
        plan: NodePlan,
        job: Membership,
        *,
        show: Callable[[str], object],
        say: Callable[[str], object],
    ) -> None:
        self.plan = plan
        self.report = Report()
        self.seen = RunSeen(plan, job)
        self._job = job
        self._show = show
        self._say = say
        self._ranks: Ranks | None = None
        self._saving: RoundSaving | None = None
        self._hangs: HangWatch | None = None
        self._disk = DiskWatch(plan.limit)
        self._become: m.Returned | m.Ended | None = None  # of the ranks of this round; said again on each connection
        self._failure: tuple[RankOutcome, Ranks] | None = None  # of the last round, for when the whole of it is wanted
        self._cut_since: float | None = None
        self._leaves: tuple[int, float] | None = None
        self._finish: Finish | None = None
        self._forks = plan.unsafe is None
        timeouts = plan.settings.timeouts
        self._stays = stopping.within_grace(timeouts.preemption, then=timeouts.stop)
        self._gate = PreflightGate(plan, job.tell, self._go)
        self._handlers = self._table()

    def _table(self) -> dict[type, Callable[[Any], object]]:
        return {
            m.Welcome: self._welcome,
            m.Refused: self._refused,
            m.Go: self._gate.go,
            Cleared: self._gate.cleared,
            m.Greet: lambda _: self._job.tell(self._job.me),
            m.Stop: self._stop,
            m.Tell: self._tell,
            m.Again: self._again,
            m.Waits: lambda waits: self._say(waits.why),
            **dict.fromkeys((m.Gather, m.Answer, m.AllSaved), lambda said: self._hand(said, to=self._saving)),
            **dict.fromkeys((Look, Hung), lambda said: self._hand(said, to=self._hangs)),
            m.TheEnd: self._end,
            LinkLost: self._lost,
            GivenUp: self._given_up,
            Signalled: self._signalled,
            StacksWanted: lambda _: self._show_stacks(),
        }

    def drive(self) -> Finish:
        """Run until the job has ended; what it came to is in :attr:`report`, too.

        Raises:
            JobInterruptedError: a signal told this process to stop; every rank is gone.
            FencedError: another process has taken this one's place.
            LaunchError, ScratchError, RendezvousError: the ranks could not be started; or this node has no part in the
                job.
        """
        self._finish = None
        started = time.monotonic()
        with signals.into(self._job.inbox, self._longest):
            try:
                finish = None
                while finish is None:
                    finish = self._step()
            finally:
                self._end_round(signal.SIGTERM)
                self.report.seconds["total"] = time.monotonic() - started
        self.report.verdict = verdict_of(finish, self.plan.limit, self.plan.job.attempt.topology.max_nodes)
        if self.report.verdict is not None:
            self.report.result = None
        return finish

    # --- the loop --------------------------------------------------------------------------------------------------
    def _step(self) -> Finish | None:
        item = self._job.heard(LOOK_SECONDS)
        while item is not None:
            self._take(item)
            if self._finish is not None:
                return self._finish  # what comes after the end is for whoever waits for the upload
            item = self._job.heard(0)
        if self._ranks is not None:
            self._watch(self._ranks)
        self.seen.look(self._ranks)
        return None

    def _take(self, item: object) -> None:
        handler = self._handlers.get(type(item))
        if handler is None:
            raise SafedistError("the coordinator says what this agent does not know", seen=repr(item)[:500], hint=_BUG)
        handler(item)

    def _watch(self, ranks: Ranks) -> None:
        saving = self._saving
        if saving is not None:
            saving.look()
        if self._leaves is not None and (
            saving is None or saving.settled or self._cut_since is not None or time.monotonic() >= self._leaves[1]
        ):
            self._leave(self._leaves[0])
        if self._cut_since is not None and time.monotonic() - self._cut_since > GRACE_SECONDS:
            self._cut_since = None
            self._say("the ranks here are ended: the job's coordinator is lost, and with it the round")
            self._ended(ranks, None, cut=True)
            return
        if self._job.me.state != "running":
            return  # its ranks have returned; a failure elsewhere still means a new round here
        ranks.poll()
        if ranks.failed:
            ranks.settle()
            self._ended(ranks, "failed")
            return
        excess = self._disk.excess(lambda: ranks.usage(self.plan.scratch))
        late = ranks.blame(*excess) if excess is not None else ranks.late()
        if late is not None:
            self._ended(ranks, late)
        elif ranks.finished:
            self._done(ranks)
        elif self._hangs is not None:
            self._hangs.look()

    # --- what the coordinator says -----------------------------------------------------------------------------------
    def _welcome(self, welcome: m.Welcome) -> None:
        self._cut_since = None
        self._job.now(history=welcome.history)
        if self._become is not None:
            self._job.tell(self._become)
        if self._saving is not None:
            self._saving.again()

    def _refused(self, refused: m.Refused) -> None:
        raise refusal(refused, self._job.me)

    def _go(self, go: m.Go, checked: float) -> None:
        if go.round <= self._job.me.round:
            return  # said again, to a connection that came back
        plan = self.plan
        if self._ranks is not None:  # of a round that is over, though nobody could say so here
            self._ranks.stop()
            self.seen.over(self._ranks)
        self._job.now(round=go.round, state="running", alarm=None, history=go.history)
        if self.report.rounds:  # the first round has its own start line
            if plan.settings.scratch.keep == "never":
                # What filled the disk must not keep the next round from starting.
                scratch.remove_rounds_before(plan.scratch, go.round)
            count = go.nnodes * plan.settings.nproc_per_node
            self._say(f"round {go.round}: {go.nnodes} node(s) are there, {count} rank(s) start")
        self._failure = self._become = None
        self.report.rounds += 1
        self.report.node_rank = go.node_rank
        self.report.result, self.report.decks = None, ()
        self.seen.begins(go, checked)
        output = {"show": self._show, "say": self._say, "warn": logger.warning}
        self._disk = DiskWatch(plan.limit)  # what an earlier round's has begun to look at is no matter any more
        ranks = Ranks(plan.server, plan.order, orders(go, plan), plan.settings, gpus=plan.gpus, **output)
        self._ranks = ranks
        ranks.start(fork=self._forks)
        self._saving = RoundSaving(go.round, list(ranks.pages.values()), self._job.tell, self._say)
        fail = partial(self._ended, ranks)
        self._disk = DiskWatch(plan.limit)
        self._hangs = HangWatch(
            go.round,
            ranks,
            server=plan.server,
            hangs=plan.settings.hangs,
            tell=self._job.tell,
            fail=fail,
            leave=self.seen.leave,
        )

    def _hand(self, message: Any, *, to: RoundSaving | HangWatch | None) -> None:
        if to is not None:
            to.heard(message)

    def _stop(self, stop: m.Stop) -> None:
        self._gate.stop(stop)
        self._job.now(history=stop.history)
        ranks = self._ranks
        if stop.round != self._job.me.round:
            return
        for node, why in stop.left.items():
            self._say(f"{node} has left: {why}")
        if ranks is None:
            # Where they had returned, the round is over all the same: they are to run again.
            self._becomes("ended", self._become if isinstance(self._become, m.Ended) else m.Ended(stop.round))
            return
        if stop.timed_out and not ranks.failed:
            ranks.note_stacks()  # for this node's log: a rank here may be the one that others have waited for
        self._ended(ranks, None)

    def _tell(self, tell: m.Tell) -> None:
        if self._failure is not None and self._failure[0].round == tell.round:
            outcome, ranks = self._failure
            self._job.tell(reports.told(tell.round, outcome, str(ranks.usage(self.plan.scratch))))

    def _again(self, again: m.Again) -> None:
        self._job.now(history=again.history)
        self.seen.why(again.why)
        self._say(again.why)

    def _end(self, end: m.TheEnd) -> None:
        self._job.now(history=end.history)
        self._finish = end

    def _lost(self, lost: LinkLost) -> None:
        self._cut_since = self._cut_since or time.monotonic()
        self._say(f"node 0 cannot be heard ({lost.seen}); waiting for its replacement")

    def _given_up(self, given_up: GivenUp) -> None:
        self._finish = given_up

    # --- what becomes of the ranks -----------------------------------------------------------------------------------
    def _done(self, ranks: Ranks) -> None:
        self.seen.over(ranks)
        for phase in ("import", "inputs", "function", "outputs"):
            seconds = [outcome.seconds.get(phase, 0.0) for outcome in ranks.outcomes()]
            self.report.seconds[phase] = max(seconds, default=0.0)
        self.report.result = ranks.result()
        if self._job.rules.max_nodes > 1:
            self._say("the ranks of this node have returned; waiting for those of the other nodes")
        self._becomes("done", m.Returned(self._job.me.round))

    def _ended(self, ranks: Ranks, cause: RankOutcome | str | None, *, cut: bool = False) -> None:
        """End the ranks that still run, and report how this round ended here.

        Args:
            ranks: of the round.
            cause: what this agent has found; "failed" where a rank has failed by itself; None where others end it.
            cut: the coordinator cannot be heard.
        """
        found = cause if isinstance(cause, RankOutcome) else None
        if cause == "failed":
            found = root_cause(ranks.outcomes())
            if found is None:
                raise SafedistError("a round failed without a failing rank", seen=ranks.outcomes(), hint=_BUG)
        round_no = self._job.me.round
        if found is not None:
            if self._joins_in_vain(found):
                raise self._in_vain(found)
            # At once: to end the other ranks may take a while, in which this node may be lost.
            self._job.now(alarm=reports.alarm(round_no, found))
            self._job.tell(reports.alarm(round_no, found))
        ranks.stop()
        found = cause if isinstance(cause, RankOutcome) else root_cause(ranks.outcomes())
        if cause is not None:
            self.report.decks = ranks.decks()
        if found is not None and self._joins_in_vain(found):
            raise self._in_vain(found)
        self._failure = None if found is None else (found, ranks)
        returned = tuple(ranks.returned())
        self.seen.over(ranks, found)
        self._end_round(signal.SIGTERM)
        summary = None if found is None else reports.cause_of(found)
        self._job.now(alarm=None if found is None else reports.alarm(round_no, found))
        self._becomes("ended", m.Ended(round_no, summary, returned, cut))
        if self._leaves is not None:
            self._leave(self._leaves[0])  # the round is over here: there is nothing left to wait for

    def _joins_in_vain(self, found: RankOutcome) -> bool:
        """Whether this node has come to a job that ran before, and cannot import the task's module: the job goes on,
        for another to take this place."""
        return self._job.me.round > 0 and self.report.rounds == 1 and found.raised is not None and not found.seconds

    def _in_vain(self, found: RankOutcome) -> NodeLostError:
        error = judge(found, NOT_STARTED, disk="", limit=None).error
        return cannot_do_its_part(error, self.plan.job.attempt.topology)

    def _becomes(self, state: str, said: m.Returned | m.Ended) -> None:
        self._become = said
        self._job.now(state=state)
        self._job.tell(said)

    def _end_round(self, number: int, *, patience: float = 0.0) -> None:
        ranks, self._ranks, self._saving, self._hangs = self._ranks, None, None, None
        try:
            if ranks is not None:
                self._forks = self._forks and not ranks.to_be_fresh
                ranks.stop(number, patience=patience)
                self.seen.over(ranks)
        finally:
            self._gate.close()
            self.plan.job.backend.close_round()

    def _show_stacks(self) -> None:
        snapshots = self._hangs.snapshots() if self._hangs is not None else ()
        self._say("where the ranks of this node stand:\n" + picture.text(snapshots))

    # --- signals -----------------------------------------------------------------------------------------------------
    def _longest(self, number: int) -> float:
        """Seconds that this process may still take after a signal."""
        stays = self._stays if number == signal.SIGTERM and self._ranks is not None else 0.0
        return stays + self.plan.settings.timeouts.stop + END_SECONDS

    def _signalled(self, number: Signalled) -> None:
        """Leave; but let the ranks of the whole job save first, where they would.

        Only SIGTERM waits, which is what Kubernetes sends before it takes a pod away. Who presses Ctrl-C wants the end
        now.
        """
        may_wait = int(number) == signal.SIGTERM and self._stays > 0 and self._cut_since is None
        if not may_wait or self._saving is None:
            self._leave(int(number))
            return
        self._leaves = (int(number), number.at + self._stays)
        self._saving.preempt()

    def _leave(self, number: int) -> None:
        name = signal.Signals(number).name
        # Ending the ranks may take a while; the others need not learn it from their echo.
        self._job.tell(m.Leaves(f"told to stop by {name}"))
        left = self._leaves[1] - time.monotonic() if self._leaves is not None else self._stays
        self._leaves = None
        self._end_round(number, patience=left if number == signal.SIGTERM else 0.0)
        raise JobInterruptedError(
            f"told to stop by {name}; every rank has been ended",
            where={"node_rank": self.report.node_rank},
            hint="nothing is wrong with the task: see who asked (a preemption, an eviction, a person)",
        ).by(number)
