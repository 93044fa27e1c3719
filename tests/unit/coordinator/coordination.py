"""A coordinator without time, network or nodes: what nodes say to it, and what it wants of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flytekitplugins_safedist.coordinator.books import Cause, Outcome
from flytekitplugins_safedist.coordinator.coordinator import Coordinator
from flytekitplugins_safedist.coordinator.messages import Floor, Offer, Status, Want
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.sign import Sign, StoreLook
from flytekitplugins_safedist.preflight.judge import Judged

FIXED = Rules("job", 3, 3, max_restarts=2, max_replacements=4, heartbeat=20)
RANGE = Rules("job", 2, 4, is_fixed=False, max_restarts=2, max_replacements=4, heartbeat=20, last_call=10)
STEP = 0.5


class Job:
    """A coordinator in process ``a``, its store, and its nodes: processes, named by letters.

    Args:
        rules: of the job.
        me: the coordinator's process.
        sign: what the store has of a leader before it.
        leads: it has read back its own sign.
    """

    def __init__(self, rules: Rules = FIXED, me: str = "a", sign: Sign | None = None, *, leads: bool = True) -> None:
        self.rules, self.me, self.now = rules, me, 100.0
        self.it = Coordinator(rules, me, self.now, judge_reports)
        self.sign, self.is_decided = sign, False
        self.statuses: dict[str, Status] = {}
        self.wants: dict[str, Want] = {}
        self.linked: set[str] = set()
        self.silent: set[str] = set()
        if leads:
            self.lead()

    # --- the store
    def look(self, since: float | None = None) -> None:
        """It reads the store, and puts its sign there."""
        look = StoreLook(self.now if since is None else since, self.sign, self.is_decided)
        self._hear(self.it.on_look(look, self.now))
        self.sign = self.it.lead.take_sign() or self.sign

    def lead(self) -> None:
        """It reads back its own sign."""
        self.look()
        self.look()

    # --- nodes
    def come(self, *processes: str, node: int | None = None, **facts: Any) -> None:
        """Processes come: as node 0, 1, 2 for ``a``, ``b``, ``c`` where the size is fixed."""
        for process in processes:
            place = node if node is not None or not self.rules.is_fixed else ord(process[0]) - ord("a")
            self.statuses[process] = Status("job", process, place, 1.0, host=f"host-{process}")
            self.linked.add(process)
            self.say(process, **facts)

    def say(self, *processes: str, **changes: Any) -> None:
        """Nodes are otherwise than they were, one after the other; one that leaves is gone then."""
        for process in processes:
            status = self.statuses[process] = replace(self.statuses[process], **changes)
            offer = Offer(status.round, {"port": str(status.round.number)})
            if process == self.me and status.offer != offer:
                self.statuses[process] = replace(status, offer=offer)
            self._hear(self.it.on(self.statuses[process], self.now))
            if "leaving" in changes:
                self.linked.discard(process)

    def fail(self, process: str, name: str = "ValueError", **facts: Any) -> Cause:
        """A rank of a node fails; it is said at once, and ended."""
        at = self.statuses[process]
        text = f"{name} on {process}"
        cause = Cause(
            at.round, at.node_rank, name, text, int(self.now * 1e9), machine=at.ground, where=f"node {process}"
        )
        cause = replace(cause, **facts)
        self.say(process, phase="ending", books=self.it.books.noting(Outcome(at.round, cause)))
        return cause

    def follow(self, *processes: str) -> None:
        """Nodes do what is wanted of them; all that are connected, where none is named."""
        names = processes or tuple(sorted(self.linked))
        while any(self._obey(process) for process in names):
            pass

    def _obey(self, process: str) -> bool:
        want, status = self.wants.get(process), self.statuses[process]
        if want is None or want.leave or process not in self.linked:
            return False
        course, changes = want.course, {}
        if want.runs and course.round > status.round:
            changes = {"round": course.round, "node_rank": want.node_rank, "phase": "running", "is_cut": False}
        elif not want.runs or course.round != status.round:
            is_kept = status.phase == "returned" and course.verdict is not None and course.verdict.kind == "success"
            if status.phase != "idle" and not is_kept:
                changes = {"phase": "idle"}
            elif course.round > status.round:
                changes = {"round": course.round, "node_rank": want.node_rank}
        elif status.phase == "running" and course.save is not None and not course.save.is_done and not status.listens:
            call = course.save.call  # nobody here would save
            if course.save.step is None:
                changes = {"floor": Floor(call, -1)} if status.floor.call < call else {}
            else:
                changes = {"saved": call} if status.saved < call else {}
        if changes:
            self.say(process, leader=course.leader, books=None, **changes)
        return bool(changes)

    def lose(self, *processes: str) -> None:
        """Connections are lost."""
        for process in processes:
            self.linked.discard(process)
            self._hear(self.it.on_disconnect(process, self.now))

    def miss(self, *processes: str) -> None:
        """Nodes are lost: they do not come back in time."""
        self.lose(*processes)
        self.wait(self.rules.grace + STEP)

    def come_back(self, process: str) -> None:
        """One whose connection was lost has another."""
        self.linked.add(process)
        self.say(process)

    # --- time
    def wait(self, seconds: float) -> None:
        """Time passes; who is connected, and not silent, is heard."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for process in self.linked - self.silent:
                self.it.on_beat(process, self.now)
            self._hear(self.it.on_tick(self.now))

    def pause(self, seconds: float) -> None:
        """The coordinator's own process stands still."""
        self.now += seconds
        self._hear(self.it.on_tick(self.now))

    def _hear(self, wants: dict[str, Want]) -> None:
        self.wants.update(wants)

    # --- what has become of it
    @property
    def members(self) -> set[str]:
        """Whose ranks are to run."""
        course = self.it.course
        wants = {process: self.wants[process] for process in self.linked if course.runs}
        return {process for process, want in wants.items() if want.runs and want.course.round == course.round}

    @property
    def number(self) -> int:
        return self.it.books.number

    @property
    def costs(self) -> tuple[int, int]:
        """How many restarts, and how many replacements, are spent."""
        return len(self.it.books.costing("restart")), len(self.it.books.costing("replacement"))

    def left(self, process: str) -> str:
        """Why a process has no part any more."""
        return self.wants[process].leave


def judge_reports(reports: dict[int, str], names: dict[int, str]) -> Judged:
    """What checks come to: whoever does not report that it is fit is not."""
    unfit = [names[rank] for rank, report in reports.items() if report != "fit"]
    return Judged(f"not fit: {', '.join(unfit)}" if unfit else "all is well", "SYSTEM:PreflightGpu" if unfit else "")


def begun(rules: Rules = FIXED, processes: Iterable[str] = "abc", **facts: Any) -> Job:
    """A job in its first round."""
    job = Job(rules)
    job.come(*processes, **facts)
    if not rules.is_fixed:
        job.wait(rules.last_call + STEP)
    assert job.members == set(processes)
    job.follow()
    return job


def succeeded_by(job: Job, me: str, rules: Rules | None = None) -> Job:
    """Node 0 of a job is lost, and this process leads it: it has come, and so has nobody else."""
    after = Job(rules or job.rules, me, job.sign)
    after.come(me, node=0 if after.rules.is_fixed else None)
    return after


def join(job: Job, before: Job, *processes: str, **facts: Any) -> None:
    """Survivors come from the leader before, with all that they know."""
    for process in processes:
        leader, books = before.it.lead.leader, before.it.books
        job.statuses[process] = replace(before.statuses[process], leader=leader, books=books)
        job.linked.add(process)
        job.say(process, **facts)
