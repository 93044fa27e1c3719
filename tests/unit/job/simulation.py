"""A job in virtual time: real coordinators, nodes that follow the protocol, a network with delays, and random faults.

``python -m tests.unit.job.simulation 20000`` plays that many orders of faults, and prints what came of them. With a
first seed after the number, it begins there.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flytekitplugins_safedist.config.options import Preflight
from flytekitplugins_safedist.job.coordinator import Coordinator, Disconnected, Said, Tick
from flytekitplugins_safedist.job.facts import Cause, End, Rules, Spent, replacements
from flytekitplugins_safedist.job.messages import (
    Again,
    Alarm,
    AllSaved,
    Answer,
    Asks,
    Beat,
    Ended,
    Floor,
    Gather,
    Go,
    Greet,
    Hello,
    Leave,
    Leaves,
    Listens,
    Message,
    Preempted,
    Refused,
    Returned,
    Saved,
    Stop,
    Tell,
    TheEnd,
    Told,
    Uploaded,
    Waits,
    Welcome,
)
from flytekitplugins_safedist.job.preflight_messages import Checked, Cleared
from flytekitplugins_safedist.preflight.judge import NodeReport, Trouble

GRACE, HEARTBEAT, TICK, LOOK = 3.0, 6.0, 0.5, 0.3
LATEST_FAULT = 25.0
SLOWEST_END = 8.0
HORIZON = 600.0
"""Seconds after which a job that has no verdict is stuck: pods come back within seconds."""

STANDS_AT_MOST = 20.0
"""Seconds that ranks wait for the answer to a call, where nothing ends their round."""


class Broken(AssertionError):
    """The coordinator has not kept a promise."""


@dataclass(eq=False)
class Process:
    """One process of a pod: its agent, the ranks of a round, and for node 0 the coordinator and its server."""

    place: int
    hello: Hello
    coordinator: Coordinator | None = None
    alive: bool = True
    frozen_at: float | None = None
    link: int = 0
    """The number of its connection; 0 for none."""
    to: Process | None = None
    is_welcome: bool = False
    known: str = ""
    """The coordinator that it was last welcomed by."""
    lost: tuple[str, ...] = ()
    cut_at: float | None = None
    stands: tuple[int, float] | None = None
    """A call that its ranks stand still for, and since when."""
    ended: Ended | None = None
    """How its ranks have ended."""
    is_ending: bool = False
    """Its ranks are being ended, which takes a while."""
    late: list[Callable[[], None]] = field(default_factory=list)
    """What it does when it wakes."""
    ways: dict[str, int] = field(default_factory=dict)
    """Its server's: processes that are connected, and on which connection."""
    leaves: bool = False
    checking: Go | None = None
    """The round that waits for its checks, and what they have found."""
    found: Checked | None = None
    must_end: End | None = None
    """Its coordinator's: the end that a survivor has brought."""

    @property
    def name(self) -> str:
        return self.hello.process

    @property
    def state(self) -> str:
        return self.hello.state if self.alive else "gone"

    def now(self, **facts: object) -> None:
        self.hello = replace(self.hello, **facts)  # type: ignore[arg-type]


