"""A job in virtual time: a real coordinator, nodes that follow the protocol, a network with delays, and random faults.

``python -m tests.unit.job.simulation 20000`` plays that many orders of faults, and prints what came of them.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flytekitplugins_safedist.job.deciding import Coordinator
from flytekitplugins_safedist.job.facts import Cause, End
from flytekitplugins_safedist.job.messages import (
    Again,
    Ended,
    Go,
    Greet,
    Hello,
    Leave,
    Leaves,
    Message,
    Refused,
    Returned,
    Stop,
    Tell,
    TheEnd,
    Told,
    Uploaded,
    Welcome,
)
from flytekitplugins_safedist.job.rules import Disconnected, Rules, Said, Tick

GRACE = 3.0
HORIZON = 3000.0
"""Seconds after which a job that has no verdict is stuck."""


class Broken(AssertionError):
    """The coordinator has not kept a promise."""


@dataclass
class Process:
    """One process of a pod."""

    place: int
    name: str
    started: int
    state: str = "new"
    round: int = -1
    cause: Cause | None = None
    alive: bool = True
    frozen: bool = False
    coordinator: Coordinator | None = None  # where it is node 0
    link: int = 0  # the number of its connection; 0 for none
    to: Process | None = None  # the node 0 at the other end
    known: str = ""  # the id of the coordinator that it was last welcomed by
    lost: tuple[str, ...] = ()
    cut_since: float | None = None
    end: End | None = None
    hello: Hello = field(default_factory=lambda: Hello("job", "", None, 0, ""))
    late: list[Callable[[], None]] = field(default_factory=list)  # what a frozen process will find

    def greeting(self) -> Hello:
        lost = (*self.lost, self.known) if self.known else self.lost
        return replace(self.hello, lost=lost, state=self.state, round=self.round, cause=self.cause)  # type: ignore[arg-type]


class World:
    """One job, from its first pod to its verdict."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.is_range = pick.random() < 0.4
        size = pick.choice([2, 3, 3, 4])
        self.rules = Rules(
            run="job",
            min_nodes=max(1, size - 1) if self.is_range else size,
            max_nodes=size,
            fixed=not self.is_range,
            max_restarts=pick.choice([0, 1, 3]),
            max_replacements=pick.choice([1, 4, 10]),
            timeout=120,
            heartbeat=6,
            stop=0.5,
            last_call=2,
            short_life=1,
        )
        self.now = 0.0
        self.size = size
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count(1)
        self._arrival: dict[tuple[int, bool], float] = {}  # of the last message of a connection, in each direction
        self.pods: dict[int, Process] = {}
        self.all: list[Process] = []
        self.rounds: dict[tuple[str, int], dict[int, str]] = {}
        self.took_part: dict[int, dict[str, str]] = {}
        self.heard_leaving: dict[str, set[str]] = {}
        self.real: dict[tuple[str, int], bool] = {}
        self.returned: set[tuple[int, str]] = set()
        self.uploaded: End | None = None
        self.ends: dict[str, End] = {}

    # --- time and network ----------------------------------------------------------------------------------------
    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), what))

    def run(self) -> End:
        for place in range(self.size):
            self.after(self.random.uniform(0, 3), lambda place=place: self.start(place))
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3, 4, 5])):
            self.after(self.random.uniform(0.2, 25), self.fault)
        while self.uploaded is None:
            if not self._queue or self.now > HORIZON:
                raise Broken(f"stuck at {self.now:.0f} s: {[(p.name, p.state, p.round) for p in self.pods.values()]}")
            self.now, _, what = heapq.heappop(self._queue)
            what()
        return self.uploaded

    def to_coordinator(self, process: Process, message: Message) -> None:
        link, host = process.link, process.to
        if not link or host is None:
            return

        def arrives() -> None:
            if process.link == link or not isinstance(message, Hello):
                self.hear(host, process.name, message)

        self.deliver((link, True), host, arrives)

    def deliver(self, way: tuple[int, bool], receiver: Process, arrives: Callable[[], None]) -> None:
        """In order on one connection; what a frozen process is sent waits for it."""
        delay = self.random.choice([0.001, 0.01, 0.05, 0.3])
        at = max(self.now + delay, self._arrival.get(way, 0.0) + 1e-6)
        self._arrival[way] = at

        def now() -> None:
            if receiver.frozen:
                receiver.late.append(arrives)
            elif receiver.alive:
                arrives()

        self.after(at - self.now, now)

    # --- node 0 --------------------------------------------------------------------------------------------------
    def hear(self, host: Process, process: str, message: Message) -> None:
        coordinator = host.coordinator
        if coordinator is None or not host.alive or host.frozen:
            return
        if isinstance(message, Leaves):
            self.heard_leaving.setdefault(host.name, set()).add(process)
        if isinstance(message, Ended) and message.cause is not None and not message.cause.echo:
            self.real[host.name, message.round] = True
        self.send(host, coordinator.on(Said(process, message), self.now))

    def send(self, host: Process, sent: list[tuple[str, Message]]) -> None:
        for name, message in sent:
            if isinstance(message, Go):
                self.check_go(host, name, message)
            if isinstance(message, TheEnd):
                self.check_end(host, message)
            process = next(process for process in self.all if process.name == name)
            if process.to is not host or not process.link:
                continue
            link = process.link

            def arrives(process: Process = process, message: Message = message, link: int = link) -> None:
                if process.link == link:
                    self.told(process, message)

            self.deliver((link, False), process, arrives)
        coordinator = host.coordinator
        if coordinator is not None:
            if len(coordinator.history.restarts) > self.rules.max_restarts:
                raise Broken("more restarts than max_restarts")
            if len(coordinator.history.losses) > self.rules.max_replacements:
                raise Broken("more losses than max_replacements")

    def tick(self, host: Process) -> None:
        if not host.alive:
            return
        if not host.frozen and host.coordinator is not None:
            for process in self.all:
                if process.alive and not process.frozen and process.to is host and process.link:
                    self.hear(host, process.name, _BEAT)
            self.send(host, host.coordinator.on(Tick(), self.now))
        self.after(0.5, lambda: self.tick(host))

    def check_go(self, host: Process, name: str, go: Go) -> None:
        places = self.rounds.setdefault((host.name, go.round), {})
        if places.setdefault(go.node_rank, name) != name:
            raise Broken(f"place {go.node_rank} of round {go.round} was given twice")
        if name in self.heard_leaving.get(host.name, ()):
            raise Broken(f"{name} has left, and was counted in round {go.round}")
        if list(places.values()).count(name) != 1:
            raise Broken(f"{name} has two places in round {go.round}")

    def check_end(self, host: Process, message: TheEnd) -> None:
        if self.ends.setdefault(host.name, message.end) != message.end:
            raise Broken("two ends of one coordinator")
        is_echo = message.end.outcome.startswith("echo")
        if is_echo and self.real.get((host.name, int(message.end.outcome.split()[-1]))):
            raise Broken("an echo is called the root cause of a round with a real failure")

    # --- nodes ---------------------------------------------------------------------------------------------------
    def start(self, place: int) -> None:
        if self.uploaded is not None:
            return
        number = next(self._number)
        process = Process(place, f"p{place}-{number}", number)
        process.hello = Hello("job", process.name, None if self.is_range else place, number, f"host{place}")
        self.pods[place] = process
        self.all.append(process)
        if place == 0:
            process.coordinator = Coordinator(self.rules, process.name, self.now)
            self.tick(process)
        self.watch(process)

    def watch(self, process: Process) -> None:
        """What an agent does by itself: looks for node 0, and ends its ranks where that is lost for too long."""
        if not process.alive or self.uploaded is not None:
            return
        if not process.frozen:
            host = self.pods.get(0)
            if not process.link and host is not None and host.alive and not host.frozen and process.state != "gone":
                process.link, process.to = next(self._number), host
                self.to_coordinator(process, process.greeting())
            elif process.link and process.to is not None and self.heartbeat_lost(process):
                self.cut(process)
            if process.cut_since is not None and self.now - process.cut_since > GRACE and process.state == "running":
                self.ends_ranks(process, None, report=False)
        self.after(0.3, lambda: self.watch(process))

    def heartbeat_lost(self, process: Process) -> bool:
        host = process.to
        return host is not None and (not host.alive or (host.frozen and self.random.random() < 0.05))

    def cut(self, process: Process) -> None:
        host, process.link, process.to = process.to, 0, None
        process.cut_since = process.cut_since if process.cut_since is not None else self.now
        if process.end is not None:
            process.end, process.state = None, "ended"
        if host is not None:
            self.disconnected(host, process)

    def disconnected(self, host: Process, process: Process) -> None:
        def seen() -> None:
            if host.alive and host.coordinator is not None and not (process.link and process.to is host):
                self.send(host, host.coordinator.on(Disconnected(process.name), self.now))

        self.after(0.01, lambda: host.late.append(seen) if host.frozen else seen())

    def told(self, process: Process, message: Message) -> None:
        if isinstance(message, Welcome):
            if process.known and process.known != message.coordinator:
                process.lost = (*process.lost, process.known)
            process.known, process.cut_since = message.coordinator, None
            self.remember(process, message)
            if process.state == "ended":
                self.to_coordinator(process, Ended(process.round, process.cause))
            elif process.state == "done":
                self.to_coordinator(process, Returned(process.round))
        elif isinstance(message, Refused):
            self.leave(process)
        elif isinstance(message, Greet):
            self.to_coordinator(process, process.greeting())
        elif isinstance(message, Go):
            self.begin(process, message)
        elif isinstance(message, Stop):
            self.remember(process, message)
            self.stop(process, message)
        elif isinstance(message, Again):
            self.remember(process, message)
        elif isinstance(message, Tell):
            cause = process.cause
            kind = "echo" if cause is not None and cause.echo else "real"
            self.to_coordinator(process, Told(message.round, f"{kind} {message.round}"))
        elif isinstance(message, TheEnd):
            process.end = message.end
            if message.uploads:
                self.after(self.random.uniform(0.1, 4), lambda: self.upload(process, message.end))
        elif isinstance(message, Leave):
            self.leave(process)

    def remember(self, process: Process, message: Welcome | Stop | Again | Go) -> None:
        if message.history.version >= process.hello.history.version:
            process.hello = replace(process.hello, history=message.history)

    def begin(self, process: Process, go: Go) -> None:
        if go.round <= process.round:
            return
        # Where nobody has survived who knew of it, the job begins anew, and so do its rounds.
        if self.took_part.setdefault(go.round, {}).setdefault(process.name, process.known) != process.known:
            raise Broken(f"{process.name} was in round {go.round} of two coordinators")
        self.remember(process, go)
        process.state, process.round, process.cause = "running", go.round, None
        how = self.random.random()
        cause = None
        if how < 0.12:
            cause = Cause(0, False, int(self.now * 1e9), go.node_rank, "ValueError", repeats=self.random.random() < 0.2)
        self.after(self.random.uniform(0.2, 6), lambda: self.runs_out(process, go.round, cause))

    def runs_out(self, process: Process, round_no: int, cause: Cause | None) -> None:
        if not process.alive or process.state != "running" or process.round != round_no:
            return
        if process.frozen:
            process.late.append(lambda: self.runs_out(process, round_no, cause))
        elif cause is not None:
            self.ends_ranks(process, cause)
        elif self.peers_are_well(process, round_no):
            process.state = "done"
            self.returned.add((round_no, process.name))
            self.to_coordinator(process, Returned(round_no))
        elif self.random.random() < 0.5:
            self.ends_ranks(process, Cause(4, True, int(self.now * 1e9), process.place, "lost its peer"))

    def peers_are_well(self, process: Process, round_no: int) -> bool:
        names = self.rounds.get((process.known, round_no), {}).values()
        mine = [each for each in self.all if each.name in names]
        return all(
            (round_no, each.name) in self.returned
            or (each.alive and (each.round < round_no or each.state == "running"))
            for each in mine
        )

    def stop(self, process: Process, stop: Stop) -> None:
        if stop.round != process.round:
            return
        if process.state == "ended":
            self.to_coordinator(process, Ended(process.round, process.cause))
        elif process.state in ("running", "done"):
            state = process.state

            def ended() -> None:
                if process.alive and process.state == state and process.round == stop.round:
                    echoes = state == "running" and self.random.random() < 0.5
                    peer = Cause(4, True, int(self.now * 1e9), process.place, "lost its peer")
                    self.ends_ranks(process, peer if echoes else None)

            self.after(self.random.uniform(0, 0.5), ended)

    def ends_ranks(self, process: Process, cause: Cause | None, *, report: bool = True) -> None:
        process.state, process.cause = "ended", cause
        if report:
            self.to_coordinator(process, Ended(process.round, cause))

    def upload(self, process: Process, end: End) -> None:
        if process.alive and not process.frozen and self.pods.get(process.place) is process:
            self.uploaded = end
            self.to_coordinator(process, Uploaded(ok=True))
        elif process.alive and process.frozen:
            process.late.append(lambda: self.upload(process, end))

    def leave(self, process: Process) -> None:
        """It ends; where there is no verdict, its pod is replaced."""
        self.dies(process)

    def dies(self, process: Process) -> None:
        if not process.alive:
            return
        process.alive, process.state = False, "gone"
        for other in self.all:
            if other.to is process:
                self.cut(other)
        host, process.link, process.to = process.to, 0, None
        if host is not None and host is not process:
            self.disconnected(host, process)
        if self.pods.get(process.place) is process:
            self.after(self.random.choice([0.05, 0.5, 2, 8]), lambda: self.start(process.place))

    # --- faults --------------------------------------------------------------------------------------------------
    def fault(self) -> None:
        place = self.random.randrange(self.size)
        process = self.pods.get(place)
        if process is None or not process.alive:
            return
        kind = self.random.choice(["kill", "kill", "freeze", "reset", "leave", "leave", "two"])
        if kind == "kill":
            self.dies(process)
        elif kind == "reset" and place:
            self.cut(process)
        elif kind == "leave":
            self.to_coordinator(process, Leaves("told to stop by SIGTERM"))
            self.after(self.random.choice([0.31, 1.0]), lambda: self.dies(process))
        elif kind == "freeze":
            self.freeze(process)
        elif kind == "two" and place:  # a pod that is cut off from its machine's master gets a successor
            self.start(place)

    def freeze(self, process: Process) -> None:
        process.frozen = True

        def wakes() -> None:
            process.frozen = False
            late, process.late = process.late, []
            for arrives in late:
                if process.alive:
                    arrives()

        seconds = self.random.choice([0.5, 2, 5, 10, 30])
        if seconds == 30:  # given up by its machine, and killed
            self.after(9, lambda: (wakes(), self.dies(process)))  # type: ignore[func-returns-value]
        else:
            self.after(seconds, wakes)


_BEAT: Message = Message.kinds["Beat"]()


def play(seed: int) -> str:
    """One job; the kind of its end."""
    try:
        return World(seed).run().kind
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}") from None


if __name__ == "__main__":
    print(dict(Counter(play(seed) for seed in range(int(sys.argv[1])))))
