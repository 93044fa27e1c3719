"""How long N nodes need to meet, and to meet again after a failure and after ten departures, at one coordinator; and
what their signs of life cost it.

    python benchmarks/rendezvous.py [--nodes 128,1024,4096] [--repeats 3] [--rest 20]

The coordinator and its server are the real ones, in a process of their own. A node is simulated: its connection and its
messages are real, its agent is a few lines without ranks; all of them share one other process, so at large N that one
and this machine's cores are the limit. Seconds are medians of the repeats: of the clock, which other work on the
machine lengthens, and of the server's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path

from flytekitplugins_safedist import frames
from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.agent.link import Link
from flytekitplugins_safedist.coordinator import wire
from flytekitplugins_safedist.coordinator.books import Books, Cause, Outcome
from flytekitplugins_safedist.coordinator.messages import Course, Offer, Status, Want
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.server import Server
from flytekitplugins_safedist.topology import Endpoint

DEPARTURES = 10
PHASES = ("first round", "after a failure", f"after {DEPARTURES} departures")


def obeying(status: Status, want: Want) -> Status:
    """A node without ranks, as it is then."""
    course = want.course
    if want.runs:
        return replace(status, leader=course.leader, round=course.round, node_rank=want.node_rank, phase="running")
    return replace(status, leader=course.leader, round=course.round, node_rank=want.node_rank, phase="idle", books=None)


def serve(nodes: int, pipe: Connection) -> None:
    """Node 0: the coordinator, its server, and a node without ranks."""
    rules = Rules("bench", nodes, nodes, max_restarts=9, max_replacements=99, rendezvous=600)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    server = Server(rules, "node-0", inbox, store=NoStore())
    endpoint = Endpoint("127.0.0.1", server.listen(Endpoint("127.0.0.1", 0)))
    link = Link(rules, endpoint, inbox=inbox, own=server.connect)
    pipe.send(endpoint.port)
    status = Status("bench", "node-0", 0, 1.0, "host")
    link.begin(replace(status, offer=Offer(status.round, {})))
    while not pipe.poll():
        try:
            want = inbox.get(timeout=0.05)
        except queue.Empty:
            continue
        if isinstance(want, Want):
            status = obeying(status, want)
            link.tell(replace(status, offer=Offer(status.round, {})))
    pipe.send(peak_memory())
    link.close()
    server.close()


def peak_memory() -> float:
    """This process's highest resident memory in MiB. Not getrusage's: that keeps the peak of who forked it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


class Node(asyncio.Protocol):
    """A simulated node."""

    def __init__(self, rank: int, life: int = 0) -> None:
        self.status = Status("bench", f"node-{rank}-{life}", rank, 1.0 + life, "host")
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.say(self.status)

    def data_received(self, data: bytes) -> None:
        rest, at = self._rest + data, 0
        while len(rest) - at >= frames.PREFIX_BYTES:
            begin = at + frames.PREFIX_BYTES
            end = begin + frames.length(rest[at:begin], frames.NODE_BYTES)
            if len(rest) < end:
                break
            at = end
            if rest[begin : begin + 1] == wire.WANT:
                status = obeying(self.status, want_of(rest[begin + 1 : end]))
                if status != self.status:
                    self.say(status)
        self._rest = rest[at:]

    def say(self, status: Status) -> None:
        self.status = status
        self.transport.write(wire.frame(wire.STATUS, status.dump()))

    def beat(self) -> None:
        self.transport.write(wire.beat(time.monotonic()))


def want_of(content: bytes) -> Want:
    """As Want.parse, but what all nodes are told is parsed once for all that are in this process."""
    head, _, course = content.partition(b', "course": ')
    data = json.loads(head + b"}")
    return Want(course_of(course), data["node_rank"], data["leave"])


@lru_cache
def course_of(content: bytes) -> Course:
    return Want.parse(b'{"node_rank": -1, "leave": "", "course": ' + content).course


def _same(node: Node) -> Node:
    return node


