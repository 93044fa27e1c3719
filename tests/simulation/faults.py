"""What happens to a job: what kind of job it is, what its ranks do, and the faults that it meets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flytekitplugins_safedist.agent.actions import StartRanks
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.sign import PAUSE_SECONDS

from .world import FULL, Failure, Pod, Run, World

PROFILES = (
    "any",
    "pause",
    "preempt",
    "island",
    "split",
    "relapse",
    "hang",
    "same",
    "machine",
    "early",
    "doze",
    "late",
    "successor",
    "done",
    "lone",
    "older",
)
"""Orders of one kind of fault, that the general ones have too rarely or hide behind others."""


SLOW = [0.01, 0.2, 1.0]


class Plan:
    """What kind of job this is."""

    def __init__(self, pick: random.Random, profile: str | None) -> None:
        self.random = pick
        self.profile = profile or pick.choice(["any"] * 14 + [*PROFILES])
        size, is_fixed = pick.choice([1, 2, 2, 3, 3, 4, 5]), pick.random() < 0.6
        if self.profile == "lone":
            size = 1
        elif size == 1 and self.profile != "any":
            size = 3
        is_fixed = is_fixed or size == 1 or self.profile in ("relapse", "same", "done")
        is_fixed = is_fixed and self.profile not in ("machine", "successor")
        self.slow = pick.choice([0.1, 0.1, 2, 10, 60])
        """Seconds that ranks may take to end."""
        self.rules = Rules(
            "job",
            size if is_fixed else max(1, size - 1 - pick.randrange(2)),
            size,
            is_fixed=is_fixed,
            max_restarts=pick.choice([0, 0, 1, 3]),
            max_replacements=pick.choice([0, 2, 2, 10]),
            checks=pick.random() < 0.25,
            rendezvous=150,
            heartbeat=6,
            grace=3,
            settle=pick.choice([0.5, 3]),
            stop=30 if self.slow > 10 else 6,
            kill=32 if self.slow > 10 else 6,
            last_call=2,
            preemption=12,
            upload=60,
            renew=5,
            short_life=pick.choice([0.5, 600]),
        )
        self.user_fails = pick.choice([0, 0, 0, 0.3, 1])
        self.hangs = pick.choice([0, 0, 0.2])
        self.saves = pick.random() < 0.6
        self.cannot_first, self.cannot_later = pick.choice([0, 0, 0, 0, 0.3]), pick.choice([0, 0, 0.4])
        self.uploads = pick.choice([0.5, 3, 12])
        self.delays = pick.choice([[0.001, 0.01, 0.05], SLOW])
        """Seconds that a message takes."""
        self.faults = pick.choice([0, 0, 1, 1, 2, 3, 6, 12])
        self.lasts = pick.random() < (0.8 if self.profile == "island" else 0.1)
        """Ranks run for longer than an island is cut off."""
        self.names = pick.choice([("ValueError",), ("ValueError",), ("ValueError", "OSError")])
        self.steps: tuple[int, ...] = pick.choice([(-1,), (-1,), (3, 5, 7)])
        self.repeats, self.machines_fail = pick.choice([0, 0, 0.3]), pick.choice([0, 0, 0, 0.3])
        self.unfit: set[str] = set()
        """Machines that no check finds fit."""
        if self.rules.checks and pick.random() < 0.1:
            self.unfit.add("machine0")
        self._profile()

    def _profile(self) -> None:
        profile, pick = self.profile, self.random
        if profile == "any":
            return
        self.faults = pick.choice([1, 1, 2])
        self.cannot_first = self.cannot_later = self.hangs = 0
        self.unfit.clear()
        if profile in ("preempt", "relapse", "hang", "same", "successor", "done", "older"):
            self.user_fails = 0
        if profile == "preempt":
            self.saves = True
        elif profile == "hang":
            self.hangs, self.faults, self.slow = 1, 0, 0.1
        elif profile == "same":
            self.user_fails, self.faults, self.names, self.machines_fail = 1, 0, ("ValueError",), 0
            self.repeats, self.steps = 0, (pick.choice([-1, 5]),)
            self.delays = SLOW
        elif profile == "machine":
            self.user_fails, self.faults, self.machines_fail = 1, pick.choice([0, 1]), 1
            self.rules = replace(self.rules, max_restarts=3, min_nodes=1)
        elif profile == "early":
            self.cannot_later = 0.6
        elif profile in ("successor", "older"):
            self.lasts = True
        elif profile == "late":
            self.user_fails, self.rules = 0, replace(self.rules, max_replacements=pick.choice([0, 2]))

    @property
    def is_plain(self) -> bool:
        """A failure of the user's costs a restart, whichever it is."""
        return not self.repeats and not self.machines_fail and self.steps == (-1,)

    def run(self, members: tuple[str, ...], action: StartRanks, machines: Sequence[str]) -> Run:
        """What the ranks of a round will do."""
        pick = self.random
        duration = pick.choice([0.5, 3]) if action.is_checks else 400 if self.lasts else pick.choice([3, 8, 20])
        if self.profile == "relapse":
            duration = 60
        run = Run(members, duration, pick.choice([0.2, 1.0]), action.is_checks, action.offer["port"])
        if action.is_checks:
            return run
        if self.profile == "done":
            run.early = len(members) - 1
        if pick.random() < self.user_fails:
            for rank in pick.sample(range(len(members)), pick.choice([1, 1, min(2, len(members))])):
                run.fails[rank] = Failure(
                    pick.uniform(0.1, min(20, duration)),
                    pick.choice([0, 0, 0.5, 4, 15]),
                    pick.choice(self.names),
                    repeats=pick.random() < self.repeats,
                    step=pick.choice(self.steps),
                    is_machines=pick.random() < self.machines_fail,
                )
        if self.profile == "machine" and len(members) > 1:
            run.fails = {1: run.fails.popitem()[1]}
        if self.profile == "same" and run.fails:
            failure = next(iter(run.fails.values()))
            failure.after, failure.unknown_for = pick.choice([0.1, failure.after]), 0
            run.fails = {0: failure}
        elif pick.random() < self.hangs:
            run.hangs = pick.randrange(len(members)), pick.uniform(0, 0.5 * min(20, duration))
        return run