class World:
    """One job, from its first pod to its verdict."""

    def __init__(self, seed: int) -> None:
        self.random = pick = random.Random(seed)
        self.is_range = pick.random() < 0.4
        self.size = pick.choice([2, 3, 3, 4, 5])
        self.rules = Rules(
            run="job",
            min_nodes=max(1, self.size - 1 - pick.randrange(2)) if self.is_range else self.size,
            max_nodes=self.size,
            fixed=not self.is_range,
            max_restarts=pick.choice([0, 1, 3]),
            max_replacements=pick.choice([1, 4, 10]),
            timeout=120,
            heartbeat=HEARTBEAT,
            settle=0.5,
            stop=0.5,
            kill=SLOWEST_END,
            last_call=2,
            grace=GRACE,
            short_life=1,
            preflight=Preflight() if pick.random() < 0.3 else None,
        )
        self.saves = pick.random() < 0.5
        self.machines = pick.choice([self.size, self.size, self.size - 1])
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count(1)
        self._arrival: dict[tuple[int, bool], float] = {}  # of the last message of a connection, in each direction
        self.pods: dict[int, Process] = {}
        self.all: dict[str, Process] = {}
        self.rounds: dict[tuple[str, int], dict[int, str]] = {}
        self.took_part: dict[tuple[int, str], str] = {}
        self.heard_leaving: set[tuple[str, str]] = set()
        self.real: set[tuple[str, int]] = set()
        self.returned: set[tuple[int, str]] = set()
        self.disturbed: set[str] = set()
        self.mishaps: set[object] = set()
        self.alone_until = 0.0
        self.too_many: set[str] = set()  # coordinators that have turned away a process more than a range may have
        self.answers: dict[tuple[str, int, int], Answer] = {}
        self.ends: dict[str, End] = {}
        self.uploaded: End | None = None

    # --- time and network ----------------------------------------------------------------------------------------
    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), what))

    def run(self) -> End:
        for place in range(self.size):
            self.after(self.random.uniform(0, 3), lambda place=place: self.start(place))  # type: ignore[misc]
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3, 4, 6])):
            self.after(self.random.uniform(0.2, LATEST_FAULT), self.fault)
        while self.uploaded is None:
            if self.now > HORIZON:
                raise Broken(f"stuck: {[(p.name, p.state, p.hello.round) for p in self.pods.values()]}")
            self.now, _, what = heapq.heappop(self._queue)
            what()
        return self.uploaded

    def does(self, process: Process, what: Callable[[], None]) -> None:
        """Now, or when it wakes; never when it is dead."""
        if process.frozen_at is not None:
            process.late.append(lambda: self.does(process, what))
        elif process.alive:
            what()

    def deliver(self, way: tuple[int, bool], receiver: Process, arrives: Callable[[], None]) -> None:
        """In order on one connection; different connections overtake each other."""
        at = max(self.now + self.random.choice([0.001, 0.01, 0.05, 0.3]), self._arrival.get(way, 0.0) + 1e-6)
        self._arrival[way] = at
        self.after(at - self.now, lambda: self.does(receiver, arrives))

    def say(self, process: Process, message: Message) -> None:
        """To the coordinator; lost where there is no connection."""
        host, link = process.to, process.link
        if host is not None and (process.is_welcome or isinstance(message, Hello)):
            self.deliver((link, True), host, lambda: self.hear(host, link, process.name, message))

    # --- node 0: the server and its coordinator ------------------------------------------------------------------
    def hear(self, host: Process, link: int, name: str, message: Message) -> None:
        coordinator = host.coordinator
        if coordinator is None:
            return
        if isinstance(message, Hello):
            host.ways[name] = link
            if coordinator.history.round < 0 and coordinator.end is None and message.history.end is not None:
                host.must_end = message.history.end
        elif host.ways.get(name) != link:
            return
        if isinstance(message, Leaves):
            self.heard_leaving.add((host.name, name))
        sent = coordinator.on(Said(name, message), self.now)
        is_cause = isinstance(message, Ended | Alarm) and message.cause is not None and not message.cause.consequence
        is_heard = (host.name, name) not in self.heard_leaving and not any(isinstance(each, Greet) for _, each in sent)
        if is_cause and is_heard:  # whom nobody knows is to say it again
            self.real.add((host.name, message.round))  # type: ignore[union-attr]
        if isinstance(message, Hello) and message.alarm is not None and not message.alarm.cause.consequence:
            self.real.add((host.name, message.alarm.round))
        self.send(host, sent)

    def send(self, host: Process, sent: list[tuple[str, Message]]) -> None:
        for name, message in sent:
            self.check(host, name, message)
            process, link = self.all[name], host.ways.get(name)
            if link is None:
                continue
            if isinstance(message, Refused):
                del host.ways[name]
            self.deliver((link, False), process, lambda p=process, m=message, n=link: self.told(p, m, n))  # type: ignore[misc]
        assert host.coordinator is not None
        history = host.coordinator.history
        if history.excluded and not self.is_range:
            raise Broken("a node of a job of a fixed size is excluded")
        lost = replacements(history.losses)
        if len(history.restarts) > self.rules.max_restarts or lost > self.rules.max_replacements:
            raise Broken("a budget is passed")
        if len(history.losses) > len(self.mishaps):
            raise Broken(f"more losses than mishaps: {history.losses}")
        for loss in history.losses:
            self.check_loss(loss)

    def closed(self, host: Process, link: int, name: str) -> None:
        """The server reads the end of a connection."""
        if host.coordinator is not None and host.ways.get(name) == link:
            del host.ways[name]
            self.send(host, host.coordinator.on(Disconnected(name), self.now))

    def tick(self, host: Process) -> None:
        def ticks() -> None:
            assert host.coordinator is not None
            for name, link in list(host.ways.items()):
                process = self.all[name]
                if process.alive and process.frozen_at is None and process.link == link:
                    self.hear(host, link, name, Beat())
            self.send(host, host.coordinator.on(Tick(), self.now))

        self.does(host, ticks)
        if host.alive:
            self.after(TICK, lambda: self.tick(host))

    # --- promises ------------------------------------------------------------------------------------------------
    def check(self, host: Process, name: str, message: Message) -> None:
        if isinstance(message, Go):
            failed = any((host.name, number) in self.real for number in range(message.round))
            if self.rules.max_restarts == 0 and failed:
                raise Broken(f"round {message.round} begins, though a failure was told and max_restarts is 0")
            places = self.rounds.setdefault((host.name, message.round), {})
            if places.setdefault(message.node_rank, name) != name or list(places.values()).count(name) != 1:
                raise Broken(f"places of round {message.round}: {places}, and {message.node_rank} to {name}")
            if (host.name, name) in self.heard_leaving:
                raise Broken(f"{name} has left, and was counted in round {message.round}")
            process = self.all[name]
            if process.hello.machine in message.history.excluded and process is not host:
                raise Broken(f"{name} takes part in round {message.round}, and its machine is excluded")
            for spent in message.history.restarts:
                if not any((process, spent.round) in self.real for process in self.all):
                    raise Broken(f"a restart was spent on round {spent.round}, where only echoes were reported")
        elif isinstance(message, Answer):
            answer = self.answers.setdefault((host.name, message.round, message.call), message)
            if answer != message:
                raise Broken(f"two answers to one call: {answer}, {message}")
        elif isinstance(message, Refused) and message.why == "too many":
            self.too_many.add(host.name)
        elif isinstance(message, TheEnd):
            self.check_end(host, message.end)

    def check_end(self, host: Process, end: End) -> None:
        if self.ends.setdefault(host.name, end) != end or host.must_end not in (None, end):
            raise Broken(f"two ends: {self.ends[host.name]}, {host.must_end}, {end}")
        if (end.missing or end.kind == "timeout") and host.name not in self.too_many:
            raise Broken(f"the job ends for want of nodes that came: {end}")
        kind, _, number = end.outcome.partition(" ")
        if kind == "echo" and (host.name, int(number)) in self.real:
            raise Broken("an echo is called the root cause of a round with a real failure")

    def check_loss(self, loss: Spent) -> None:
        who = self.all[loss.who.partition("/")[0]]
        # That nodes could not hear node 0 is counted as node 0's, and may be theirs.
        found = {who.name} if who.place or loss.node in ("0", who.name) else {*self.all}
        if not found & self.disturbed:
            raise Broken(f"nothing had happened to a process that is counted as lost: {loss}")

    # --- nodes ---------------------------------------------------------------------------------------------------
    def start(self, place: int) -> None:
        if self.uploaded is not None:
            return
        number = next(self._number)
        name = f"p{place}-{number}"
        started = number if self.random.random() < 0.9 else 0  # a wrong clock
        node = None if self.is_range else place
        machine = f"machine-{place % self.machines}"
        process = Process(place, Hello("job", name, node, started, f"host{place}", machine=machine))
        self.pods[place] = self.all[name] = process
        if not started:
            self.disturbed.add(name)
            self.mishaps.add(name)
        if place == 0:
            process.coordinator = Coordinator(self.rules, name, self.now)
            process.link, process.to = next(self._number), process
            self.say(process, process.hello)
            self.tick(process)
        self.watch(process)

    def watch(self, process: Process) -> None:
        """What a link and an agent do by themselves."""
        if not process.alive or self.uploaded is not None:
            return
        if process.frozen_at is None and process.to is not process:
            self.look(process)
        stands, is_up = process.stands, process.state == "running" and process.frozen_at is None
        if stands is not None and is_up and self.now - stands[1] > STANDS_AT_MOST:
            raise Broken(f"{process.name} stands still for call {stands[0]}")
        self.after(LOOK, lambda: self.watch(process))

    def look(self, process: Process) -> None:
        host, newest = process.to, self.pods.get(0)
        if host is not None and (not host.alive or (host.frozen_at or self.now) < self.now - HEARTBEAT):
            self.cut(process)
        elif host is None and newest is not None and newest.alive and newest.frozen_at is None:
            self.connect(process, newest)
        is_cut = process.cut_at is not None and self.now - process.cut_at > GRACE
        if is_cut and process.state in ("running", "done") and not process.is_ending:
            process.cut_at = None
            self.ends_ranks(process, None, cut=True)

    def connect(self, process: Process, host: Process) -> None:
        if not process.leaves and host.name not in process.lost and self.now >= self.alone_until:
            process.link, process.to, process.is_welcome = next(self._number), host, False
            lost = (*process.lost, process.known) if process.known else process.lost
            self.say(process, replace(process.hello, lost=lost))

    def cut(self, process: Process, *, is_seen: bool = True) -> None:
        """Its connection is lost; ``is_seen``: at the other end, too."""
        host, link = process.to, process.link
        process.link, process.to, process.is_welcome = 0, None, False
        process.cut_at = self.now if process.cut_at is None else process.cut_at
        self.disturbed.add(process.name)
        if host is not None and is_seen:
            self.deliver((link, True), host, lambda: self.closed(host, link, process.name))

    def told(self, process: Process, message: Message, link: int) -> None:
        if process.link != link:
            return
        if isinstance(message, Welcome | Go | Stop | Again | TheEnd):
            process.now(history=message.history)
        if isinstance(message, Welcome):
            self.welcomed(process, message)
        elif isinstance(message, Refused):
            self.dies(process)
        elif isinstance(message, Greet):
            self.say(process, process.hello)
        elif isinstance(message, Go):
            self.begin(process, message)
        elif isinstance(message, Cleared):
            if process.checking is not None and process.checking.round == message.round:
                self.begin(process, replace(process.checking, checks=False))
        elif isinstance(message, Stop) and process.checking is not None and process.checking.round == message.round:
            process.checking = None
            self.say(process, Ended(message.round))
        elif isinstance(message, Stop) and message.round == process.hello.round:
            self.stop(process)
        elif isinstance(message, Tell):
            self.tell(process, message, link)
        elif isinstance(message, TheEnd):
            if message.uploads:
                self.after(self.random.uniform(0.1, 4), lambda: self.does(process, lambda: self.upload(process)))
        elif isinstance(message, Leave):
            self.dies(process)
        elif isinstance(message, Waits) and self.pods[0] not in (process, process.to):
            self.cut(process)  # the name leads to another one by now
        elif isinstance(message, Gather | Answer | AllSaved):
            self.save(process, message)

    def tell(self, process: Process, message: Tell, link: int) -> None:
        """Its agent takes this when its ranks have ended."""
        if process.is_ending:
            self.after(LOOK, lambda: self.does(process, lambda: self.told(process, message, link)))
        elif process.ended is not None and process.ended.round == message.round:
            cause = process.ended.cause
            kind = "echo" if cause is None or cause.consequence else "real"
            self.say(process, Told(message.round, f"{kind} {message.round}"))

    def welcomed(self, process: Process, welcome: Welcome) -> None:
        if process.known and process.known != welcome.coordinator:
            older = self.all[process.known]
            self.after(1, lambda: self.does(older, lambda: self.dies(older)))  # it hears that it has been left
            process.lost = (*process.lost, process.known)
        process.known, process.cut_at, process.is_welcome = welcome.coordinator, None, True
        if process.state == "ended":
            self.say_ended(process)
        elif process.state == "done":
            self.say(process, Returned(process.hello.round))
        elif process.state == "running" and self.saves:
            self.say(process, Listens(process.hello.round))

    def begin(self, process: Process, go: Go) -> None:
        if go.round <= process.hello.round:
            if go.round < process.hello.round or process.known != self.took_part.get((go.round, process.name)):
                raise Broken(f"{process.name} was in round {process.hello.round}, and is to begin {go.round}")
            return
        self.took_part[go.round, process.name] = process.known
        if go.checks:
            self.checks(process, go)
            return
        process.checking = None
        process.now(state="running", round=go.round, alarm=None)
        process.stands = None
        if self.saves:
            self.say(process, Listens(go.round))
            if self.random.random() < 0.3:
                self.after(self.random.uniform(0, 3), lambda: self.says_of(process, Asks(go.round)))
        cause = None
        if self.random.random() < 0.12:
            repeats = self.random.random() < 0.2
            name, broken = self.random.choice(["ValueError", "OSError"]), self.random.random() < 0.1
            cause = Cause(0, False, int(self.now * 1e9), go.node_rank, name, repeats=repeats or broken, broken=broken)
        self.after(self.random.uniform(0.2, 6), lambda: self.runs_out(process, go.round, cause))

    def checks(self, process: Process, go: Go) -> None:
        """Its ranks wait until all nodes are found fit."""
        process.checking, is_new = go, process.checking is None or process.checking.round < go.round
        trouble = Trouble("Gpu", is_broken=True, text="no GPU")
        found = Checked(go.round, NodeReport((trouble,) if self.random.random() < 0.05 else ()))
        if is_new:
            self.after(self.random.uniform(0.2, 3), lambda: self.does(process, lambda: self.found(process, found)))
        elif process.found is not None and process.found.round == go.round:
            self.say(process, process.found)

    def found(self, process: Process, checked: Checked) -> None:
        if process.checking is not None and process.checking.round == checked.round:
            process.found = checked
            self.say(process, checked)

    def says_of(self, process: Process, message: Asks | Preempted) -> None:
        if process.state == "running" and process.hello.round == message.round:
            self.does(process, lambda: self.say(process, message))

    def runs_out(self, process: Process, round_no: int, cause: Cause | None) -> None:
        def ends() -> None:
            if process.state != "running" or process.hello.round != round_no or process.is_ending:
                return
            if cause is not None:
                self.ends_ranks(process, cause)
            elif self.peers_are_well(process):
                process.now(state="done")
                self.returned.add((round_no, process.name))
                self.say(process, Returned(round_no))
            elif self.random.random() < 0.5:
                self.ends_ranks(process, self.echo(process))

        self.does(process, ends)

    def echo(self, process: Process) -> Cause:
        return Cause(4, True, int(self.now * 1e9), process.place, "lost its peer")

    def peers(self, process: Process) -> list[Process]:
        coordinator = self.took_part.get((process.hello.round, process.name), "")
        places = self.rounds.get((coordinator, process.hello.round), {})
        # Where all who knew of a round were lost, its number comes again.
        names = [name for name in places.values() if self.took_part.get((process.hello.round, name)) == coordinator]
        return [self.all[name] for name in names if name != process.name]

    def peers_are_well(self, process: Process) -> bool:
        number = process.hello.round
        return all(
            (number, peer.name) in self.returned
            or (peer.alive and (peer.hello.round < number or peer.state == "running"))
            for peer in self.peers(process)
        )

    def tell_peers(self, process: Process) -> None:
        """Its ranks are gone: those that run with them may fail for it, or hang."""
        for peer in self.peers(process):
            if peer.state == "running" and peer.hello.round == process.hello.round and self.random.random() < 0.4:
                number = peer.hello.round
                self.after(
                    self.random.uniform(0, 1),
                    lambda peer=peer, number=number: self.runs_out(peer, number, self.echo(peer)),  # type: ignore[misc]
                )

    def stop(self, process: Process) -> None:
        if process.state == "ended":
            self.say_ended(process)
        if process.state == "ended" or process.is_ending:
            return
        state, number = process.state, process.hello.round

        def ended() -> None:
            if process.state in ("running", "done") and process.hello.round == number and not process.is_ending:
                echoes = state == "running" and self.random.random() < 0.5
                self.ends_ranks(process, self.echo(process) if echoes else None)

        self.after(self.random.uniform(0, 0.5), lambda: self.does(process, ended))

    def ends_ranks(self, process: Process, cause: Cause | None, *, cut: bool = False) -> None:
        """The failure is said at once; the others of its ranks end in their time."""
        if process.is_ending:
            return
        self.tell_peers(process)
        process.is_ending, process.stands = True, None
        number = process.hello.round
        if cause is not None:
            process.now(alarm=Alarm(number, cause, "" if cause.consequence else f"real {number}"))
            self.say(process, process.hello.alarm)  # type: ignore[arg-type]

        def ended() -> None:
            process.is_ending = False
            process.now(state="ended")
            process.ended = Ended(number, cause, (), cut)
            self.say_ended(process)

        seconds = self.random.choice([0, 0, 0, 0, 0, 1, SLOWEST_END])
        if seconds:
            self.after(seconds, lambda: self.does(process, ended))
        else:
            ended()

    def say_ended(self, process: Process) -> None:
        if process.ended is not None:
            self.say(process, process.ended)

    def save(self, process: Process, message: Gather | Answer | AllSaved) -> None:
        if process.state != "running" or message.round != process.hello.round or process.is_ending:
            return
        if isinstance(message, Gather):
            process.stands = (message.call, self.now)
            self.say(process, Floor(message.round, message.call, self.random.randrange(9)))
        elif isinstance(message, Answer):
            process.stands = None
            saved = Saved(message.round, message.call)
            self.after(self.random.uniform(0, 2), lambda: self.does(process, lambda: self.say(process, saved)))

    def upload(self, process: Process) -> None:
        """Of two that would, the first has decided."""
        assert process.coordinator is not None
        self.uploaded = process.coordinator.end
        self.say(process, Uploaded(ok=True))

    def dies(self, process: Process) -> None:
        """Its pod is replaced, where that has not come to pass already."""
        if not process.alive:
            return
        self.disturbed.add(process.name)
        self.mishaps.add(process.name)
        self.tell_peers(process)
        process.alive = False
        host, link = process.to, process.link
        if host is not None and host is not process:
            self.deliver((link, True), host, lambda: self.closed(host, link, process.name))
        if self.pods.get(process.place) is process:
            self.after(self.random.choice([0.05, 0.5, 2, 8]), lambda: self.start(process.place))

    # --- faults --------------------------------------------------------------------------------------------------
    def fault(self) -> None:
        process = self.pods.get(self.random.randrange(self.size))
        if process is None or not process.alive or process.frozen_at is not None:
            return
        kind = self.random.choice(
            ["kill", "kill", "freeze", "reset", "reset", "unseen", "leave", "leave", "two", "alone"]
        )
        self.disturbed.add(process.name)
        self.mishaps.add(process.name if kind in ("kill", "leave") else object())
        if kind == "kill":
            self.dies(process)
        elif kind in ("reset", "unseen") and process.place:
            self.cut(process, is_seen=kind == "reset")
        elif kind == "leave":
            self.leave(process)
        elif kind == "freeze":
            self.freeze(process)
        elif kind == "two":  # a pod that is cut off from its machine's master gets a successor
            if process.place == 0:
                self.freeze(process)
            self.start(process.place)
        elif kind == "alone":
            self.isolate(self.random.choice([1, 4, 10]))

    def isolate(self, seconds: float) -> None:
        """Node 0 and the others cannot reach each other."""
        self.alone_until = self.now + seconds
        for each in [*self.all.values()]:
            self.disturbed.add(each.name)
            if each.to is not None and each.to is not each:
                self.cut(each)

    def leave(self, process: Process) -> None:
        """It is told to stop; where ranks save, it waits for that, for some seconds."""
        wait = 0.0
        if self.saves and process.state == "running":
            self.say(process, Preempted(process.hello.round))
            wait = self.random.choice([0.5, 3])

        def leaves() -> None:
            self.say(process, Leaves("told to stop by SIGTERM"))
            process.leaves = True
            self.after(self.random.choice([0.31, 1.0]), lambda: self.dies(process))

        self.after(wait, lambda: self.does(process, leaves))

    def freeze(self, process: Process) -> None:
        process.frozen_at = self.now

        def wakes() -> None:
            process.frozen_at = None
            process.stands = process.stands and (process.stands[0], self.now)
            late, process.late = process.late, []
            for each in late:
                self.does(process, each)

        self.after(self.random.choice([0.5, 2, 5, 10, 20]), wakes)


def play(seed: int) -> str:
    """One job; the kind of its end."""
    try:
        return World(seed).run().kind
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}") from None


if __name__ == "__main__":
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(dict(Counter(play(seed) for seed in range(first, first + int(sys.argv[1])))))
