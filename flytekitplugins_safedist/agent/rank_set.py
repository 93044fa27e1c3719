"""The ranks of one node in one round: started together, watched, torn down together."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import LaunchError, SafedistError
from ..failures import Failure, speaks_of_timeout
from ..hangs import picture, stacks
from ..hangs.processes import Process, look
from ..hangs.snapshot import Snapshot
from ..rank import literals, outcome_text, shared_page
from ..rank.order import RankOrder
from ..rank.outcome import Raised, RankOutcome, Status
from ..rank.places import RankFiles
from ..rank.shared_page import AgentPage
from ..rank_server import cleanup
from ..rank_server.client import EndedRank
from ..record import layout
from ..record.run import RankView
from ..store.patience import within
from ..texts import human
from . import disk, log_lines, memory, scratch
from .arrival import KILL_SECONDS
from .prepare import NodePlan
from .rank_gpus import RankGpus

logger = logging.getLogger(__name__)

_SLOW_SECONDS = 5.0
"""An import that takes longer is told, and an end."""

_LINES = 12
"""Of a rank's stack, in the error."""

_WITH_STACKS = 1000
"""Lines of the log of a rank that crashed, which end with the stacks of all its threads."""

SHOW_SECONDS = 5.0
"""For the node's log to take the stacks of its ranks."""


@dataclass
class _Member:
    order: RankOrder
    page: AgentPage
    pid: int
    ended: EndedRank | None = None
    outcome: RankOutcome | None = None
    given_up: bool = False
    """It has reported success, and not even SIGKILL ends it: its success counts, and nothing waits for it any more."""

    @property
    def rank(self) -> int:
        return self.order.context.rank

    @property
    def running(self) -> bool:
        """Whether there is a process that can still be waited for."""
        return self.ended is None and not self.given_up


