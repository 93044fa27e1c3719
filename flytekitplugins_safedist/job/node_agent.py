"""The node agent: one per pod, on torch elastic's agent loop.

torch elastic brings the nodes together and drives rounds (``SimpleElasticAgent``, through exactly the four methods it
leaves open); safedist decides: what a rank is told, what counts as the root cause, and whether there is another round.
``LocalElasticAgent`` fills the same four methods with its own process start, which cannot fork from a preloaded server
nor outlive an agent's SIGKILL without orphans; that is why it is not used.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException

from .. import envvars, stopping
from ..compat import torch as torch_inside
from ..errors import GroupClosedError, JobInterruptedError, SafedistError
from ..ranks import debugger, scratch
from ..ranks.backends import RankBackend, RoundGroup
from ..ranks.context import RankContext
from ..ranks.disk_limit import DiskWatch
from ..ranks.forkserver_client import RankServer
from ..ranks.orders import plan_orders
from ..ranks.outcome import RankOutcome, root_cause
from ..ranks.rank_set import Ranks
from ..rendezvous.session import RendezvousSession
from .agreement import Agreement
from .coordinator import JobCoordinator
from .node_plan import STORE_PORT, NodePlan, Report
from .policy import Action
from .preemption import Preemption
from .process_state import signals_as_exceptions, torch_settings
from .verdict import judge

logger = logging.getLogger(__name__)

MONITOR_SECONDS = 0.1
_BUG = "report this as a bug of safedist, with the log"


torch_inside.require_hooks(SimpleElasticAgent)


class NodeAgent(SimpleElasticAgent):  # type: ignore[misc]  # torch is untyped to mypy here
    """Drives the ranks of one node until the job has succeeded, failed for good, or is told to stop."""

    def __init__(
        self,
        plan: NodePlan,
        *,
        server: RankServer,
        backend: RankBackend,
        handler: RendezvousSession,
        show: Callable[[str], object],
        say: Callable[[str], object],
    ) -> None:
        """
        Args:
            plan: what to do.
            server: starts processes.
            backend: how ranks meet.
            handler: brings the nodes together.
            show: takes the ranks' output, in blocks of whole lines.
            say: takes one sentence of the agent's own.
        """
        settings = plan.settings
        spec = WorkerSpec(
            role="rank",
            local_world_size=settings.nproc_per_node,
            rdzv_handler=handler,
            entrypoint="safedist",  # only ever used as a name in torch's events
            max_restarts=settings.max_restarts,
            monitor_interval=MONITOR_SECONDS,
        )
        super().__init__(spec)
        self.plan = plan
        self.report = Report()
        self._server = server
        self._backend = backend
        self._handler = handler
        self._show = show
        self._say = say
        self._ranks: Ranks | None = None
        self._disk = DiskWatch(plan.limit)
        self._preemption = Preemption(stopping.within_grace(settings.timeouts.preemption, then=settings.timeouts.stop))
        self._job = JobCoordinator(
            handler,
            max_restarts=settings.max_restarts,
            stop_seconds=settings.timeouts.stop,
            heartbeat=settings.timeouts.heartbeat,
            say=say,
        )

    def drive(self) -> Report:
        """Run to the end.

        Raises:
            JobInterruptedError: a signal told this process to stop; every rank is gone.
            LaunchError, ScratchError, RendezvousError: the ranks could not be started.
        """
        with signals_as_exceptions(self.plan.settings.timeouts.stop, self._preemption.defer), torch_settings():
            started = time.monotonic()
            try:
                self.run()
            except GroupClosedError:
                # Another node gave the job up while this one's ranks ran or waited for the next round; or this pod came
                # back when all was done. Any other end (a deadline, a spent budget) is an error here as well.
                if not self._job.over():
                    raise
            except SignalException as stop:
                raise self._interrupted(stop.sigval) from None
            finally:
                self.report.seconds["total"] = time.monotonic() - started
        ended = self._job.ended()
        if ended is not None:
            self.report.verdict = judge(
                ended.cause, ended.decision, disk=ended.disk, limit=self.plan.limit, returned=ended.returned
            )
        return self.report

    def _invoke_run(self, *args: Any, **kwargs: Any) -> RunResult:
        try:
            return super()._invoke_run(*args, **kwargs)
        except SignalException as stop:
            # Ending the ranks may take a while; the others need not learn it from their echo.
            self._job.leave(f"told to stop by {signal.Signals(stop.sigval).name}")
            self._end_round(stop.sigval)
            # As our own error at once: torch elastic would log that it "received 2 death signal".
            raise self._interrupted(stop.sigval) from None

    def _interrupted(self, number: int) -> JobInterruptedError:
        return JobInterruptedError(
            f"told to stop by {signal.Signals(number).name}; every rank has been ended",
            where={"node_rank": self._handler.node_rank},
            hint="nothing is wrong with the task; Flyte retries when this was a preemption or an eviction",
        ).by(number)

    # --- what torch elastic asks for -----------------------------------------------------------------------------
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group = self._group(worker_group)
        self._begin_round(group)
        contexts = [self._context(group, local_rank) for local_rank in range(group.nproc_per_node)]
        environments = [self._environment(group, context) for context in contexts]
        orders = plan_orders(
            contexts, environments, self.plan.scratch, self.plan.job_order, terminal=debugger.terminal()
        )
        ranks = Ranks(self._server, orders, self.plan.settings, show=self._show, warn=logger.warning)
        self._ranks = ranks
        self.report.rounds += 1
        self.report.result, self.report.decks = None, ()
        started = ranks.start(fork=self.plan.fork)
        self._preemption.begin(Agreement(ranks.pages, self._handler.jobs.agreement(group.round), say=self._say))
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._preemption.leave_when_saved()
        if stopping.told() and not self._preemption.pending:
            # The signal's exception was raised where it was swallowed (a finalizer, a callback of the collector).
            raise SignalException("told to stop before", sigval=signal.SIGTERM)
        ranks = self._running()
        ranks.poll()
        if ranks.failed:
            return self._round_failed(ranks)
        excess = self._disk.excess(lambda: ranks.usage(self.plan.scratch))
        if excess is not None:
            ranks.stop()
            return self._decided(ranks, ranks.blame(*excess))
        late = ranks.late()
        if late is not None:
            ranks.stop()
            return self._decided(ranks, late)
        self._job.watch_nodes()
        if not ranks.finished:
            return RunResult(state=WorkerState.HEALTHY)
        self._note_phases(ranks.outcomes())
        # Before the others are asked: the last of them may end the job before this one looks again.
        self.report.result = ranks.result()
        # Until every node is done this one goes on watching: a failure elsewhere still means a new round here.
        if not self._job.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:  # torch < 2.6 passes is_restart
        ranks = self._ranks
        if ranks is not None and not ranks.failed and self._job.timed_out():
            ranks.note_stacks()  # for this node's log: a rank here may be the one that others have waited for
        self._end_round(signal.SIGTERM)
        if ranks is not None:
            # Another node asked for a new round, or this one did: say how it ended here before it is forgotten.
            # A node 0 that leaves waits for these reports: what it said is read before.
            self._job.say_who_left()
            self._job.report(root_cause(ranks.outcomes()), ranks.returned())
        self._preemption.leave()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self._end_round(death_sig)

    def _exit_barrier(self) -> None:
        """Nothing: ``all_done`` was the barrier, and torch's own can hang on a store that is frozen."""

    # --- decisions and their parts -------------------------------------------------------------------------------
    def _begin_round(self, group: RoundGroup) -> None:
        """Make room, and say that it goes on: the first round has its own start line."""
        if not self.report.rounds:
            return
        if self.plan.settings.scratch.keep == "never":
            # What filled the disk must not keep the next round from starting.
            scratch.remove_rounds_before(self.plan.scratch, group.round)
        self._say(f"round {group.round}: {group.nnodes} node(s) are there, {group.world_size} rank(s) start")

    def _round_failed(self, ranks: Ranks) -> RunResult:
        if not self._job.anybody_left():
            ranks.settle()
        ranks.stop()
        cause = root_cause(ranks.outcomes())
        if cause is None:
            raise SafedistError("a round failed without a failing rank", seen=ranks.outcomes(), hint=_BUG)
        return self._decided(ranks, cause)

    def _decided(self, ranks: Ranks, cause: RankOutcome) -> RunResult:
        self.report.decks = ranks.decks()
        decision = self._job.settle(cause, str(ranks.usage(self.plan.scratch)), ranks.returned())
        torch_inside.allow_restarts(self, 1 if decision.action is Action.RESTART else 0)
        return RunResult(state=WorkerState.FAILED)

    def _end_round(self, number: int) -> None:
        ranks, self._ranks = self._ranks, None
        self._preemption.end()
        try:
            if ranks is not None:
                ranks.stop(number)
        finally:
            self._backend.close_round()

    def _running(self) -> Ranks:
        if self._ranks is None:
            raise SafedistError("torch elastic asked for ranks that were never started", hint=_BUG)
        return self._ranks

    def _group(self, worker_group: WorkerGroup) -> RoundGroup:
        return RoundGroup(
            round=self._handler.round,
            node_rank=worker_group.group_rank,
            nnodes=worker_group.group_world_size,
            nproc_per_node=self.plan.settings.nproc_per_node,
            address=worker_group.master_addr,
            port=worker_group.master_port,
            run_id=self.plan.run_id,
            timeout=self.plan.settings.timeouts.rendezvous,
            offered=self._handler.values,
        )

    def _context(self, group: RoundGroup, local_rank: int) -> RankContext:
        rank = group.rank(local_rank)
        return RankContext(
            rank=rank,
            local_rank=local_rank,
            node_rank=group.node_rank,
            world_size=group.world_size,
            local_world_size=group.nproc_per_node,
            nnodes=group.nnodes,
            round=group.round,
            attempt=self.plan.attempt,
            scratch=scratch.make_rank(self.plan.scratch, group.round, rank).path,
        )

    def _environment(self, group: RoundGroup, context: RankContext) -> dict[str, str]:
        settings = self.plan.settings
        defaults = {} if group.nproc_per_node == 1 else {envvars.OMP_NUM_THREADS: "1"}  # as torchrun does
        own = self.plan.scratch.rank(context.round, context.rank).environment(settings.scratch.shared_caches)
        user = dict(settings.environment)
        place = {**self._backend.environment(group, context.local_rank), envvars.ROUND: str(context.round)}
        if STORE_PORT in group.offered:
            place[envvars.AGENT_STORE] = f"{group.address}:{group.offered[STORE_PORT]}"
        # The user's word beats everything but a rank's identity, which config.py has refused already.
        return {**defaults, **self.plan.environment, **own, **place, **user}

    def _note_phases(self, outcomes: list[RankOutcome]) -> None:
        for phase in ("import", "inputs", "function", "outputs"):
            self.report.seconds[phase] = max((outcome.seconds.get(phase, 0.0) for outcome in outcomes), default=0.0)


def to_stdout(text: str) -> None:
    """Ranks' output goes where the task's own would."""
    # A user's module may have put an object in its place that has no more than a write().
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # A log in ASCII shows other letters escaped; they must not end the thread that shows them.
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    with suppress(AttributeError):
        sys.stdout.flush()
