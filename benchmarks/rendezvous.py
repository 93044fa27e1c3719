"""How long N nodes need to meet, and to meet again after a failure and after ten departures, at one coordinator.

    python benchmarks/rendezvous.py [--nodes 128,1024,4096] [--repeats 3]

The coordinator and its server are the real ones, in a process of their own. A node is simulated: its connection and its
messages are real, its agent is a few lines without ranks; all of them share one other process, so at large N that one
and this machine's cores are the limit. Seconds are medians of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import queue
import resource
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from flytekitplugins_safedist import frames
from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.coordinator import wire
from flytekitplugins_safedist.coordinator.books import Books, Cause, Outcome
from flytekitplugins_safedist.coordinator.messages import Offer, Status, Want
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
    pipe.send(server.listen(Endpoint("127.0.0.1", 0)))
    status = Status("bench", "node-0", 0, 1.0, "host")
    server.hear(replace(status, offer=Offer(status.round, {})))
    while not pipe.poll():
        try:
            want = inbox.get(timeout=0.05)
        except queue.Empty:
            continue
        if isinstance(want, Want):
            status = obeying(status, want)
            server.hear(replace(status, offer=Offer(status.round, {})))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send((peak_memory(), usage.ru_utime + usage.ru_stime))
    server.close()


def peak_memory() -> float:
    """This process's highest resident memory in MiB. Not getrusage's: that keeps the peak of who forked it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


class Node:
    """A simulated node."""

    def __init__(self, rank: int, life: int = 0) -> None:
        self.status = Status("bench", f"node-{rank}-{life}", rank, 1.0 + life, "host")

    async def connect(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.say(self.status)

    def say(self, status: Status) -> None:
        self.status = status
        self.writer.write(wire.frame(wire.STATUS, status.dump()))

    async def until_it_runs(self) -> None:
        """Its ranks run in another round than now."""
        before = self.status.round
        while self.status.phase != "running" or self.status.round == before:
            length = frames.length(await self.reader.readexactly(4), frames.NODE_BYTES)
            frame = await self.reader.readexactly(length)
            if frame[:1] == wire.WANT:
                status = obeying(self.status, Want.parse(frame[1:]))
                if status != self.status:
                    self.say(status)


async def meet(nodes: int, port: int) -> list[float]:
    """Seconds of each phase."""
    seconds = []
    started = time.monotonic()
    members = [Node(rank) for rank in range(1, nodes)]
    for first in range(0, len(members), 256):
        await asyncio.gather(*(node.connect(port) for node in members[first : first + 256]))
    await asyncio.gather(*(node.until_it_runs() for node in members))
    seconds.append(time.monotonic() - started)

    started = time.monotonic()
    status, text = members[-1].status, "as long as most: " * 256
    cause = Cause(status.round, 1, "ValueError", text, time.time_ns())
    books = Books(status.round, nodes, outcomes=(Outcome(status.round, cause),))
    members[-1].say(replace(status, phase="ending", books=books))
    await asyncio.gather(*(node.until_it_runs() for node in members))
    seconds.append(time.monotonic() - started)

    started = time.monotonic()
    leaving, staying = members[:DEPARTURES], members[DEPARTURES:]
    for node in leaving:
        node.say(replace(node.status, leaving="told to stop by SIGTERM"))
    again = [Node(node.status.node or 0, 1) for node in leaving]
    await asyncio.gather(*(node.connect(port) for node in again))
    await asyncio.gather(*(node.until_it_runs() for node in (*staying, *again)))
    seconds.append(time.monotonic() - started)
    return seconds


def run(nodes: int) -> tuple[list[float], float, float]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(nodes, theirs))
    server.start()
    try:
        seconds = asyncio.run(meet(nodes, mine.recv()))
        mine.send("stop")
        memory, cpu = mine.recv()
    finally:
        server.join(10)
        server.kill()
    return seconds, memory, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="128,1024,4096")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"| Nodes | {' | '.join(PHASES)} | server's memory | server's CPU |")
    print("|---" * (len(PHASES) + 3) + "|")
    for nodes in map(int, arguments.nodes.split(",")):
        runs = [run(nodes) for _ in range(arguments.repeats)]
        phases = [statistics.median(each[0][phase] for each in runs) for phase in range(len(PHASES))]
        memory, cpu = statistics.median(each[1] for each in runs), statistics.median(each[2] for each in runs)
        print(f"| {nodes:,} | {' | '.join(f'{value:.2f} s' for value in phases)} | {memory:.0f} MiB | {cpu:.1f} s |")


if __name__ == "__main__":
    main()