class Ranks:
    """A started round on this node.

    Args:
        plan: this node's.
        orders: one for each rank of this node, by local rank.
        show: takes blocks of whole lines of the ranks' output.

    Attributes:
        agents_cause: a failure that the agent, and not a rank, has found.
        latest_failures: how many ranks had failed when the job last heard of it.
    """

    agents_cause: RankOutcome | None = None
    latest_failures = 0

    def __init__(
        self, plan: NodePlan, orders: Sequence[RankOrder], show: Callable[[str], object] = log_lines.to_stdout
    ) -> None:
        self.plan, self.gpus = plan, RankGpus(plan.gpus, orders)
        self._orders, self._show = orders, show
        self._members: list[_Member] = []
        self._slow_after: float | None = None
        self._stopping_since_ns: int | None = None
        self._all_reported: float | None = None
        self._have_lingered = False
        self._start_deadline: float | None = None
        self._memory_before = memory.cgroup()
        self._stacks: dict[int, str] = {}
        self._followers = log_lines.followers(orders, plan.settings.logs, show)

    def start(self, *, fork: bool) -> None:
        """Start every rank, forked from the server (``fork``) or as fresh interpreters.

        Raises:
            ScratchError: what a rank shares with this process cannot be made.
            LaunchError: processes cannot be started.
        """
        pages = [self._page_for(order) for order in self._orders]
        plan, timeout = self.plan, self.plan.settings.timeouts.start
        pids = plan.server.start(plan.order, self._orders, fork=fork, timeout=timeout)
        self._members = [_Member(*each) for each in zip(self._orders, pages, pids, strict=True)]
        self._start_deadline = time.monotonic() + timeout
        self._slow_after = time.monotonic() + _SLOW_SECONDS
        for follower in self._followers:
            follower.start()

    def _page_for(self, order: RankOrder) -> AgentPage:
        what = "the memory that a rank shares with its agent cannot be made"
        with scratch.making(what, order.files.page, rank=order.context.rank):
            page = shared_page.make(order.files.page)
        page.stays(self.plan.settings.timeouts.preemption)
        return page

    def poll(self, *, wait: float = 0.0) -> None:
        """Take in what happened.

        Raises:
            LaunchError: the rank server is gone, and the ranks with it.
        """
        by_pid = {member.pid: member for member in self._members}
        for ended in self.plan.server.ended(wait=wait):
            if ended.pid in by_pid:
                by_pid[ended.pid].ended = ended
        for member in self._members:
            if member.outcome is None:
                member.outcome = self._outcome(member)
        if self._slow_after is not None and time.monotonic() > self._slow_after:
            self._slow_after = None
            if importing := _listed(self._importing):
                logger.info(f"rank(s) {importing} import {self.plan.order.source.shown}: {_SLOW_SECONDS:g} s so far")

    @property
    def _left(self) -> list[_Member]:
        return [each for each in self._members if each.running]

    @property
    def _importing(self) -> list[_Member]:
        return [each for each in self.running if not each.page.begun]

    @property
    def to_be_fresh(self) -> bool:
        """Whether a rank has found that it must not be forked."""
        return any(member.page.wants_fresh for member in self._members)

    @property
    def pages(self) -> dict[int, AgentPage]:
        """What the agent shares with each rank, by rank, once they are started."""
        return {member.rank: member.page for member in self._members}

    def views(self) -> list[RankView]:
        """Each rank, for the record of the run; none before they are started."""
        return [self._view(member) for member in self._members]

    def _view(self, member: _Member) -> RankView:
        page, outcome = member.page, member.outcome
        runs = member.running and outcome is None
        boot = time.monotonic() - time.time()
        return RankView(
            member.rank,
            page.summary,
            how="running" if outcome is None else outcome_text.how(outcome),
            until=time.monotonic() if outcome is None else outcome.time_ns / 1e9 + boot,
            profile=member.order.files.profile,
            decks=partial(literals.read_decks, member.order.files.decks),
            steps=page.steps,
            steps_to_come=page.steps_to_come,
            resident=memory.resident(member.pid) if runs and page.begun else None,
            debugs=lambda: page.debugs,
        )

    @property
    def finished(self) -> bool:
        """Whether every rank has succeeded and ended. A rank that reported but lingers is ended after its time, once:
        what SIGKILL cannot end (a process that waits for a wedged GPU or NFS) does not take back what it reported."""
        if not all(member.outcome and member.outcome.status is Status.SUCCEEDED for member in self._members):
            return False
        lingering = self._left
        if not lingering:
            return True
        self._all_reported = self._all_reported or time.monotonic()
        waited, most = time.monotonic() - self._all_reported, self.plan.settings.timeouts.exit
        if waited > _SLOW_SECONDS and not self._have_lingered:
            self._have_lingered = True
            listed = _with_processes(lingering)
            logger.info(f"rank(s) {listed} have returned, and not ended: a thread or an exit handler of theirs goes on")
        if waited > most:
            logger.warning(
                f"rank(s) {_listed(lingering)} reported success but did not end within {most:g} s "
                "(a thread or an exit handler that does not return); ending them"
            )
            self._end(signal.SIGKILL, KILL_SECONDS)
            self._give_up()
        return False

    def _give_up(self) -> None:
        """Go on without ranks that SIGKILL has not ended."""
        left = self._left
        for member in left:
            member.given_up = True
        if left:
            logger.warning(
                f"rank(s) {_with_processes(left)} were not ended by SIGKILL within {KILL_SECONDS:g} s (the kernel "
                "waits for a device or a file system); their success counts, and the job goes on without them"
            )

    def late(self) -> RankOutcome | None:
        """The failure of a rank that has not begun its function in ``timeouts.start``, with the stack that it has now.

        Libraries have a deadline of their own; this one is for what each rank imports itself.
        """
        if self._start_deadline is None or time.monotonic() < self._start_deadline:
            return None
        seconds = self.plan.settings.timeouts.start
        if any(page.debugs for page in self.pages.values()):  # and once more when the person has gone on
            self._start_deadline = time.monotonic() + seconds
            return None
        self._start_deadline = None
        waiting = self._importing
        if not waiting:
            return None
        self.note_stacks(waiting)
        error = LaunchError(
            "ranks have not begun the task's function in time",
            where={"ranks": _listed(waiting)},
            seen=f"still importing {self.plan.order.source.shown or 'the task'} after {seconds:g} s",
            expected="Timeouts(start=...) to be enough for that",
            hint="look for what the import waits for (the stacks below, if any), or raise Timeouts(start=...)",
        )
        first = waiting[0]
        found = self.blame(first.rank, error, failure=Failure.NOT_READY, repeats=False)
        return self._told(first, replace(found, others=self._stood()))

    def note_stacks(self, members: Sequence[_Member] | None = None) -> None:
        """Have ranks write where they are, before they are ended or lose the others: those that still run."""
        members = members or [each for each in self._left if each.page.begun]
        ranks = {each.rank: (each.pid, each.order.files.stacks) for each in members if each.outcome is None}
        found = stacks.ask(ranks, self.plan.server.ask_for_stacks)
        shown = ""
        for rank, threads in found.items():
            for number, stack in enumerate(threads):
                lines = [f"thread {number + 1} of {len(threads)}, innermost call first:", *map(str, stack)]
                shown += "".join(f"[rank {rank}] {line}\n" for line in lines)
        with suppress(Exception):  # a log that nobody reads, or that is full, must not hide what the ranks have met
            within(SHOW_SECONDS, lambda: self._show(shown))
        self._stacks = {rank: "\n".join(map(str, each[0][:_LINES])) for rank, each in found.items()}
        mute = {rank: pid for rank, (pid, _) in ranks.items() if rank not in found}
        processes = look(mute.values()) if mute else {}
        for rank, pid in mute.items():  # stopped, or waiting in the kernel: perhaps whom the others have waited for
            if processes[pid].state not in ("", "Z"):
                self._stacks[rank] = Snapshot(rank, processes[pid]).where

    def _stood(self, *, failed: bool = True) -> str:
        """Where ranks were that no collective has let wait in vain, by their stacks, or what they raised.

        Args:
            failed: with those that have.
        """
        ended = [member.outcome for member in self._members if member.outcome is not None]
        raised = {outcome.rank: outcome.raised.traceback for outcome in ended if failed and outcome.raised is not None}
        where = {**raised, **self._stacks}
        for outcome in ended:
            if outcome.timed_out:
                where.pop(outcome.rank, None)
        return "\n".join(f"Where rank {rank} was then:\n{stack.rstrip()}" for rank, stack in where.items() if stack)

    @property
    def running(self) -> list[_Member]:
        """Those that have not ended."""
        return [each for each in self._left if each.outcome is None]

    def stand(self) -> str:
        """Where they are at this moment, in a phrase for each place; within a second or so."""
        begun = {each.rank: (each.pid, each.order.files.stacks) for each in self.running if each.page.begun}
        threads = stacks.ask(begun, self.plan.server.ask_for_stacks, forces=False)
        places: dict[str, list[int]] = {}
        for each in self.running:
            at = "before the function"
            if each.page.begun:
                at = Snapshot(each.rank, Process(each.pid), threads.get(each.rank, ())).where
            places.setdefault(at, []).append(each.rank)
        return "; ".join(f"{picture.clause(ranks, 'was', 'were')} {at}" for at, ranks in places.items())

    @property
    def failures(self) -> int:
        """How many ranks have failed, whether or not their processes have ended."""
        return sum(member.outcome is not None and member.outcome.failed for member in self._members)

    @property
    def are_gone(self) -> bool:
        """Whether no process of these ranks is left to be waited for."""
        return not self._left

    @property
    def has_stacks(self) -> bool:
        """Whether ranks have written where they were (:meth:`note_stacks`)."""
        return bool(self._stacks)

    def stop(
        self,
        number: int = signal.SIGTERM,
        *,
        patience: float = 0.0,
        drain: float = log_lines.DRAIN_SECONDS,
        meanwhile: Callable[[], object] = bool,
    ) -> None:
        """End all ranks: ``number`` first, SIGKILL for them and their descendants after ``timeouts.stop``. One that has
        reported gets SIGKILL alone.

        Args:
            number: the signal.
            patience: seconds that a rank with a handler of its own for it has at least: it may save its work there.
            drain: seconds that the node's log has to take what they have printed.
            meanwhile: called again and again.
        """
        self._stopping_since_ns = self._stopping_since_ns or time.time_ns()
        seconds = self.plan.settings.timeouts.stop
        if patience > seconds and any(cleanup.catches(each.pid, number) for each in self.running):
            seconds = patience
        try:
            self._end(number, seconds, meanwhile)
            if left := _listed(self._left):
                name = signal.Signals(number).name
                logger.warning(f"rank(s) {left} did not end within {seconds:.1f} s of {name}, and are killed")
            self._end(signal.SIGKILL, KILL_SECONDS, meanwhile)
        except LaunchError:
            pass  # the server is gone: the kernel has killed its ranks already
        finally:
            self._stop_showing(drain)

    def _stop_showing(self, seconds: float) -> None:
        followers, self._followers = self._followers, []  # a log that nobody reads is waited for once
        until = time.monotonic() + seconds
        unseen = sum(each.stop(max(0.0, until - time.monotonic())) for each in followers)
        if unseen:
            logger.warning(f"{human(unseen)} of the ranks' output were not shown: this node's log is not read")

    def _end(self, number: int, patience: float, meanwhile: Callable[[], object] = bool) -> None:
        # Who has reported does what is left for its end (a tracker tells its run how it was): no signal cuts it short.
        told = [each.pid for each in self._left if each.outcome is None or number == signal.SIGKILL]
        if told:
            self.plan.server.signal(told, number)
        deadline = time.monotonic() + patience
        while self._left:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.poll(wait=min(left, 0.2))
            meanwhile()

    def outcomes(self) -> list[RankOutcome]:
        """How each rank ended, so far; failures with the last lines they logged."""
        ended = [(member, member.outcome) for member in self._members if member.outcome is not None]
        return [self._told(member, outcome) if outcome.failed else outcome for member, outcome in ended]

    def returned(self) -> list[int]:
        """Ranks that have succeeded so far."""
        return [outcome.rank for outcome in self.outcomes() if outcome.status is Status.SUCCEEDED]

    def ends(self) -> list[int]:
        """Those of them whose processes have ended, too."""
        members = ((member.rank, member.outcome) for member in self._members if member.ended is not None)
        return [rank for rank, outcome in members if outcome is not None and outcome.status is Status.SUCCEEDED]

    def blame(self, rank: int, error: SafedistError, **facts: Any) -> RankOutcome:
        """The failure of a rank that this agent, and not the rank itself, has found; ``facts`` of a :class:`Raised`."""
        member = next(member for member in self._members if member.rank == rank)
        facts = {"repeats": True, "is_agents": True, **facts}
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}"  # by which it is found where the job was called
        raised = Raised(type=name, message=str(error), traceback="", **facts)
        return _outcome_of(member, Status.RAISED, raised=raised, step=member.page.steps.step)

    def result(self) -> RankFiles:
        """What rank 0 has left; only on node 0."""
        return self._orders[0].files

    def decks(self) -> tuple[dict[str, str], ...]:
        """Of the first rank here that left some, failed or not: one that is told to end with the others leaves none."""
        return next((tuple(left) for each in self._orders if (left := literals.read_decks(each.files.decks))), ())

    def _outcome(self, member: _Member) -> RankOutcome | None:
        record = member.page.record
        if record is None:
            return self._without_record(member) if member.ended is not None else None
        outcome = RankOutcome.from_json(record)
        stopping = self._stopping_since_ns
        if stopping is not None and outcome.time_ns > stopping and outcome.failed:
            # It failed because we told it to end, whatever it raised then.
            return replace(outcome, status=Status.STOPPED)
        row = None if outcome.raised is None else outcome.raised.failure
        return self._with_memory(outcome) if row in (Failure.WORKER_KILLED, Failure.OUT_OF_MEMORY) else outcome

    def _without_record(self, member: _Member) -> RankOutcome:
        ended = member.ended
        code, time_ns = (ended.exit_code, ended.time_ns) if ended is not None else (None, time.time_ns())
        status = Status.KILLED if code is not None and code < 0 else Status.EXITED
        if code == 0 and member.page.runs_script:
            status = Status.SUCCEEDED
            member.page.leave()  # else a pod that is told to stop waits for a save of its
        if self._stopping_since_ns is not None and time_ns > self._stopping_since_ns:
            status = Status.STOPPED
        outcome = replace(_outcome_of(member, status, exit_code=code), time_ns=time_ns)
        if status is Status.KILLED:  # the word of NCCL's watchdog comes before long stacks
            log = "\n".join(_last_lines(member.order, _WITH_STACKS))
            timed_out = code == -signal.SIGABRT and speaks_of_timeout(log)
            has_met = layout.has_met(member.page.summary)
            outcome = replace(outcome, timed_out=timed_out, has_met=has_met, at=stacks.crashed_at(log))
        return self._with_memory(outcome) if code == -signal.SIGKILL and status is Status.KILLED else outcome

    def _with_memory(self, outcome: RankOutcome) -> RankOutcome:
        """Now, while the other ranks still run: what each has held at most, and whether the kernel ran short."""
        now = memory.cgroup()
        peaks = {
            member.rank: member.ended.peak if member.ended is not None else memory.high_water(member.pid)
            for member in self._members
        }
        short = bool(memory.killed(now, self._memory_before))
        ran_out = outcome.failure is Failure.OUT_OF_MEMORY
        told = memory.told(now, self._memory_before, peaks, ran_out=ran_out)
        return replace(outcome, memory=told, out_of_memory=short)

    def _told(self, member: _Member, outcome: RankOutcome) -> RankOutcome:
        """With the last lines of the rank's log, and, where a collective timed out, with what the others did."""
        shown = outcome.raised.traceback if outcome.raised is not None else ""
        wanted = self.plan.settings.logs.tail_lines
        crashed = outcome.status is Status.KILLED and outcome.exit_code != -signal.SIGKILL
        lines = _last_lines(member.order, _WITH_STACKS if crashed else wanted + len(shown.splitlines()))
        if outcome.echo:
            outcome = replace(outcome, others=self._stood(failed=outcome.timed_out))
        said = log_lines.last_words(lines, max(1, wanted)) if crashed else log_lines.without_traceback(lines, shown)
        tail = said[-wanted:] if wanted else ()
        return self.gpus.named(replace(outcome, log_tail=tail))

    def usage(self) -> disk.Usage:
        """How much the ranks of this round hold in scratch."""
        contexts = [order.context for order in self._orders]
        return disk.usage(self.plan.scratch, contexts[0].round, [context.rank for context in contexts])


def _listed(members: Sequence[_Member]) -> str:
    return ", ".join(str(member.rank) for member in members)


def _with_processes(members: Sequence[_Member]) -> str:
    return ", ".join(f"{member.rank} (process {member.pid})" for member in members)


def _last_lines(order: RankOrder, count: int) -> tuple[str, ...]:
    return tuple(line for log in order.logs for line in log_lines.tail(log, count))


def _outcome_of(member: _Member, status: Status, **facts: Any) -> RankOutcome:
    """An outcome, now, that the rank itself did not record."""
    return RankOutcome.of(member.order.context, member.pid, status, time.time_ns(), **facts)