class Job:
    """The simulated nodes, and the process of their server."""

    def __init__(self, port: int, process: int) -> None:
        self.port, self._process = port, process
        self.nodes: list[Node] = []
        self.phases: list[tuple[float, float]] = []

    async def come(self, nodes: list[Node]) -> None:
        loop = asyncio.get_running_loop()
        self.nodes += nodes
        for first in range(0, len(nodes), 256):
            some = nodes[first : first + 256]
            dials = (loop.create_connection(partial(_same, node), "127.0.0.1", self.port) for node in some)
            await asyncio.gather(*dials)

    async def measure(self, *, number: int, begin: Callable[[], object] = lambda: None, come: list[Node]) -> None:
        """Until all nodes' ranks run in a round."""
        wall, cpu = time.monotonic(), self.cpu()
        begin()
        await self.come(come)
        while any(node.status.phase != "running" or node.status.round.number != number for node in self.nodes):
            await asyncio.sleep(0.005)
        self.phases.append((time.monotonic() - wall, self.cpu() - cpu))

    async def rest(self, seconds: float, beat: float) -> float:
        """The share of a core that signs of life take of the server."""
        wall, cpu = time.monotonic(), self.cpu()
        while time.monotonic() - wall < seconds:
            for first in range(0, len(self.nodes), 64):
                for node in self.nodes[first : first + 64]:
                    node.beat()
                await asyncio.sleep(beat * 64 / len(self.nodes))
        return (self.cpu() - cpu) / (time.monotonic() - wall)

    def cpu(self) -> float:
        """Seconds of CPU of the server's process so far."""
        fields = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def meet(nodes: int, job: Job, rest: float) -> float:
    """Play all phases; the share of a core that signs of life take, where it is to rest for some seconds."""
    await job.measure(number=0, come=[Node(rank) for rank in range(1, nodes)])
    share = await job.rest(rest, Rules("bench", nodes, nodes).beat) if rest else 0.0
    last = job.nodes[-1]
    cause = Cause(last.status.round, 1, "ValueError", "as long as most: " * 256, time.time_ns())
    books = Books(last.status.round, nodes, outcomes=(Outcome(last.status.round, cause),))
    failing = replace(last.status, phase="ending", books=books)
    await job.measure(number=1, begin=lambda: last.say(failing), come=[])

    leaving, job.nodes = job.nodes[:DEPARTURES], job.nodes[DEPARTURES:]

    def leave() -> None:
        for node in leaving:
            node.say(replace(node.status, leaving="told to stop by SIGTERM"))

    again = [Node(node.status.node or 0, 1) for node in leaving]
    await job.measure(number=2, begin=leave, come=again)
    return share


def run(nodes: int, rest: float) -> tuple[list[tuple[float, float]], float, float]:
    """Of each phase the seconds of the clock, and of the server's CPU; its memory; what signs of life take."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(nodes, theirs))
    server.start()
    try:
        job = Job(mine.recv(), server.pid or 0)
        share = asyncio.run(meet(nodes, job, rest))
        mine.send("stop")
        memory = mine.recv()
    finally:
        server.join(10)
        server.kill()
    return job.phases, memory, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="128,1024,4096")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rest", type=float, default=20.0, help="seconds for which signs of life are measured; 0: not")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"load {os.getloadavg()[0]:.1f}; in each phase seconds, and those of the server's CPU")
    print(f"| Nodes | {' | '.join(PHASES)} | server's memory | signs of life |")
    print("|---" * (len(PHASES) + 3) + "|")
    for nodes in map(int, arguments.nodes.split(",")):
        runs = [run(nodes, arguments.rest) for _ in range(arguments.repeats)]
        phases = []
        for phase in range(len(PHASES)):
            wall, cpu = (statistics.median(each[0][phase][kind] for each in runs) for kind in (0, 1))
            phases.append(f"{wall:.2f} s ({cpu:.2f} s)")
        memory, share = statistics.median(each[1] for each in runs), statistics.median(each[2] for each in runs)
        print(f"| {nodes:,} | {' | '.join(phases)} | {memory:.0f} MiB | {share:.1%} of a core |")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
