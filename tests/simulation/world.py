"""A job in virtual time: real coordinators and policies of agents, a network, a store, and ranks that do as they like.

What is true (which ranks run, have returned, have failed, and who can know it) is kept here, apart from what the
coordinators believe; :mod:`.promises` holds the one against the other. What happens to the job is in :mod:`.faults`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flytekitplugins_safedist.agent import actions as act
from flytekitplugins_safedist.agent.policy import UNDECIDED, NodePolicy
from flytekitplugins_safedist.coordinator.books import NO_ROUND, Cause, Memory, Round, Verdict
from flytekitplugins_safedist.coordinator.coordinator import Coordinator
from flytekitplugins_safedist.coordinator.messages import Floor, HangNotice, Offer, Status, Want
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.sign import Sign, StoreLook
from flytekitplugins_safedist.preflight.judge import Judged

TICK = 0.5
"""Seconds between two times that a process looks at the clock."""

FULL = Memory(used=99, limit=100)
NEVER = float("-inf")


class Broken(AssertionError):
    """A promise is."""


@dataclass
class Failure:
    """What goes wrong in a rank of its own: when, how much later its agent learns of it, and as what."""

    after: float
    unknown_for: float
    name: str = "ValueError"
    repeats: bool = False
    step: int = -1
    is_machines: bool = False


@dataclass
class Run:
    """A round's ranks, as they are; one for each node."""

    members: tuple[str, ...]
    duration: float
    pace: float
    is_checks: bool
    offer: str
    fails: dict[int, Failure] = field(default_factory=dict)
    hangs: tuple[int, float] | None = None
    """Which rank comes to no collective any more, and how long after its start."""
    early: int = -1
    """Which rank returns long before the others."""
    started: dict[str, float] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    ends: float = float("inf")
    is_hurt: bool = False
    """A rank has failed, by itself or for another."""
    saves: dict[int, dict[str, int]] = field(default_factory=dict)
    saved: dict[int, dict[str, float]] = field(default_factory=dict)
    """When each node had made a save."""

    def hung_since(self, now: float) -> float | None:
        """Since when nothing moves; None where it does."""
        if self.hangs is None or len(self.started) < len(self.members):
            return None
        at = max(self.started.values()) + self.hangs[1]
        return at if now >= at else None


@dataclass
class Ranks:
    """Those of one node."""

    round: Round
    node_rank: int
    begun: float
    broken: Cause | None = None
    is_told: bool = False
    is_ending: bool = False
    call: int = 0
    floor: int = 0
    saved: int = 0


