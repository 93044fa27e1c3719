"""The node agent: one per pod. It carries out what the policy of this node decides, over the ranks of one round.

All decisions about the job are the coordinator's, and all about this node its policy's (:mod:`.policy`).
"""

from __future__ import annotations

import logging
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from .. import envvars
from ..config.registered import END_SECONDS
from ..coordinator.messages import HangNotice, Offer
from ..coordinator.ports import ReservedPort
from ..coordinator.wire import HangEvidence, RankPicture
from ..errors import JobInterruptedError
from ..failures import Failure, of_errnos
from ..hangs import picture
from ..meeting import own_address
from ..rank.backends.torch import LOOPBACK
from ..rank.outcome import RankOutcome, root_cause
from ..rank.outcome_text import how
from ..rank.places import RankFiles
from ..store.patience import within
from . import memory, scratch, signals
from .actions import Blame, CallRanks, EndRanks, Exit, MakeOffer, SaveAt, StartRanks, TakePicture, Upload
from .checks import CHECKS, Checks
from .disk import DiskWatch
from .ending import cannot_do_its_part, verdict_of
from .hang_watch import HangWatch
from .log_lines import DRAIN_SECONDS
from .loop import Finish, Loop
from .membership import Membership
from .orders import orders
from .prepare import NodePlan
from .rank_set import Ranks
from .saving import RoundSaving
from .signals import Signalled, StacksWanted
from .verdict import NOT_STARTED, Verdict, cause_of, judge

logger = logging.getLogger(__name__)

_MEMORY_SECONDS = 1.0
"""Between two looks at the container's memory."""

_MEASURE_SECONDS = 10.0
"""To see what is in scratch when all ranks have ended: the other nodes wait."""


@dataclass
class Report:
    """What the agent has learned: for the end line and for the caller."""

    rounds: int = 0
    node_rank: int = -1
    """In the latest round; -1 before the first."""
    seconds: dict[str, float] = field(default_factory=dict)
    result: RankFiles | None = None
    verdict: Verdict | None = None
    """Of a job that failed, as far as this node has heard."""
    has_succeeded: bool = False
    """The job; where this and the verdict are not there, others have ended it, and nobody has said how."""
    decks: tuple[dict[str, str], ...] = ()
    """Of a rank that failed."""
    page: str = ""
    file: str = ""
    """The page of the run, on the node that uploads; and where it is as a file, in a local run."""


