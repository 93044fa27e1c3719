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
from multiprocessing.connection import Connection
from pathlib import Path

from flytekitplugins_safedist import frames
from flytekitplugins_safedist.job import messages
from flytekitplugins_safedist.job.facts import Cause, Rules
from flytekitplugins_safedist.job.messages import Ended, Go, Hello, Leaves, Message, Stop, Welcome
from flytekitplugins_safedist.job.server import Server
from flytekitplugins_safedist.topology import Endpoint

DEPARTURES = 10
PHASES = ("first round", "after a failure", f"after {DEPARTURES} departures")


def serve(nodes: int, pipe: Connection) -> None:
    """Node 0: the coordinator, its server, and a node without ranks."""
    rules = Rules("bench", nodes, nodes, fixed=True, max_restarts=9, max_replacements=99, timeout=600)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    server = Server(rules, "node-0", inbox, lambda _: {})
    say = server.say
    pipe.send(server.listen(Endpoint("127.0.0.1", 0)))
    say(Hello("bench", "node-0", 0, 1, "host"))
    while not pipe.poll():
        try:
            heard = inbox.get(timeout=0.05)
        except queue.Empty:
            continue
        if isinstance(heard, Stop):
            say(Ended(heard.round))
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
        self.hello = Hello("bench", f"node-{rank}-{life}", rank, 1 + life, "host")
        self.round = -1

    async def connect(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.say(self.hello)
        assert isinstance(await self.heard(), Welcome)

    def say(self, message: Message) -> None:
        self.writer.write(frames.packed(message.dump()))

    async def heard(self) -> Message:
        length = frames.length(await self.reader.readexactly(4), frames.NODE_BYTES)
        return messages.parse(await self.reader.readexactly(length))

    async def until_go(self) -> None:
        while True:
            message = await self.heard()
            if isinstance(message, Stop) and message.round == self.round:
                self.say(Ended(self.round))
            elif isinstance(message, Go):
                self.round = message.round
                return


async def meet(nodes: int, port: int) -> list[float]:
    """Seconds of each phase."""
    seconds = []
    started = time.monotonic()
    members = [Node(rank) for rank in range(1, nodes)]
    for first in range(0, len(members), 256):
        await asyncio.gather(*(node.connect(port) for node in members[first : first + 256]))
    await asyncio.gather(*(node.until_go() for node in members))
    seconds.append(time.monotonic() - started)

    started = time.monotonic()
    members[-1].say(
        Ended(members[-1].round, Cause(echo=0, consequence=False, time_ns=time.time_ns(), rank=1, name="ValueError"))
    )
    await asyncio.gather(*(node.until_go() for node in members))
    seconds.append(time.monotonic() - started)

    started = time.monotonic()
    leaving, staying = members[:DEPARTURES], members[DEPARTURES:]
    for node in leaving:
        node.say(Leaves("told to stop by SIGTERM"))
    again = [Node(node.hello.node or 0, 1) for node in leaving]
    await asyncio.gather(*(node.connect(port) for node in again))
    await asyncio.gather(*(node.until_go() for node in (*staying, *again)))
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
