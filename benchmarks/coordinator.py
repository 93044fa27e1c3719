"""What N nodes cost their coordinator: CPU seconds of its decisions, and of reading and writing what is said.

    python benchmarks/coordinator.py [--nodes 128,1024,4096] [--range]

The coordinator is the real one, and so are statuses and wants on the wire; there is no network, and the nodes are
statuses. The phases: all meet; all say that they run; all say that they would save; one fails with a text of 8 KiB; all
end and begin again; ten leave, are replaced, and all begin again; each gives one sign of life.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from flytekitplugins_safedist.coordinator.books import NO_ROUND, Cause, Outcome
from flytekitplugins_safedist.coordinator.coordinator import Coordinator
from flytekitplugins_safedist.coordinator.messages import Offer, Status, Want
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.sign import Sign, StoreLook

LEAVERS = 10
PHASES = ("all meet", "all run", "all listen", "one fails", "all again", f"{LEAVERS} replaced", "all beat")


class Job:
    """A coordinator, and the statuses of its nodes."""

    def __init__(self, nodes: int, *, is_range: bool) -> None:
        self.now, self.is_range = 0.0, is_range
        least = 2 if is_range else nodes
        rules = Rules("job", least, nodes, is_fixed=not is_range, max_restarts=9, max_replacements=99)
        self.it = Coordinator(rules, "node-0", self.now)
        sign: Sign | None = None
        for _ in range(2):
            self.it.on_look(StoreLook(self.now, sign, is_decided=False), self.now)
            sign = self.it.lead.take_sign() or sign
        self.statuses: dict[str, Status] = {}
        self.wants: dict[str, Want] = {}

    def come(self, name: str, number: int) -> None:
        self.statuses[name] = Status("job", name, None if self.is_range else number, 1.0, host=f"host-{number}")
        offer = Offer(NO_ROUND, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}) if name == "node-0" else None
        self.say(name, offer=offer)

    def say(self, name: str, **changes: Any) -> None:
        status = self.statuses[name] = replace(self.statuses[name], **changes)
        frame = status.dump()
        self.hear(self.it.on(Status.parse(frame), self.now))

    def hear(self, wants: dict[str, Want]) -> None:
        for name, want in wants.items():
            if self.wants.get(name) != want:
                self.wants[name] = want
                want.dump()

    def wait(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.hear(self.it.on_tick(self.now))
            if self.now % 5 == 0:
                self.beat()

    def meet(self, nodes: int) -> None:
        for number in range(nodes):
            self.come(f"node-{number}", number)

    def listen(self) -> None:
        for name in self.statuses:
            self.say(name, listens=True)

    def beat(self) -> None:
        for name in self.statuses:
            self.it.on_beat(name, self.now)

    def run(self) -> None:
        for name in self.statuses:
            want = self.wants[name]
            self.say(
                name, leader=want.course.leader, round=want.course.round, node_rank=want.node_rank, phase="running"
            )

    def end(self) -> None:
        for name in self.statuses:
            offer = Offer(self.it.books.round, {"MASTER_PORT": "23457"}) if name == "node-0" else None
            self.say(name, phase="idle", books=None, offer=offer)


def phases(nodes: int, *, is_range: bool) -> list[float]:
    """CPU seconds of each."""
    job, seconds = Job(nodes, is_range=is_range), []

    def measure(*parts: Any) -> None:
        began = time.process_time()
        for part in parts:
            part()
        seconds.append(time.process_time() - began)

    measure(lambda: job.meet(nodes))
    if is_range:
        job.wait(31)
    assert job.it.course.runs
    measure(job.run)
    measure(job.listen)
    cause = Cause(job.it.books.round, 5, "ValueError", "x" * 8000, 1)
    books = job.it.books.noting(Outcome(cause.round, cause))
    measure(lambda: job.say("node-5", phase="ending", books=books))
    measure(job.end, job.run)
    leavers = [f"node-{number}" for number in range(10, 10 + LEAVERS)]

    def leave() -> None:
        for name in leavers:
            job.say(name, leaving="told to stop")
            del job.statuses[name]
        for number in range(10, 10 + LEAVERS):
            job.come(f"again-{number}", number)

    def ready() -> None:
        for number in range(10, 10 + LEAVERS):
            job.say(f"again-{number}", round=job.it.books.round)

    measure(leave, ready, job.end, job.run)
    assert job.it.course.runs
    measure(job.beat)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="128,1024,4096")
    parser.add_argument("--range", action="store_true", help="in place of a fixed size")
    chosen = parser.parse_args()
    print(f"| Nodes | {' | '.join(PHASES)} |")
    print("|---" * (len(PHASES) + 1) + "|")
    for nodes in map(int, chosen.nodes.split(",")):
        figures = [f"{seconds:.3f} s" for seconds in phases(nodes, is_range=chosen.range)]
        print(f"| {nodes:,} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