@dataclass
class Faults:
    """The faults of one order."""

    world: World

    def __post_init__(self) -> None:
        self.count = 0
        self.kinds: set[str] = set()

    def begin(self) -> None:
        world, pick = self.world, self.world.random
        if world.plan.profile in ("relapse", "early", "late", "successor", "done", "older"):
            getattr(self, f"begin_{world.plan.profile}")()
            return
        for _ in range(world.plan.faults):
            world.after(pick.choice([pick.uniform(0.1, 8), pick.uniform(5, 60)]), self.fault)

    def fault(self) -> None:
        world, pick, profile = self.world, self.world.random, self.world.plan.profile
        place = 0 if profile in ("pause", "split", "doze") else pick.randrange(world.size)
        pod = world.pods.get(place)
        if pod is None or not pod.is_alive or pod.is_frozen or world.verdict is not None:
            return
        # A lone pod that is gone takes its attempt with it.
        kinds = ["reset", "freeze", "preempt", "store", "storeless"]
        if world.size > 1:
            kinds += ["kill", "kill", "vanish", "oom", "reset", "cut", "cut", "freeze", "preempt", "preempt"]
            kinds += ["island", "rack", "split"]
        kind = profile if profile in ("pause", "preempt", "island", "split", "doze") else pick.choice(kinds)
        world.show("FAULT", kind, pod.id)
        self.count += 1
        self.kinds.add(kind)
        if kind != "preempt":
            world.disturbed = world.t
        getattr(self, kind)(pod)

    def kill(self, pod: Pod) -> None:
        self.world.end(pod)

    def vanish(self, pod: Pod) -> None:
        """With its machine: nobody closes its connections."""
        self.world.end(pod, silently=True)

    def oom(self, pod: Pod) -> None:
        """Its memory fills, and the kernel ends all of it."""
        self.world.act(pod, pod.policy.on_memory(FULL, self.world.t))
        self.world.soon(1.5, pod, lambda: self.world.end(pod))

    def rack(self, _pod: Pod) -> None:
        for each in list(self.world.pods.values()):
            if self.world.random.random() < 0.6:
                self.world.end(each)

    def reset(self, pod: Pod) -> None:
        for link in [pod.link, *pod.links.values()]:
            if link is not None:
                self.world.drop(link)

    def cut(self, pod: Pod) -> None:
        self.isolate(pod.id, self.world.random.choice([1, 4, 10, 40]))
        if self.world.random.random() < 0.3:
            self.give_up(pod)

    def split(self, pod: Pod) -> None:
        self.isolate(pod.id, self.world.random.choice([10, 100, 300]))
        self.give_up(pod)

    def island(self, pod: Pod) -> None:
        self.isolate(pod.place, 4000)

    def isolate(self, who: int | str, lasts: float) -> None:
        world = self.world
        world.cut[who] = world.t + lasts

        def over() -> None:
            world.disturbed = world.t
            world.heal()

        world.after(lasts + 1e-3, over)

    def give_up(self, pod: Pod) -> None:
        """Its machine is given up: another pod has its name, while it still lives."""
        world = self.world
        delay = world.random.uniform(1, 8)
        world.after(delay, lambda: world.pods[pod.place] is pod and world.start(pod.place))  # type: ignore[func-returns-value]

    def freeze(self, pod: Pod) -> None:
        self.stand_still(pod, self.world.random.choice([0.7, 2, 4, 8, 15, 200]))
        if self.world.size > 1 and self.world.random.random() < 0.4:
            self.give_up(pod)

    def pause(self, pod: Pod) -> None:
        self.stand_still(pod, self.world.random.choice([0.7, 2, 4, 8, 15, 100]))

    def stand_still(self, pod: Pod, lasts: float) -> None:
        world = self.world
        pod.is_frozen = True
        world.pauses += pod.place == 0
        world.long_pauses += pod.place == 0 and lasts > world.rules.grace

        def wake() -> None:
            world.show(pod.id, "wakes")
            world.disturbed, pod.is_frozen, pod.troubled = world.t, False, world.t
            if lasts > PAUSE_SECONDS:
                pod.woke = world.t
            if pod.link is not None:
                pod.link.heard = world.t
            if pod.leads is not None and world.random.random() < 0.5:
                world.send(pod, pod.leads.on_tick(world.t))  # before it has read what has come
            late, pod.late = pod.late, []
            for what in late:
                world.does(pod, what)

        world.after(lasts, wake)

    def preempt(self, pod: Pod) -> None:
        world = self.world
        at = pod.preempted_at = world.t

        def stop() -> None:
            is_checked = pod.ranks is not None and world.runs[pod.ranks.round].is_checks  # which has nothing to save
            world.act(pod, pod.policy.on_stop("told to stop", at, world.t, stays=not is_checked))

        world.soon(0, pod, stop)
        least = world.rules.preemption + world.rules.stop + world.rules.kill + 5
        lasts = world.random.choice([least, least, world.rules.preemption + 1])
        world.after(lasts, lambda: world.end(pod, is_replaced=not world.rules.is_alone))

    def store(self, _pod: Pod) -> None:
        self.world.away_until = self.world.t + self.world.random.choice([2, 20, 45])

    def storeless(self, pod: Pod) -> None:
        self.world.storeless[pod.place] = self.world.t + self.world.random.choice([10, 300])

    def doze(self, pod: Pod) -> None:
        """It stands still, another has its name meanwhile, and connections break when it is back."""
        lasts = self.world.random.choice([2, 4, 8, 30])
        self.stand_still(pod, lasts)
        self.give_up(pod)
        for _ in range(3):
            self.world.after(lasts + self.world.random.uniform(0, 4), lambda: self.strike(0, self.reset))

    def begin_early(self) -> None:
        """Node 0 is lost before or soon after it begins, again and again."""
        world = self.world
        for _ in range(world.random.choice([1, 2, 3])):
            world.after(world.random.uniform(0.1, 12), lambda: self.strike(0, self.kill))

    def begin_late(self) -> None:
        """A rank fails, and its node cannot say so for longer than anybody waits; another takes its place."""
        world = self.world
        lasts, place = world.random.choice([20, 60, 100]), world.size - 1

        def fail() -> None:
            pod = world.pods.get(place)
            ranks = pod.ranks if pod is not None and not pod.is_frozen else None
            if pod is None or ranks is None or ranks.is_ending or world.runs[ranks.round].is_checks:
                if world.verdict is None and world.t < 200:
                    world.after(1, fail)
                return
            self.count += 1
            self.kinds.add("late")
            world.disturbed = world.t
            world.fail(pod, ranks, Failure(0, 0.2))
            if world.random.random() < 0.5:
                self.stand_still(pod, lasts)
            else:
                self.isolate(pod.id, lasts)
            self.give_up(pod)
            if world.random.random() < 0.5:
                world.after(10, lambda: world.pods[0].is_alive and self.store(world.pods[0]))  # type: ignore[func-returns-value]

        world.after(4, fail)

    def begin_successor(self) -> None:
        """A range's node 0 vanishes with its machine, and a worker with its pod; their successors meet first."""
        world = self.world
        at = world.random.uniform(26, 32)
        world.after(at, lambda: self.strike(0, self.vanish))
        world.after(at, lambda: self.strike(world.size - 1, self.kill))

    def begin_older(self) -> None:
        """Node 0 cannot reach the store, and another one has its name: nodes meet the one and the other."""
        world = self.world

        def part() -> None:
            pod = world.pods[0]
            self.count += 1
            self.kinds.add("older")
            world.disturbed, world.storeless[pod.id] = world.t, world.t + 200
            self.give_up(pod)
            for _ in range(6):
                world.after(world.random.uniform(10, 100), lambda: self.strike(world.size - 1, self.reset))

        world.after(10, part)

    def begin_done(self) -> None:
        """A worker's ranks have returned, as node 0 knows, and then it is lost."""
        world = self.world
        key = next((key for key, run in world.runs.items() if not run.is_checks), None)
        last = world.runs[key].members[-1] if key is not None else ""
        pod = world.everyone.get(last)
        if pod is not None and pod.place and key is not None and last in world.pods[0].returned[key]:
            self.strike(pod.place, self.kill)
        elif world.verdict is None:
            world.after(0.5, self.begin_done)

    def strike(self, place: int, fault: Callable[[Pod], None]) -> None:
        world, pod = self.world, self.world.pods.get(place)
        if pod is not None and pod.is_alive and not pod.is_frozen and world.verdict is None:
            world.show("FAULT", fault.__name__, pod.id)
            self.count += 1
            self.kinds.add(fault.__name__)
            world.disturbed = world.t
            fault(pod)

    def begin_relapse(self) -> None:
        self.world.after(4, self.relapse)

    def relapse(self) -> None:
        """One worker dies whenever its ranks run, with its memory full or not."""
        world, place = self.world, self.world.size - 1
        if world.verdict is not None or place == 0:
            return
        pod = world.pods.get(place)
        if pod is not None and pod.is_alive and pod.ranks is not None and not pod.ranks.is_ending:
            self.count += 1
            self.kinds.add("relapse")
            world.disturbed = world.t
            is_full = world.seed % 2 == 0
            if is_full:
                world.act(pod, pod.policy.on_memory(FULL, world.t))
            world.soon(1.5, pod, lambda: world.end(pod))
        world.after(world.random.choice([2, 3]), self.relapse)