class Uploading:
    """In the place of a node's policy, which nobody asks any more when its process uploads."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def __getattr__(self, name: str) -> Callable[..., list[act.Action]]:
        return lambda *_, **__: []


class Link:
    """A connection of a node to a leader."""

    def __init__(self, node: Pod, leader: Pod, now: float) -> None:
        self.node, self.leader, self.is_open, self.heard, self.began = node, leader, True, now, now
        self.arrival = [0.0, 0.0]
        self.held: list[tuple[int, Callable[[], None]]] = []


class Pod:
    """One incarnation of a node: a process with an agent; in place 0 with a coordinator as well."""

    def __init__(self, world: World, place: int, *, cannot: bool) -> None:
        self.place, self.id = place, f"p{place}.{next(world.count)}"
        self.machine = world.machines[place]
        self.skew = world.skews[place]
        self.is_alive, self.is_frozen = True, False
        self.late: list[Callable[[], None]] = []
        self.exit: int | None = None
        text = f"cannot begin {self.id}"
        reason = Cause(NO_ROUND, -1, "ImportError", text, int(world.t * 1e9)) if cannot else None
        node = place if world.rules.is_fixed else None
        started = world.t + self.skew
        me = Status("job", self.id, node, started, host=f"host{place}", machine=self.machine, cannot=reason)
        self.policy: NodePolicy | Uploading = NodePolicy(
            world.rules, me, world.t, leads=place == 0, is_replaced=not world.rules.is_alone
        )
        self.leads: Coordinator | None = None
        if place == 0:
            self.leads = Coordinator(world.rules, self.id, world.t, world.judge_reports)
        self.link: Link | None = None
        self.links: dict[str, Link] = {}
        self.ranks: Ranks | None = None
        self.sent: Status | None = None
        self.sent_off: float | None = None
        self.preempted_at: float | None = None
        self.leaves_at: float | None = None
        self.stall = 0.0
        # what is true
        self.causes: set[Round] = set()  # rounds whose own cause this process can know
        self.happened: set[Round] = set()  # of those, the ones that failed here
        self.rounds: set[Round] = set()
        self.troubled = world.t  # when it was last anything but well
        self.cut_since: float | None = world.t
        self.was_cut = NEVER
        self.looked, self.woke = NEVER, NEVER
        # of a leader: what it was told, and what it has begun
        self.returned: dict[Round, set[str]] = defaultdict(set)
        self.turned_away: set[str] = set()
        self.pictures: dict[tuple[Round, int], set[str]] = defaultdict(set)
        self.begun: tuple[Round, tuple[str, ...]] = (NO_ROUND, ())
        self.runs = False
        self.first_round_at = float("inf")
        self.has_succeeded = False
        self.signed_at = NEVER

    @property
    def status(self) -> Status:
        return self.policy.status


class World:
    """One order of faults.

    Args:
        seed: which.
        profile: of :data:`.faults.PROFILES`; None: any.
        is_shown: print what happens.
    """

    def __init__(self, seed: int, profile: str | None = None, *, is_shown: bool = False) -> None:
        from . import faults, promises

        pick = self.random = random.Random(seed)
        self.seed, self.is_shown = seed, is_shown
        self.t = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count(1)
        self.plan = faults.Plan(pick, profile)
        self.rules: Rules = self.plan.rules
        self.size = self.rules.max_nodes
        self.skews = [pick.uniform(-2, 2) * pick.choice([0, 1, 30]) for _ in range(self.size)]
        machines = (
            self.size if self.plan.profile == "machine" else pick.choice([self.size, self.size, max(1, self.size - 1)])
        )
        self.machines = [f"machine{place % machines}" for place in range(self.size)]
        self.talks_wire = pick.random() < 0.1
        self.cut: dict[int | str, float] = {}  # a place, or a process: until when it reaches no other pod
        self.storeless: dict[int | str, float] = {}  # the same: until when it does not reach the store
        self.away_until = NEVER  # the store
        self.pods: dict[int, Pod] = {}
        self.everyone: dict[str, Pod] = {}
        self.name: Pod | None = None  # whom node 0's name leads to
        self.runs: dict[Round, Run] = {}
        self.sign: Sign | None = None
        self.verdict: Verdict | None = None
        self.verdict_by: Pod | None = None
        self.verdict_at = float("inf")
        self.disturbed, self.pauses, self.long_pauses = NEVER, 0, 0
        self.messages = 0
        self.promises = promises.Promises(self)
        self.faults = faults.Faults(self)

    # --- time ---------------------------------------------------------------------------------------------------------
    def show(self, *what: object) -> None:
        if self.is_shown:
            print(f"{self.t:8.2f}", *what)

    def after(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.t + delay, next(self.count), what))

    def does(self, pod: Pod, what: Callable[[], None]) -> None:
        """A process does something: when it wakes, if it is frozen; never, if it is gone."""
        if pod.is_frozen:
            pod.late.append(what)
        elif pod.is_alive:
            what()

    def soon(self, delay: float, pod: Pod, what: Callable[[], None]) -> None:
        self.after(delay, lambda: self.does(pod, what))

    def play(self) -> str:
        """Play it to its end; what came of it.

        Raises:
            Broken: a promise is.
        """
        for place in range(self.size):
            cannot = self.random.random() < self.plan.cannot_first
            at = self.random.choice([0, 0.5, 3])
            self.after(at, lambda place=place, cannot=cannot: self.start(place, cannot=cannot))  # type: ignore[misc]
        self.faults.begin()
        while True:
            self.t, _, what = heapq.heappop(self.queue)
            what()
            if self.promises.is_over():
                break
        self.promises.check_end()
        if self.verdict is None:
            return "a lone pod was lost"
        return self.verdict.cause.name if self.verdict.cause is not None else self.verdict.kind

    # --- network ------------------------------------------------------------------------------------------------------
    def is_cut(self, pod: Pod) -> bool:
        return bool(self.cut) and max(self.cut.get(pod.place, NEVER), self.cut.get(pod.id, NEVER)) > self.t

    def is_blocked(self, link: Link) -> bool:
        return self.is_cut(link.node) or self.is_cut(link.leader)

    def is_well(self, pod: Pod) -> bool:
        return pod.is_alive and not pod.is_frozen and not self.is_cut(pod) and self.reaches_store(pod)

    def carry(self, link: Link, up: int, what: Callable[[], None]) -> None:
        """In order, after a delay; lost with the connection; held back while that is cut."""
        to = link.leader if up else link.node
        at = max(self.t + self.random.choice(self.plan.delays), link.arrival[up] + 1e-6)
        link.arrival[up] = at
        self.messages += 1

        def arrive() -> None:
            if link.is_open and (self.is_blocked(link) or any(held[0] == up for held in link.held)):
                link.held.append((up, arrive))
            elif link.is_open:
                self.does(to, lambda: what() if link.is_open else None)

        self.after(at - self.t, arrive)

    def heal(self) -> None:
        for pod in self.everyone.values():
            link = pod.link
            if link is not None and link.held and not self.is_blocked(link):
                held, link.held = link.held, []
                for _, arrive in held:
                    self.after(1e-6, arrive)

    def drop(self, link: Link, *, silently: bool = False) -> None:
        """What was under way is lost. The other end sees it, unless the machine has vanished or is cut off."""
        if not link.is_open:
            return
        link.is_open = False
        node, leader = link.node, link.leader

        def leader_sees() -> None:
            if leader.links.get(node.id) is link and leader.leads is not None:
                del leader.links[node.id]
                self.send(leader, leader.leads.on_disconnect(node.id, self.t))

        def node_sees() -> None:
            if node.link is link:
                node.link = None
                self.act(node, node.policy.on_disconnect("reset", self.t))

        is_hidden = silently or self.is_blocked(link)
        self.soon(0.01 if not is_hidden else self.rules.heartbeat, leader, leader_sees)
        self.soon(0.01 if not is_hidden or not node.is_alive else self.rules.heartbeat, node, node_sees)

    def connect(self, pod: Pod) -> None:
        to = self.name
        older = [each for each in self.everyone.values() if each.place == 0 and each.is_alive and each is not to]
        if older and self.random.random() < 0.2:
            to = self.random.choice(older)  # an address that somebody has kept
        if to is None or not to.is_alive or to.leads is None or to.leads.is_retired or to is pod:
            return
        link = Link(pod, to, self.t)
        if self.is_blocked(link):
            return
        pod.link, pod.sent = link, None

        def first() -> None:
            before = to.links.get(pod.id)
            to.links[pod.id] = link
            if before is not None and before is not link:
                before.is_open = False

        self.carry(link, 1, first)
        self.sync(pod)

    def sync(self, pod: Pod) -> None:
        """Send the status, where it has changed."""
        status = pod.status
        if status == pod.sent or not pod.is_alive:
            return
        link, causes, rounds = pod.link, set(pod.causes), set(pod.rounds)
        if self.talks_wire:
            status = Status.parse(status.dump())
            if status != pod.status:
                raise Broken(f"on the wire {pod.status} is {status}")
        if pod.leads is not None:
            pod.sent = pod.status
            self.messages += 1
            self.soon(1e-4, pod, lambda: self.hear(pod, pod, status, causes, rounds))
        elif link is not None:
            pod.sent = pod.status
            self.carry(link, 1, lambda: self.hear(link.leader, pod, status, causes, rounds))

    def hear(self, leader: Pod, pod: Pod, status: Status, causes: set[Round], rounds: set[Round]) -> None:
        leads = leader.leads
        if leads is None or (leader is not pod and leads.is_retired):
            return
        leader.causes |= causes
        leader.rounds |= rounds
        if status.phase == "returned" and leads.course.runs:
            leader.returned[status.round].add(pod.id)
        self.send(leader, leads.on(status, self.t))

    def send(self, leader: Pod, wants: dict[str, Want]) -> None:
        """What a coordinator wants, to whom it is connected; not again what that has heard on this connection."""
        self.promises.check_leader(leader, wants)
        causes, rounds = set(leader.causes), set(leader.rounds)
        for process, want in wants.items():
            pod, link = self.everyone[process], leader.links.get(process)
            if want.leave:
                leader.turned_away.add(process)
            if self.talks_wire and Want.parse(want.dump()) != want:
                raise Broken(f"on the wire {want} is {Want.parse(want.dump())}")

            def take(pod: Pod = pod, want: Want = want, link: Link | None = link) -> None:
                if link is None or pod.link is link:
                    pod.causes |= causes
                    pod.rounds |= rounds
                    if link is not None:
                        link.heard = self.t
                    self.act(pod, pod.policy.on_want(want, self.t))

            if pod is leader:
                self.soon(1e-4, pod, take)
            elif link is not None:
                self.carry(link, 0, take)

    # --- store --------------------------------------------------------------------------------------------------------
    def reaches_store(self, pod: Pod) -> bool:
        until = (
            max(self.storeless.get(pod.place, NEVER), self.storeless.get(pod.id, NEVER)) if self.storeless else NEVER
        )
        return max(self.away_until, until) <= self.t

    def read(self, pod: Pod, then: Callable[[StoreLook], None]) -> None:
        since, takes = self.t, self.random.choice([0.02, 0.2, 1.5])
        if self.rules.is_alone:
            raise Broken("the only pod of a job looks at the store")

        def look() -> None:
            if self.reaches_store(pod):
                found = StoreLook(since, self.sign, self.verdict is not None)
                self.soon(takes / 2, pod, lambda: then(found))

        self.after(takes / 2, look)

    def see(self, pod: Pod, look: StoreLook) -> None:
        pod.looked = look.since
        self.act(pod, pod.policy.on_look(look, self.t))

    def put_verdict(self, pod: Pod, verdict: Verdict) -> None:
        """The process ends by uploading: when none of its ranks is left, and again while the store is away."""
        self.promises.check_upload(pod, verdict)
        pod.policy = Uploading(pod.status)
        if pod.ranks is not None and not pod.ranks.is_ending:
            self.end_ranks(pod)
        sent = self.t

        def put() -> None:
            if not pod.is_alive and self.random.random() < 0.5:
                return
            if pod.ranks is None and self.reaches_store(pod):
                if self.verdict is None:  # the first one stays
                    self.verdict, self.verdict_by, self.verdict_at = verdict, pod, self.t
                    self.show("VERDICT", pod.id, verdict.kind, verdict.text)
                    self.promises.check_put(pod, verdict, sent)
                self.soon(0.02, pod, lambda: self.leave(pod, 0))
            elif self.t > sent + self.rules.upload:
                self.soon(0, pod, lambda: self.leave(pod, UNDECIDED))
            else:
                self.soon(5, pod, put)

        self.after(self.random.uniform(0.05, self.plan.uploads), put)

    def renew(self, pod: Pod) -> None:
        """Look at the store for the coordinator, and put its sign there."""

        def on_look(look: StoreLook) -> None:
            assert pod.leads is not None
            if pod.leads.is_retired:
                return
            self.send(pod, pod.leads.on_look(look, self.t))
            sign = pod.leads.lead.take_sign()

            def put() -> None:
                if sign is not None and self.reaches_store(pod):
                    self.sign, pod.signed_at = sign, self.t

            self.after(self.random.choice([0.02, 0.3]), put)

        self.read(pod, on_look)

    # --- a pod --------------------------------------------------------------------------------------------------------
    def start(self, place: int, *, cannot: bool = False) -> None:
        pod = self.pods[place] = Pod(self, place, cannot=cannot)
        self.everyone[pod.id] = pod
        self.show("start", pod.id, "which cannot begin" if cannot else "")
        if place == 0:
            self.after(self.random.choice([0, 0, 2]), lambda: setattr(self, "name", pod))
        self.sync(pod)
        self.tick(pod)

    def tick(self, pod: Pod) -> None:
        if not pod.is_alive:
            return
        if not pod.is_frozen:
            self.live(pod)
        self.after(TICK, lambda: self.tick(pod))

    def live(self, pod: Pod) -> None:
        if not self.is_well(pod):
            pod.troubled = self.t
        if self.is_cut(pod):
            pod.was_cut = self.t
        if pod.leads is not None:
            self.lead(pod, pod.leads)
        elif pod.link is None:
            if isinstance(pod.policy, NodePolicy):
                self.connect(pod)
        else:
            link = pod.link
            if link.is_open and link.leader.is_alive and not link.leader.is_frozen and not self.is_blocked(link):
                link.heard = self.t
            if self.t - link.heard > self.rules.heartbeat:
                self.drop(link)
                pod.link = None
                self.act(pod, pod.policy.on_disconnect("silence", self.t))
        self.promises.check_cut(pod)
        if pod.is_alive and pod.ranks is not None:
            self.compute(pod, pod.ranks)
        if pod.is_alive:
            self.act(pod, pod.policy.on_tick(self.t))

    def lead(self, pod: Pod, leads: Coordinator) -> None:
        if leads.is_retired:
            for link in list(pod.links.values()):
                self.soon(0.3, pod, lambda link=link: self.drop(link))  # type: ignore[misc]
        elif leads.lead.is_due(self.t):
            self.renew(pod)
        for link in list(pod.links.values()):
            is_heard = link.is_open and link.node.is_alive and not link.node.is_frozen and not self.is_blocked(link)
            if is_heard and not leads.on_beat(link.node.id, self.t) and self.t - link.began > 5:
                self.drop(link)
        self.send(pod, leads.on_tick(self.t))
        look, key = leads.look_to_judge(), leads.books.round
        if look:
            self.soon(0.3, pod, lambda: self.send(pod, leads.on_hang(key, self.judge(pod, key, look), self.t)))

    def act(self, pod: Pod, actions: list[act.Action]) -> None:
        for action in actions:
            if pod.is_alive:
                self.carry_out(pod, action)
        if pod.is_alive:
            self.promises.check_leaving(pod)
            self.sync(pod)

    def carry_out(self, pod: Pod, action: act.Action) -> None:
        match action:
            case act.MakeOffer(after):
                offer = Offer(after, {"port": f"{pod.id}/{next(self.count)}"})
                self.soon(0.01, pod, lambda: self.act(pod, pod.policy.on_fact(self.t, offer=offer)))
            case act.StartRanks():
                self.start_ranks(pod, action)
            case act.EndRanks():
                self.end_ranks(pod)
            case act.CallRanks(call):
                self.call(pod, call)
            case act.SaveAt():
                self.save(pod, action)
            case act.TakePicture(look):
                self.picture(pod, look)
            case act.Blame(hang):
                self.blame(pod, hang)
            case act.LookAtStore():
                self.read(pod, lambda look: self.see(pod, look))
            case act.Upload(verdict):
                self.put_verdict(pod, verdict)
            case act.DropLink():
                if pod.link is not None:
                    self.drop(pod.link)
            case act.Say(text):
                self.show(pod.id, "says:", text)
            case act.Exit(code):
                self.leave(pod, code)

    def leave(self, pod: Pod, code: int) -> None:
        if pod.exit is not None:
            return
        self.promises.check_exit(pod, code)
        if (
            pod.leads is not None and code == 0 and not pod.status.is_uploaded
        ):  # the others hear it from its coordinator
            pod.policy = Uploading(replace(pod.status, is_uploaded=True))
            self.sync(pod)
        pod.sent_off = pod.sent_off if pod.sent_off is not None else self.t
        if pod.leads is not None and code == 0 and pod.links and self.t - pod.sent_off < 10:
            self.soon(TICK, pod, lambda: self.leave(pod, code))  # until the others have heard it
            return
        self.show(pod.id, "exits", code)
        pod.exit = code
        self.end(pod, is_replaced=code != 0)

    def end(self, pod: Pod, *, is_replaced: bool = True, silently: bool = False) -> None:
        if not pod.is_alive:
            return
        self.show(pod.id, "is gone")
        pod.is_alive, pod.ranks = False, None
        for link in [pod.link, *pod.links.values()]:
            if link is not None:
                self.drop(link, silently=silently)
        if is_replaced and self.pods[pod.place] is pod:
            cannot = self.random.random() < self.plan.cannot_later
            delay = self.random.uniform(0.3, 8)
            self.after(delay, lambda: self.pods[pod.place] is pod and self.start(pod.place, cannot=cannot))  # type: ignore[func-returns-value]

    # --- ranks --------------------------------------------------------------------------------------------------------
    def start_ranks(self, pod: Pod, action: act.StartRanks) -> None:
        self.promises.check_start(pod, action)
        run = self.runs.get(action.round)
        if run is None:
            leader = self.everyone[action.round.leader.process]
            members = leader.begun[1]
            run = self.runs[action.round] = self.plan.run(members, action, self.machines_of(members))
        self.show(pod.id, "starts", action.round, "checks" if action.is_checks else "")
        run.started[pod.id] = self.t
        ranks = pod.ranks = Ranks(action.round, action.node_rank, self.t)
        pod.rounds.add(action.round)
        if len(run.started) == len(run.members):
            run.ends = self.t + run.duration
        failure = run.fails.get(action.node_rank)
        if failure is not None:
            self.soon(failure.after, pod, lambda: self.fail(pod, ranks, failure))
        if self.plan.saves and not action.is_checks:
            if self.random.random() < 0.2:
                when = self.random.uniform(0.2, 6)
                self.soon(when, pod, lambda: pod.ranks is ranks and self.act(pod, pod.policy.on_ask(self.t)))  # type: ignore[func-returns-value]
            when = self.random.choice([0.1, 5.0])  # its agent may come late to looking at them
            self.soon(when, pod, lambda: pod.ranks is ranks and self.act(pod, pod.policy.on_fact(self.t, listens=True)))  # type: ignore[func-returns-value]

    def machines_of(self, members: tuple[str, ...]) -> list[str]:
        return [self.everyone[process].machine for process in members]

    def fail(self, pod: Pod, ranks: Ranks, failure: Failure) -> None:
        """A rank fails by itself; its agent may learn of it later, at the latest when no rank is left."""
        if pod.ranks is not ranks or ranks.broken is not None:
            return
        self.show(pod.id, "a rank fails")
        time_ns = int((self.t + pod.skew) * 1e9)
        ranks.broken = Cause(
            ranks.round,
            ranks.node_rank,
            failure.name,
            f"{failure.name} in {ranks.round} on {pod.id}",
            time_ns,
            repeats=failure.repeats,
            step=failure.step,
            machine=pod.machine,
            is_machines=failure.is_machines,
            where=pod.id,
        )
        self.runs[ranks.round].is_hurt = True
        self.soon(failure.unknown_for, pod, lambda: self.tell(pod, ranks))

    def tell(self, pod: Pod, ranks: Ranks) -> None:
        if pod.ranks is ranks and ranks.broken is not None and not ranks.is_told:
            ranks.is_told = True
            pod.causes.add(ranks.round)
            pod.happened.add(ranks.round)
            self.act(pod, pod.policy.on_failure(ranks.broken, self.t))

    def compute(self, pod: Pod, ranks: Ranks) -> None:
        """The ranks of a node go on; or notice that others do not."""
        run = self.runs[ranks.round]
        if ranks.is_ending or ranks.broken is not None:
            return
        if run.is_checks:
            if self.t - ranks.begun >= run.duration and self.random.random() < 0.5:
                report = "unfit" if pod.machine in self.plan.unfit else "fit"
                self.come_back(pod, ranks, run, report)
            return
        peers = [self.everyone[process] for process in run.members if process not in run.returned]
        lost = [peer for peer in peers if peer.id in run.started and not self.takes_part(peer, ranks.round)]
        late = [peer for peer in peers if peer.id not in run.started or peer.is_frozen or self.is_cut(peer)]
        hung = run.hung_since(self.t)
        if (lost and self.random.random() < 0.4) or (
            any(peer.id in run.started for peer in late) and self.random.random() < 0.02
        ):
            run.is_hurt = True
            time_ns = int((self.t + pod.skew - 1) * 1e9)
            echo = Cause(ranks.round, ranks.node_rank, "PeerLost", f"echo {ranks.round}", time_ns, echo=1)
            self.act(pod, pod.policy.on_failure(echo, self.t))
        elif hung is not None:
            stall = float(round(self.t - hung))
            if stall >= 3 and stall != pod.stall:
                pod.stall = stall
                self.act(pod, pod.policy.on_stall(stall, self.t))
        elif self.is_done(ranks, run) and not lost and not late and ranks.call <= ranks.saved:
            self.come_back(pod, ranks, run, "")

    def is_done(self, ranks: Ranks, run: Run) -> bool:
        if ranks.node_rank == run.early:
            return self.t > ranks.begun + 2 and len(run.started) == len(run.members)
        return self.t >= run.ends + (6 if run.early >= 0 else 0) and self.random.random() < 0.5

    def takes_part(self, pod: Pod, key: Round) -> bool:
        ranks = pod.ranks
        if not pod.is_alive or ranks is None or ranks.round != key:
            return False
        return ranks.broken is None and not ranks.is_ending

    def come_back(self, pod: Pod, ranks: Ranks, run: Run, report: str) -> None:
        pod.ranks = None
        run.returned.add(pod.id)
        self.show(pod.id, "returns", report)
        self.act(pod, pod.policy.on_return((ranks.node_rank,), self.t, report))

    def end_ranks(self, pod: Pod) -> None:
        ranks = pod.ranks
        if ranks is not None:
            ranks.is_ending = True

        def end() -> None:
            if ranks is not None:
                self.tell(pod, ranks)
            pod.ranks = None
            self.act(pod, pod.policy.on_quiet((), self.t))

        self.soon(self.random.uniform(0, self.plan.slow), pod, end)

    # --- saves, checks, hangs -----------------------------------------------------------------------------------------
    def call(self, pod: Pod, call: int) -> None:
        ranks = pod.ranks
        if ranks is not None and ranks.call < call and not self.runs[ranks.round].is_checks:  # which answer none
            ranks.call = call
            listens = self.plan.saves
            ranks.floor = int((self.t - ranks.begun) / self.runs[ranks.round].pace) + 1 if listens else -1
            answer = Floor(call, ranks.floor)
            self.soon(0.01, pod, lambda: self.act(pod, pod.policy.on_fact(self.t, floor=answer, listens=listens)))

    def save(self, pod: Pod, action: act.SaveAt) -> None:
        ranks, call = pod.ranks, action.call
        if ranks is None or ranks.saved >= call or ranks.is_ending:
            return
        run = self.runs[ranks.round]
        self.promises.check_save(pod, ranks, run, action)
        if ranks.saved == call - 1:
            ranks.saved = call
            takes = min(action.step - ranks.floor, 3) * run.pace + self.random.uniform(0.1, 2)
            run.ends = max(run.ends, self.t + takes + 0.5)

            def has_saved() -> None:
                if pod.ranks is ranks and not ranks.is_ending:
                    run.saved.setdefault(call, {})[pod.id] = self.t
                    self.act(pod, pod.policy.on_fact(self.t, saved=call))

            self.soon(takes, pod, has_saved)

    def judge_reports(self, reports: dict[int, str], names: dict[int, str]) -> Judged:
        unfit = [names[rank] for rank, report in reports.items() if report != "fit"]
        return Judged(f"not fit: {unfit}" if unfit else "all is well", "SYSTEM:Preflight" if unfit else "")

    def picture(self, pod: Pod, look: int) -> None:
        """A picture is put where the coordinator is, and then the status says so."""
        key, link, leader = pod.status.round, pod.link, pod if pod.leads is not None else None
        run = self.runs.get(key)
        hung = run is not None and run.hung_since(self.t) is not None

        def put() -> None:
            to = leader or (link.leader if link is not None and pod.link is link else None)
            if to is not None and pod.status.round == key:
                if hung:
                    to.pictures[key, look].add(pod.id)
                self.act(pod, pod.policy.on_fact(self.t, looked=look))

        self.soon(self.random.choice([0.1, 1, 4]), pod, put)

    def judge(self, leader: Pod, key: Round, look: int) -> HangNotice | None:
        run = self.runs.get(key)
        if run is None or run.hangs is None or not leader.pictures[key, look]:
            return None
        return HangNotice(look, f"rank {run.hangs[0]}", run.hangs[0], "it stands elsewhere")

    def blame(self, pod: Pod, hang: HangNotice) -> None:
        ranks = pod.ranks
        if ranks is None:
            return
        self.promises.check_blame(pod, ranks)
        if ranks.node_rank == hang.rank and ranks.broken is None and not ranks.is_ending:
            self.fail(pod, ranks, Failure(0, 0, "HangError"))
