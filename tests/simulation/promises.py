"""What a job promises, whatever happens to it, held against what is true."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flytekitplugins_safedist.agent import actions as act
from flytekitplugins_safedist.agent.policy import UNDECIDED
from flytekitplugins_safedist.coordinator.books import NO_ROUND, Round, Verdict
from flytekitplugins_safedist.coordinator.messages import Want

from . import world as w

if TYPE_CHECKING:
    from .world import Pod, Ranks, Run, World

_CALM = 20.0
"""Seconds after a disturbance in which much is still the disturbance's doing."""


class Promises:
    """Those of one order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rules = world.rules
        self.rounds_begun = 0
        self.saved_well = 0
        self.saved_before_join = 0
        self.offers: dict[str, Round] = {}

    # --- a round begins -----------------------------------------------------------------------------------------------
    def check_leader(self, leader: Pod, wants: dict[str, Want]) -> None:
        """After each call of a coordinator."""
        leads = leader.leads
        assert leads is not None
        course, before = leads.course, leader.begun
        if course.runs and course.round != before[0]:
            members = {want.node_rank: process for process, want in wants.items() if want.node_rank >= 0}
            leader.begun = course.round, tuple(members[rank] for rank in range(len(members)))
            self.rounds_begun += 1
            self.world.show("ROUND", leader.id, course.round, leader.begun[1])
            self._check_begin(leader, before[0])
        elif course.runs and not leads.lead.in_doubt and self.world.is_well(leader):
            self._check_room(leader)
        if (
            leader.runs
            and not course.runs
            and not leads.is_retired
            and not leads.lead.in_doubt  # another one has perhaps ended it
            and course.verdict is None
            and not course.is_decided
        ):
            self._check_over(leader)
        leader.runs = course.runs
        if course.verdict is not None and course.verdict.kind == "success":
            leader.has_succeeded = True

    def _check_begin(self, leader: Pod, before: Round) -> None:
        world, rules = self.world, self.rules
        course = leader.leads.course if leader.leads is not None else None
        assert course is not None
        key, members = leader.begun
        leader.first_round_at = min(leader.first_round_at, world.t)
        if not rules.min_nodes <= len(members) <= rules.max_nodes or members[0] != leader.id:
            raise w.Broken(f"round {key} begins with {members}")
        pods = [world.everyone[process] for process in members]
        failed = {each for each in leader.causes.union(*(pod.happened for pod in pods)) if each < key}
        if len(failed) > rules.max_restarts:
            raise w.Broken(f"round {key} begins, and {sorted(failed)} have failed for a known cause of the user's")
        leader.rounds |= {key}.union(*(pod.rounds for pod in pods))
        joins = 0 if rules.is_fixed else self.world.size + rules.max_replacements
        most = 1 + rules.max_restarts + rules.max_replacements + joins + world.pauses
        ranks = {each for each in leader.rounds if each not in world.runs or not world.runs[each].is_checks}
        if len(ranks) > most:
            raise w.Broken(f"round {key} is number {len(ranks)} of at most {most}")
        run = world.runs.get(before)
        if run is not None and not run.is_checks and leader.returned[before] >= set(run.members):
            raise w.Broken(f"every rank of round {before} had returned, and {key} begins")
        if rules.checks and not course.is_checks and not self._are_fit(leader):
            raise w.Broken(f"ranks start in round {key}, and no round of checks has found all nodes fit")
        out = [pod for pod in pods if pod.machine in course.books.without and pod is not leader]
        if out or (rules.is_fixed and course.books.without):
            raise w.Broken(f"{out} take part in {key}, and {course.books.without} are left out")
        self._check_machines(leader, before, course.books.without)
        for pod in world.everyone.values():
            calm = world.t - max(pod.troubled, leader.was_cut) > _CALM or not world.faults.count
            is_calm = calm and world.is_well(pod) and world.is_well(leader)
            # With an older leader that is there; or an older process of node 0 woke, which had never led.
            is_calm = is_calm and world.plan.profile != "older" and pod.place != leader.place
            is_calm = is_calm and pod.id not in leader.turned_away
            ranks = pod.ranks
            if is_calm and ranks is not None and ranks.round != key and not ranks.is_ending and not ranks.broken:
                raise w.Broken(f"{key} begins, and {pod.id} still runs in {ranks.round}")
        port = course.offer["port"]
        if self.offers.setdefault(port, key) != key or not port.startswith(f"{leader.id}/"):
            raise w.Broken(f"round {key} meets at {port}, as {self.offers[port]} did")

    def _check_machines(self, leader: Pod, before: Round, without: frozenset[str]) -> None:
        """A range goes on without a machine that is known to be broken, where enough others are there."""
        world, run = self.world, self.world.runs.get(before)
        cause = leader.leads.books.outcome(before).cause if leader.leads is not None else None
        if self.rules.is_fixed or run is None or cause is None or cause.echo or not cause.is_machines:
            return
        others = [world.everyone[process] for process in run.members]
        others = [pod for pod in others if world.is_well(pod) and pod.machine not in (cause.machine, *without)]
        others = [pod for pod in others if world.t - pod.troubled > _CALM and pod.preempted_at is None]
        if leader in others and len(others) >= self.rules.min_nodes and cause.machine not in without:
            raise w.Broken(f"{cause.machine} is broken, and takes part in the round after {before}")

    def _are_fit(self, leader: Pod) -> bool:
        checks = [run for key, run in self.world.runs.items() if run.is_checks and key in leader.rounds]
        return any(run.returned == set(run.members) for run in checks)

    def _check_room(self, leader: Pod) -> None:
        """A range that has room takes in who waits, where nobody has returned yet."""
        leads, rules, world = leader.leads, self.rules, self.world
        assert leads is not None
        books, (key, members) = leads.books, leader.begun
        run = world.runs.get(key)
        if rules.is_fixed or len(members) == world.size or leader.returned[key] or leads.course.is_checks:
            return
        if run is None or len(books.costing("nothing")) >= rules.most_free:
            return
        for process, link in leader.links.items():
            pod = link.node
            has_part = process not in leader.turned_away and pod.preempted_at is None
            has_part = has_part and process not in members and pod.machine not in books.without
            if not has_part or pod.link is not link or pod.status.cannot is not None or not world.is_well(pod):
                continue
            if world.t - max(pod.troubled, link.began, leader.troubled, leader.first_round_at) > 15 + world.plan.slow:
                raise w.Broken(f"{process} waits beside round {key}, which has room")

    def check_start(self, pod: Pod, action: act.StartRanks) -> None:
        """A node starts ranks."""
        world = self.world
        if pod.ranks is not None:
            raise w.Broken(f"{pod.id} starts {action.round} while ranks of {pod.ranks.round} are alive")
        leader = world.everyone[action.round.leader.process]
        run = world.runs.get(action.round)
        members = run.members if run is not None else leader.begun[1]
        if (run is None and leader.begun[0] != action.round) or members[action.node_rank] != pod.id:
            raise w.Broken(f"{pod.id} starts as {action.node_rank} of {action.round}, whose members are {members}")
        if run is not None and (run.offer, run.is_checks) != (action.offer["port"], action.is_checks):
            raise w.Broken(f"two rounds are {action.round}: {run}")
        if run is not None and pod.id in run.started:
            raise w.Broken(f"{pod.id} starts {action.round} twice")
        if world.verdict is not None and world.t > world.verdict_at + 30 and world.is_well(leader):
            raise w.Broken(f"{pod.id} starts {action.round} long after the verdict")

    # --- a round is over ----------------------------------------------------------------------------------------------
    def _check_over(self, leader: Pod) -> None:
        """A round ends for a reason: a member whose ranks had not returned is not well, or somebody joins."""
        world, (key, members) = self.world, leader.begun
        leads = leader.leads
        assert leads is not None
        run = world.runs.get(key)
        if run is not None and run.is_checks and run.returned == set(members):
            return
        rest = [world.everyone[process] for process in members if process not in leader.returned[key]]
        if not rest:
            raise w.Broken(f"round {key} is over, and all of its ranks had returned")
        ill = [pod for pod in rest if not pod.is_alive or pod.is_frozen or world.t - pod.troubled < _CALM]
        ill += [pod for pod in rest if pod.preempted_at is not None or pod.id in leader.turned_away]
        is_late = bool(leader.causes - {key}) and len({each for each in leader.causes if each < key}) > 0
        hurt = run is not None and run.is_hurt
        joins = "joins" in leads.course.news
        is_calm = world.t - world.disturbed > _CALM and world.t - leader.troubled > _CALM
        linked = [pod for pod in rest if pod.leads is not None or self._is_linked(pod)]
        are_well = len(linked) == len(rest)
        are_well = are_well and all(world.t - pod.troubled > _CALM and key in pod.rounds for pod in rest)
        are_well = are_well and world.t - world.disturbed > 0.5 and world.t - leader.troubled > _CALM
        if (is_calm or are_well) and not (hurt or ill or joins or is_late):
            raise w.Broken(f"round {key} is over without a reason: {leads.course.news}")
        if joins and run is not None and world.plan.saves:
            self._check_join(leader, run)

    def _check_join(self, leader: Pod, run: Run) -> None:
        """Before a node joins, all have saved; unless a rank does not come to it for as long as nodes wait to meet."""
        world, members = self.world, set(run.members)
        since = min((link.began for process, link in leader.links.items() if process not in members), default=world.t)
        if world.t - since >= self.rules.rendezvous:
            return
        done = [max(times.values()) for times in run.saved.values() if members <= times.keys()]
        if not done or max(done) < since:
            raise w.Broken(f"a node joins, and the last save before was at {max(done, default=None)}, it came {since}")
        self.saved_before_join += 1

    def _is_linked(self, pod: Pod) -> bool:
        return pod.link is not None and self.world.t - pod.link.began > _CALM

    def check_cut(self, pod: Pod) -> None:
        """A node that cannot hear node 0 does not let its ranks run; it has looked at the clock since."""
        world = self.world
        if pod.leads is not None or pod.link is not None:
            pod.cut_since = None
            return
        pod.cut_since = world.t if pod.cut_since is None else max(pod.cut_since, pod.woke)
        cut, runs = world.t - pod.cut_since, pod.ranks is not None and not pod.ranks.is_ending and not pod.ranks.broken
        if cut > self.rules.grace + 1 and runs:
            raise w.Broken(f"{pod.id} hears no leader for {cut:.1f} s, and its ranks run")

    # --- saves and hangs ----------------------------------------------------------------------------------------------
    def check_save(self, pod: Pod, ranks: Ranks, run: Run, action: act.SaveAt) -> None:
        """Ranks of a node are told at which step all save."""
        if ranks.floor > action.step:
            raise w.Broken(f"{pod.id} is to save at step {action.step}, and has passed it")
        if run.saves.setdefault(action.call, {}).setdefault(pod.id, action.step) != action.step:
            raise w.Broken("two steps for one save")
        if len(set(run.saves[action.call].values())) > 1:
            raise w.Broken(f"not all save at one step: {run.saves[action.call]}")

    def check_blame(self, pod: Pod, ranks: Ranks) -> None:
        """A rank is to fail for a job that does not move."""
        hung = self.world.runs[ranks.round].hung_since(self.world.t)
        if hung is None or self.world.t - hung < 3:
            raise w.Broken(f"{pod.id} is told of a hang in {ranks.round}, which moves")

    def check_leaving(self, pod: Pod) -> None:
        """A pod that is told to stop leaves after the save, where nothing else is wrong."""
        world, status, since = self.world, pod.status, pod.preempted_at
        if not status.leaving or since is None or not status.is_preempted or pod.leaves_at is not None:
            return
        pod.leaves_at = world.t
        run = world.runs[status.round]
        members = [world.everyone[process] for process in run.members]
        others = [each for each in members if each is not pod and each.preempted_at is not None]
        is_quiet = world.disturbed < since - 25 and world.pauses == 0 and not run.is_hurt and world.plan.saves
        is_quiet = is_quiet and run.hangs is None and world.plan.profile != "relapse" and not run.is_checks
        are_there = len(run.started) == len(members) and max(run.started.values()) < since - 3
        if not is_quiet or not are_there or others or any(not world.is_well(each) for each in members):
            return
        if pod.id in run.returned:
            return
        rest = {each.id for each in members} - run.returned
        steps = run.saves.get(max(run.saves, default=0), {})
        if not rest <= steps.keys() or len(set(steps.values())) > 1:
            raise w.Broken(f"{pod.id} leaves, and {rest - steps.keys()} have not saved: {steps}")
        if any(not rest <= each.keys() for each in run.saves.values()):
            raise w.Broken(f"{pod.id} leaves, and a save was not made by all: {run.saves}")
        done = [max(times.values()) for times in run.saved.values() if rest <= times.keys()]
        if done and world.t - max(done) > 5:
            raise w.Broken(f"{pod.id} leaves {world.t - max(done):.1f} s after all have saved")
        self.saved_well += 1

    # --- the end ------------------------------------------------------------------------------------------------------
    def check_upload(self, pod: Pod, verdict: Verdict) -> None:
        """An upload begins."""
        if not self.rules.is_alone and pod.looked <= pod.woke:
            raise w.Broken(f"{pod.id} uploads, and has not looked at the store since it stood still")
        causes, is_own = pod.causes, verdict.cause is not None and not verdict.cause.echo
        if verdict.kind == "success":
            run = self.world.runs.get(verdict.round)
            if run is None or run.returned != set(run.members) or pod.id not in run.members or run.is_checks:
                raise w.Broken(f"success, and of round {verdict.round} these have returned: {run and run.returned}")
        elif len(causes) > self.rules.max_restarts and not is_own and verdict.kind not in ("unfit", "stopped"):
            raise w.Broken(f"{verdict.kind}: {verdict.text}; but {sorted(causes)} had a known cause of their own")
        elif verdict.kind == "failed" and not is_own and verdict.cause is not None and verdict.cause.round in causes:
            raise w.Broken("an echo is told, and a cause of its own was known")
        elif verdict.kind == "failed" and not is_own and pod.leads is None:
            raise w.Broken("an echo is told, and node 0 was lost")
        if verdict.cause is not None and verdict.cause.round == NO_ROUND and self.world.runs:
            raise w.Broken("a node that cannot begin ends a job that has begun")
        cause = verdict.cause if is_own else None
        if cause is not None and cause.round != NO_ROUND and f"{cause.name} in {cause.round} " not in cause.text:
            raise w.Broken(f"the text is of another round: {verdict}")
        if verdict.kind != "success" and pod.has_succeeded and verdict.kind != "stopped":
            raise w.Broken("a success was decided, and something else is uploaded")
        if (verdict.kind == "stopped") > self.rules.is_alone:
            raise w.Broken("a pod that is told to stop ends a job of several")

    def check_put(self, pod: Pod, verdict: Verdict, sent: float) -> None:
        """A verdict comes into the store."""
        world, now = self.world, self.world.pods.get(0)
        if verdict.kind not in ("lost", "missing", "memory") or now is None or now is pod or now.leads is None:
            return
        if not world.is_well(now) or now.leads.is_retired or world.rules.is_alone:
            return
        is_fresh = now.signed_at > sent - 2 * self.rules.renew
        if is_fresh and max(now.troubled, now.first_round_at) < sent - self.rules.stale - 2:
            raise w.Broken(f"{pod.id} voids a job that {now.id} leads: {verdict.text}")

    def check_exit(self, pod: Pod, code: int) -> None:
        """A process ends by itself."""
        if pod.ranks is not None:
            raise w.Broken(f"{pod.id} exits while its ranks run")
        if code not in (0, UNDECIDED) or (code == 0 and self.world.verdict is None):
            raise w.Broken(f"{pod.id} exits {code}, and in the store is {self.world.verdict}")

    def bound(self) -> float:
        """How long a job may take: its rounds, each formed, run and ended, and each leader found."""
        rules, world = self.rules, self.world
        free = world.pauses + (0 if rules.is_fixed else world.size + rules.max_replacements)
        rounds = 1 + rules.max_restarts + rules.max_replacements + free + rules.checks
        return (rounds + 2) * (rules.rendezvous + rules.patience + 60 + 60) + rules.upload + 400

    def is_over(self) -> bool:
        """Whether the job has ended and its pods are gone.

        Raises:
            Broken: it takes too long.
        """
        world = self.world
        if world.verdict is None and world.t < 1000 and not world.rules.is_alone:
            return False
        if world.verdict is None:
            if world.rules.is_alone and world.pods and not world.pods[0].is_alive:
                return True  # Flyte begins another attempt
            if world.t > self.bound():
                raise w.Broken(f"no end within {self.bound():.0f} s: {self._shown()}")
            return False
        gone = [pod for pod in world.pods.values() if pod.exit == 0]
        if (
            len(gone) == world.size
            or (gone and not self.rules.is_fixed)
            or not any(p.is_alive for p in world.pods.values())
        ):
            return True
        if world.t > world.verdict_at + 4300:
            raise w.Broken(f"pods stay after the verdict: {self._shown()}")
        return False

    def check_end(self) -> None:
        """What came of it all."""
        world, plan, verdict, by = self.world, self.world.plan, self.world.verdict, self.world.verdict_by
        if verdict is None or by is None:
            pod, least = world.pods[0], self.rules.preemption + 5
            was_early = pod.preempted_at is not None and world.t - pod.preempted_at < least
            if not was_early and not world.faults.kinds & {"store", "storeless", "freeze"}:
                raise w.Broken("the only pod of a job is gone without a verdict")
            return
        runs = [run for run in world.runs.values() if not run.is_checks]
        is_quiet = not world.faults.count and not plan.cannot_first and not plan.unfit
        if is_quiet and not plan.user_fails and not plan.hangs and verdict.kind != "success":
            raise w.Broken(f"nothing was wrong: {verdict}")
        if is_quiet and (plan.user_fails == 1 or plan.profile == "hang"):
            if verdict.cause is None or verdict.cause.echo:
                raise w.Broken(f"the user's failure is not told: {verdict}")
            most = 1 + self.rules.max_restarts
            if plan.profile == "same" and plan.steps != (-1,):
                most = min(most, 2)  # the same rank, at the same step
            if self.rules.is_fixed and (plan.is_plain or plan.profile == "same") and len(runs) != most:
                raise w.Broken(f"max_restarts={self.rules.max_restarts}: {len(runs)} rounds, and {most} would be right")
        if plan.unfit and not world.faults.count and not plan.cannot_first and verdict.kind != "unfit":
            raise w.Broken(f"a node is not fit: {verdict}")
        hurt = any(run.is_hurt for run in runs)
        calm = world.faults.kinds <= {"pause"} and not plan.cannot_first and not plan.unfit and not plan.hangs
        # Ranks that have lost their peers meanwhile cost nothing, where node 0 knows that it stood still.
        is_explained = not plan.user_fails and world.pauses == world.long_pauses
        if calm and (not hurt or is_explained) and verdict.kind != "success":
            raise w.Broken(f"only node 0 stood still: {verdict}")
        if plan.profile == "done" and (verdict.kind != "success" or len(runs) != 1):
            raise w.Broken(f"a node was lost when it was done: {len(runs)} rounds, {verdict}")
        if plan.profile == "older" and world.faults.count and verdict.kind == "missing":
            raise w.Broken(f"some stay with an older node 0, and others wait for them: {verdict}")
        if plan.profile == "early" and verdict.kind == "lost" and world.faults.count <= self.rules.max_replacements:
            raise w.Broken(f"node 0 was lost {world.faults.count} times: {verdict}")
        if by.has_succeeded and verdict.kind not in ("success", "stopped"):
            raise w.Broken("a returned success is lost")
        if plan.profile == "relapse" and world.size > 1:
            self._check_relapse(verdict, len(world.runs))
        most = 400 * (len(world.runs) + 2) * world.size + 8 * len(world.everyone) * self.rules.rendezvous
        if world.messages > most:
            raise w.Broken(f"{world.messages} messages in {len(world.runs)} rounds")

    def _check_relapse(self, verdict: Verdict, rounds: int) -> None:
        """A worker that dies again and again is named, and for its memory where that was full."""
        most = min(self.rules.max_replacements + 1, 3 if self.rules.short_life > 60 else 99)
        kind = "memory" if self.world.seed % 2 == 0 else "lost"
        if verdict.kind != kind or f"node {self.world.size - 1}" not in verdict.text or rounds != most:
            raise w.Broken(f"a worker was lost in each of {rounds} rounds: {verdict}")

    def _shown(self) -> str:
        pods = [(p.id, p.is_alive, p.exit, p.status.phase, p.status.round) for p in self.world.pods.values()]
        leads = self.world.pods[0].leads
        return f"{pods} {leads and leads.course}"