class NodeAgent(Loop):
    """Drives the ranks of one node until the job has ended, or this process is told to stop.

    Args:
        plan: what to do.
        job: this process in its job.
    """

    def __init__(self, plan: NodePlan, job: Membership) -> None:
        super().__init__(job)
        self.plan = plan
        self.report = Report()
        self.record = plan.record(job, self._costs)
        self._ranks: Ranks | None = None
        self._saving: RoundSaving | None = None
        self._hangs: HangWatch | None = None
        self._checks: Checks | None = None
        self._disk = DiskWatch(plan.limit)
        self._start: StartRanks | None = None  # what this node does in the round
        self._checked = self._memory_due = 0.0
        self._told_to_stop: Signalled | None = None
        self._port: ReservedPort | None = None
        self._forks = plan.unsafe is None
        self._takes |= {
            HangEvidence: self._keep_evidence,
            Signalled: self._stop,
            StacksWanted: lambda _: self._show_stacks(),
        }
        self._does |= {
            MakeOffer: self._offer,
            StartRanks: self._begin,
            EndRanks: lambda action: self._end_ranks(shows_stacks=action.shows_stacks),
            CallRanks: lambda action: self._saving.call(action.call) if self._saving is not None else None,
            SaveAt: lambda action: self._saving.save(action) if self._saving is not None else None,
            TakePicture: lambda action: self._take_picture(action.look),
            Blame: lambda action: self._blame(action.hang),
        }

    def drive(self) -> Finish:
        """Run until this node has no further part in the job; what that came to is in :attr:`report`, too.

        Raises:
            JobInterruptedError: a signal told this process to stop; every rank is gone.
            FencedError: another process has taken this one's place.
            LaunchError, ScratchError, RendezvousError: the ranks could not be started; or this node has no part in the
                job.
        """
        started = time.monotonic()
        with signals.into(self._job.inbox, self._longest):
            try:
                finish = super().drive()
            finally:
                self._close_round()
                self.plan.job.backend.close_round()
                if self._port is not None:
                    self._port.close()
                self.report.seconds["total"] = time.monotonic() - started
        stopped = isinstance(finish, Exit) and finish.code != 0
        stopped = stopped or (isinstance(finish, Upload) and finish.verdict.kind == "stopped")
        if self._told_to_stop is not None and stopped:
            raise self._interrupted(self._told_to_stop)
        # A leader that uploads nothing has found what others had uploaded by then.
        end = finish.verdict if isinstance(finish, Upload) else None if self._job.leads else self.policy.end
        self.report.verdict = None if end is None else verdict_of(end, self._job, self.policy.books)
        self.report.has_succeeded = end is not None and end.kind == "success"
        if not self.report.has_succeeded:
            self.report.result = None
        return finish

    # --- what becomes of the ranks ------------------------------------------------------------------------------------
    def _watch(self) -> None:
        self.record.look(self._ranks.views if self._ranks is not None else list)
        self._look_at_checks()
        self._look_at_memory()
        self._carry_out()
        ranks, start = self._ranks, self._start
        status = self.policy.status
        if ranks is None or start is None or status.phase != "running" or status.round != start.round:
            return  # where its ranks have returned, a failure elsewhere still means a new round here
        if self._saving is not None:
            self._saving.look()
        if self._queue:
            return  # first what follows from that
        ranks.poll()
        if self._job.meeting is not None and (ends := ranks.ends()):
            self._job.meeting.note_ends(ends)
        if ranks.failures:
            self._note_failures(ranks)
            if ranks.are_gone:
                self._end_ranks()
            return
        excess = self._disk.excess(ranks.usage)
        late = ranks.blame(*excess) if excess is not None else ranks.late()
        if late is not None:
            self._fail(ranks, late)
        elif ranks.finished:
            self._return(ranks)
        elif self._hangs is not None:
            self._hangs.look()

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if now < self._memory_due:
            return
        self._memory_due = now + _MEMORY_SECONDS
        used = memory.in_use()
        if used is not None:
            self._act(self.policy.on_memory(used, now))

    def _note_failures(self, ranks: Ranks) -> None:
        """Say at once which rank has failed; where a collective has timed out, again with what the others did then."""
        if ranks.failures == ranks.latest_failures:
            return
        ranks.latest_failures = ranks.failures
        self._tell_failure(ranks)
        if any(outcome.timed_out for outcome in ranks.outcomes()) and not ranks.has_stacks:
            ranks.note_stacks()
            self._tell_failure(ranks)

    def _tell_failure(self, ranks: Ranks, *, measures: bool = False) -> RankOutcome | None:
        own = () if ranks.agents_cause is None else (ranks.agents_cause,)
        found = root_cause((*own, *ranks.outcomes()))
        if found is None:
            return None
        if self._joins_in_vain(found, is_in_function=ranks.pages[found.rank].begun):
            raise cannot_do_its_part(judge(found, NOT_STARTED).error, self._job.place)
        status, limit, held = self.policy.status, self._job.rules.text_bytes, ""
        if found.raised is not None and Failure.FULL_DISK in of_errnos(found.raised.errnos):
            if measures:
                held = self._held(ranks)
            else:
                limit //= 2  # of two wordings the longer one stays: that with what scratch holds
        cause = cause_of(found, status.round, status, limit=limit, disk=held)
        self._act(self.policy.on_failure(cause, time.monotonic()))
        return found

    def _held(self, ranks: Ranks) -> str:
        """What scratch may hold, and does. With millions of files that takes long to see, and nobody waits for that."""
        limit = self.plan.limit
        limited = "without a size limit" if limit is None else f"limited to {limit}"
        with suppress(TimeoutError):
            return f"{limited}: {within(_MEASURE_SECONDS, ranks.usage)}"
        return f"{limited}: more files than can be seen in {_MEASURE_SECONDS:g} s"

    def _fail(self, ranks: Ranks, found: RankOutcome) -> None:
        """A rank fails for what this agent has found, unless one has failed by itself until then: evidence of a hang is
        left in a store first."""
        ranks.agents_cause = found
        ranks.poll()
        self._tell_failure(ranks)

    def _joins_in_vain(self, found: RankOutcome, *, is_in_function: bool) -> bool:
        """Whether this node has come to a job that ran before, and cannot import the task's module: the job goes on,
        for another to take this place."""
        number = self._start.number if self._start is not None else 0
        return number > 0 and self.report.rounds == 1 and found.raised is not None and not is_in_function

    def _return(self, ranks: Ranks) -> None:
        self.record.over(ranks.views)
        for phase in ("import", "inputs", "function", "outputs"):
            seconds = [outcome.seconds.get(phase, 0.0) for outcome in ranks.outcomes()]
            self.report.seconds[phase] = max(seconds, default=0.0)
        self.report.result = ranks.result()
        if self._job.rules.max_nodes > 1:
            logger.info("the ranks of this node have returned; waiting for those of the other nodes")
        self._act(self.policy.on_return(tuple(ranks.returned()), time.monotonic()))

    # --- what the policy decides --------------------------------------------------------------------------------------
    def _begin(self, start: StartRanks) -> None:
        if self._job.meeting is not None:
            self._job.meeting.open(start.round, CHECKS if start.is_checks else start.number)
        plan = self.plan
        self._close_round()  # of one whose ranks had returned
        if start.is_checks:
            self._checks = Checks(plan, start)
            return
        if self.report.rounds:  # the first round has its own start line
            if plan.settings.scratch.keep == "never":
                # What filled the disk must not keep the next round from starting.
                scratch.remove_rounds_before(plan.scratch, start.number)
            count = start.size * plan.settings.nproc_per_node
            logger.info(f"round {start.number}: {start.size} node(s) are there, {count} rank(s) start")
        self._start = start
        self.report.rounds += 1
        self.report.node_rank = start.node_rank
        self.report.result, self.report.decks = None, ()
        checked, self._checked = self._checked, 0.0
        earlier = [each.why for each in self.policy.books.outcomes if each.round < start.round]
        if earlier:
            self.record.why(earlier[-1])
        self.record.begins(start.number, start.node_rank, nnodes=start.size, checked=checked)
        ranks = self._ranks = Ranks(plan, orders(start, plan))
        ranks.start(fork=self._forks)
        self._saving = RoundSaving(list(ranks.pages.values()), self.policy, self._act)
        self._disk = DiskWatch(plan.limit)  # what an earlier round's has begun to look at is no matter any more
        self._hangs = HangWatch(
            ranks,
            start.number,
            tell=lambda seconds, urgent: self._act(self.policy.on_stall(seconds, time.monotonic(), is_urgent=urgent)),
            leave=self.record.leave,
        )

    def _end_ranks(self, *, shows_stacks: bool = False) -> None:
        ranks = self._ranks
        returned: tuple[int, ...] = ()
        if self.policy.status.phase not in ("running", "ending"):
            return  # they were gone before that was decided
        if ranks is not None:
            if not ranks.has_stacks and (ranks.failures or shows_stacks) and not self._has_own_cause(ranks):
                ranks.note_stacks()  # of those that have lost nobody: one of them may be whom others have waited for
            number = signal.SIGTERM if self._told_to_stop is None else self._told_to_stop.number
            hear = partial(self._hear, 0.0)
            ranks.stop(number, patience=self._patience(), drain=self._drain, meanwhile=hear)
            found = self._tell_failure(ranks, measures=True)
            if found is not None:
                self.report.decks = ranks.decks()
            returned = tuple(ranks.returned())
            self.record.over(ranks.views, "" if found is None else f"rank {found.rank}: {how(found)}")
        self._close_round()
        self._act(self.policy.on_quiet(returned, time.monotonic()))

    def _has_own_cause(self, ranks: Ranks) -> bool:
        return ranks.agents_cause is not None or any(each.failed and not each.echo for each in ranks.outcomes())

    def _patience(self) -> float:
        """Seconds that ranks with a handler of their own have, to save their work."""
        stop = self._told_to_stop
        if stop is None or stop.number != signal.SIGTERM:
            return 0.0
        return max(0.0, stop.at + self._job.rules.preemption - time.monotonic())

    @property
    def _drain(self) -> float:
        """Seconds that the node's log may take until the others hear that no rank is left: a coordinator reckons with a
        silence of that length (:attr:`.rules.Rules.patience`)."""
        rules = self._job.rules
        return DRAIN_SECONDS if rules.is_alone else min(DRAIN_SECONDS, rules.heartbeat)

    def _close_round(self) -> None:
        ranks, self._ranks, self._saving, self._hangs = self._ranks, None, None, None
        if self._checks is not None:
            self._checks.close()
        if ranks is not None:
            self._forks = self._forks and not ranks.to_be_fresh
            ranks.stop()
            self.record.over(ranks.views)

    def _offer(self, offer: MakeOffer) -> None:
        """A port that is kept free for the next round's ranks, and what their backend opens."""
        job, place, settings = self.plan.job, self._job.place, self.plan.settings
        if self._port is not None:
            self._port.close()
        self._port = ReservedPort()
        address = LOOPBACK
        if place.max_nodes > 1 and place.endpoint is not None:
            endpoint = place.endpoint
            address = own_address(endpoint.host, endpoint.port) if place.is_elastic else endpoint.host
        values = {envvars.MASTER_ADDR: address, envvars.MASTER_PORT: str(self._port.port)}
        if self._forks and job.backend.keeps_store and place.max_nodes * settings.nproc_per_node > 1:
            kept = self.plan.server.keep_store()
            values |= {envvars.STORE_PORT: str(kept)} if kept else {}
        values |= job.backend.open_round(nnodes=place.max_nodes, nproc_per_node=settings.nproc_per_node)
        self._act(self.policy.on_fact(time.monotonic(), offer=Offer(offer.after, values)))

    def _look_at_checks(self) -> None:
        checked = self._checks.look() if self._checks is not None else None
        if checked is not None and self.policy.status.round == checked.round:
            self._checked += checked.seconds
            self._act(self.policy.on_return((), time.monotonic(), checked.report))

    def _costs(self) -> dict[str, list[str]]:
        books, most = self.policy.books, self.policy.rules.max_restarts
        restarts = [books.restart_text(each, most) for each in books.restarts]
        return {"restart": restarts, "loss": [each.why for each in books.losses]}

    # --- hangs --------------------------------------------------------------------------------------------------------
    def _take_picture(self, look: int) -> None:
        if self._hangs is not None:
            taken = RankPicture(str(self.policy.status.round), look, tuple(self._hangs.snapshots()))
            self._job.link.put(taken.frame())
            self._act(self.policy.on_fact(time.monotonic(), looked=look))

    def _keep_evidence(self, evidence: HangEvidence) -> None:
        if self._hangs is not None:
            self._hangs.evidence = evidence.text

    def _blame(self, hang: HangNotice) -> None:
        if self._hangs is None or self._ranks is None:
            return
        if hang.is_news:
            logger.info(self._hangs.shown(hang))
        failure = self._hangs.failure(hang)
        if failure is not None:
            self._fail(self._ranks, failure)

    def _show_stacks(self) -> None:
        snapshots = self._hangs.snapshots() if self._hangs is not None else ()
        logger.info("where the ranks of this node stand:\n" + picture.text(snapshots))

    # --- signals ------------------------------------------------------------------------------------------------------
    def _longest(self, number: int) -> float:
        """Seconds that this process may still take after a signal."""
        stays = self._job.rules.preemption if self._may_stay(number) else 0.0
        return stays + self.plan.settings.timeouts.stop + END_SECONDS

    def _stop(self, signalled: Signalled) -> None:
        """Leave; but let the ranks of the whole job save first, where they would.

        Only SIGTERM waits, which is what Kubernetes sends before it takes a pod away. Who presses Ctrl-C wants the end
        now.
        """
        self._told_to_stop = signalled
        stays, why = self._may_stay(signalled.number), f"told to stop by {signalled.number.name}"
        self._act(self.policy.on_stop(why, signalled.at, time.monotonic(), stays=stays))
        if stays and self._ranks is not None:  # it may be for a time-out of the task's, which says no more than that
            signalled.stood = self._ranks.stand()

    def _may_stay(self, number: int) -> bool:
        """Whether there are ranks that could save; the checks of a node are none, and answer no call."""
        return number == signal.SIGTERM and self._ranks is not None

    def _interrupted(self, signalled: Signalled) -> JobInterruptedError:
        return JobInterruptedError(
            f"told to stop by {signalled.number.name}; every rank has been ended",
            where={"node_rank": self.report.node_rank},
            seen=signalled.stood or None,
            hint="nothing is wrong with the task: see who asked (a preemption, an eviction, a person)",
        ).by(signalled.number)
