"""How long N nodes need to come together, and to come together again after one failure: ours against torch's c10d.

    python benchmarks/rendezvous.py [--nodes 2,8,32,64,128] [--alone 256,1024,4096] [--repeats 3] [--beat 5]

What is simulated: a node is one member of the group with the connections, heartbeats and watcher of a real agent, but
without ranks; nodes share a few processes, except node 0, which holds the store and has its own. The loop is the one of
torch's agent: join; then ask ``num_nodes_waiting`` every 0.1 s (torchrun's default ``monitor_interval``) until a new
round is asked for; then join again. The other nodes' processes run at a lower priority than node 0's, since in a
cluster they are other machines. All share this machine's cores and Python's lock, so at large N the simulation is the
limit: seconds are upper bounds there, while operations and bytes per node are what they are. Both sides run in the same
harness, interleaved.

Columns: ``connect`` opens the node's connections (c10d: creates the handler), all nodes at once, node 0 among them;
then the first round; then the round after one node has failed, from its call to the last node's return. Bytes are what
crossed the loopback device of a network namespace of our own, TCP headers and heartbeats included;
``--beat 600`` leaves the heartbeats out, whose number is a matter of time, not of nodes. In that namespace
look-ups of peers' names fail at once; see docs/rendezvous.md for what slow look-ups do.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

POLL = 0.1
"""Seconds between two questions of an agent: torchrun's default monitor_interval."""

TIMEOUT = 600
INSIDE = "SAFEDIST_BENCHMARK_NAMESPACE"
PRELOAD = [
    "torch.distributed.elastic.rendezvous.registry",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "flytekitplugins_safedist.rendezvous.handler",
]


class Member(Protocol):
    """One simulated node."""

    def connect(self) -> None: ...
    def join(self) -> None: ...
    def waiting(self) -> bool: ...
    def operations(self) -> int: ...
    def leave(self) -> None: ...


class Ours:
    """A node of our rendezvous, with everything a real agent has."""

    def __init__(self, nodes: int, node: int, port: int, heartbeat_interval: float) -> None:
        from flytekitplugins_safedist.rendezvous.group import FixedGroup
        from flytekitplugins_safedist.rendezvous.settings import GroupSettings

        settings = GroupSettings(
            run_id="bench",
            nodes=nodes,
            node_rank=node,
            host="127.0.0.1",
            port=port,
            timeout=TIMEOUT,
            heartbeat_timeout=TIMEOUT,
            heartbeat_interval=heartbeat_interval,
        )
        self._group = FixedGroup(
            settings, lambda generation: {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(generation)}
        )
        self._calls = [0]

    def connect(self) -> None:
        self._group.connect(time.monotonic() + TIMEOUT)
        for connection in self._group.links.connections():
            self._count(connection)

    def _count(self, connection: Any) -> None:
        submit, calls = connection.submit, self._calls
        connection.submit = lambda op: submit(lambda store: op(Counting(store, calls)))

    def join(self) -> None:
        self._group.join()

    def waiting(self) -> bool:
        watch = self._group.watch
        if watch is None:
            return False
        watch.check()
        return watch.moved()

    def operations(self) -> int:
        return self._calls[0]

    def leave(self) -> None:
        # Ended first, as agents do: it wakes every waiting connection before the store goes away.
        self._group.close("done", "")
        self._group.leave()


class Counting:
    """A store that counts in ``calls`` the requests made through it."""

    def __init__(self, store: Any, calls: list[int]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[0] += 1
        return getattr(self._store, name)


class C10d:
    """A node of torch's c10d dynamic rendezvous, as torchrun makes it."""

    def __init__(self, nodes: int, node: int, port: int, heartbeat_interval: float) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters

        options = {"is_host": node == 0, "read_timeout": TIMEOUT, "timeout": TIMEOUT}
        self._params = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", "bench", nodes, nodes, "127.0.0.1", join_timeout=TIMEOUT, **options
        )
        self._handler: Any = None
        self._calls = [0]

    def connect(self) -> None:
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        self._handler = get_rendezvous_handler(self._params)
        backend = self._handler._state_holder._backend
        call, calls = backend._call_store, self._calls

        def counted(operation: str, *args: Any, **options: Any) -> Any:
            calls[0] += 1
            return call(operation, *args, **options)

        backend._call_store = counted

    def join(self) -> None:
        self._handler.next_rendezvous()

    def waiting(self) -> bool:
        return bool(self._handler.num_nodes_waiting() > 0)

    def operations(self) -> int:
        return self._calls[0]

    def leave(self) -> None:
        self._handler._stop_heartbeats()


KINDS: Mapping[str, Callable[[int, int, int, float], Member]] = {"ours": Ours, "c10d": C10d}


# --- one run ------------------------------------------------------------------------------------------------------


class Steps:
    """The steps of one process's nodes, each begun by all nodes of the job together."""

    def __init__(self, members: dict[int, Member], barrier: Any) -> None:
        self._members = members
        self._barrier = barrier
        self.times: list[dict[str, float]] = []
        self.bytes: list[int] = []

    def everywhere(self, act: Callable[[Member], None], ready: Callable[[int, Member], bool]) -> None:
        """Run ``act`` for each node, on a thread of its own, as soon as the agent's poll finds it ``ready``."""
        threads = []
        self._gate()
        began, operations = time.monotonic(), self._operations()
        waiting = dict(self._members)
        while waiting:
            for node in [node for node, member in waiting.items() if ready(node, member)]:
                threads.append(threading.Thread(target=act, args=(waiting.pop(node),)))
                threads[-1].start()
            if waiting:
                time.sleep(POLL)
        for thread in threads:
            thread.join()
        ended = time.monotonic()
        self.times.append({"from": began, "to": ended, "operations": self._operations() - operations})
        self._gate()

    def _gate(self) -> None:
        self._barrier.wait(TIMEOUT)
        self.bytes.append(loopback_bytes())
        self._barrier.wait(TIMEOUT)

    def _operations(self) -> int:
        return sum(member.operations() for member in self._members.values())


def host(run: tuple[str, int, int, float], mine: range, barrier: Any, pipe: Any) -> None:
    """One process of the simulation."""
    threading.stack_size(512 * 1024)
    # Thousands of threads that wait for Python's lock wake up this often just to ask again; that is not the rendezvous.
    sys.setswitchinterval(1.0)
    kind, nodes, port, heartbeat_interval = run
    if mine.start > 0:
        os.nice(10)  # these would be other machines; the store is not to wait for them
    steps = Steps({node: KINDS[kind](nodes, node, port, heartbeat_interval) for node in mine}, barrier)
    steps.everywhere(lambda member: member.connect(), lambda _node, _member: True)
    steps.everywhere(lambda member: member.join(), lambda _node, _member: True)
    steps.everywhere(lambda member: member.join(), lambda node, member: node == nodes - 1 or member.waiting())
    pipe.send((steps.times, steps.bytes))
    pipe.recv()
    steps.everywhere(lambda member: member.leave(), lambda _node, _member: True)
    # Threads of c10d's own would be waited for.
    os._exit(0)


def measure(kind: str, nodes: int, processes: int, heartbeat_interval: float) -> dict[str, float]:
    """Run once; seconds, operations and bytes per node of each step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shares = split(nodes, processes)
    barrier = context.Barrier(len(shares))
    workers = []
    for share in shares:
        ours, theirs = context.Pipe()
        worker = context.Process(target=host, args=((kind, nodes, port, heartbeat_interval), share, barrier, theirs))
        worker.start()
        workers.append((worker, ours))
    answers = [pipe.recv() for _, pipe in workers]
    for _, pipe in workers:
        pipe.send("leave")
    for worker, _ in workers:
        worker.join()
    result: dict[str, float] = {}
    crossed = answers[0][1]
    for index, step in enumerate(("connect", "first", "again")):
        times = [steps[index] for steps, _ in answers]
        result[step] = max(one["to"] for one in times) - min(one["from"] for one in times)
        result[f"{step} operations"] = sum(one["operations"] for one in times) / nodes
        result[f"{step} bytes"] = (crossed[2 * index + 1] - crossed[2 * index]) / nodes
    return result


def split(nodes: int, processes: int) -> list[range]:
    """Node 0 in a process of its own, as it holds the store; the others in ``processes`` more."""
    bounds = [1 + (nodes - 1) * part // processes for part in range(processes + 1)]
    return [range(1), *(range(low, high) for low, high in itertools.pairwise(bounds) if high > low)]


def loopback_bytes() -> int:
    """Bytes received by this namespace's loopback device so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


# --- reporting ----------------------------------------------------------------------------------------------------


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of each number over the runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def show(nodes: int, kind: str, got: dict[str, float]) -> None:
    """One line of the table."""
    cells = [f"{nodes:6d}  {kind:5s}"]
    for step in ("connect", "first", "again"):
        cells.append(f"{got[step]:8.3f} s {got[f'{step} operations']:7.1f} op {got[f'{step} bytes'] / 1000:9.1f} kB")
    print("  ".join(cells), flush=True)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,8,32,64,128", help="sizes at which both are run")
    parser.add_argument("--alone", default="256,1024,4096", help="sizes at which only ours is run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--beat",
        dest="heartbeat_interval",
        type=float,
        default=5.0,
        help="seconds between our heartbeats (c10d's own: 5)",
    )
    parser.add_argument("--json", help="also write every run here")
    options = parser.parse_args()
    # Torch warns of every name it cannot look up; there are none to look up here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    enter_namespace()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{os.cpu_count()} cores, {options.processes} processes, medians of {options.repeats}; per node: op, kB")
    print(" nodes  which " + "".join(f"  {step:^32s}" for step in ("connect", "first round", "round after a failure")))
    everything: list[dict[str, Any]] = []
    for nodes in sizes(options.nodes):
        runs: dict[str, list[dict[str, float]]] = {"c10d": [], "ours": []}
        for _ in range(options.repeats):
            for kind, made in runs.items():
                made.append(measure(kind, nodes, options.processes, options.heartbeat_interval))
                everything.append({"nodes": nodes, "kind": kind, **made[-1]})
        theirs, ours = median(runs["c10d"]), median(runs["ours"])
        show(nodes, "c10d", theirs)
        show(nodes, "ours", ours)
        whole = (theirs["connect"] + theirs["first"]) / (ours["connect"] + ours["first"])
        first, again = theirs["first"] / ours["first"], theirs["again"] / ours["again"]
        print(f"{'':13s}  ours is faster: first round {first:.1f}x ({whole:.1f}x with connecting), again {again:.1f}x")
    for nodes in sizes(options.alone):
        alone = [
            measure("ours", nodes, options.processes * 2, options.heartbeat_interval)
            for _ in range(min(options.repeats, 3))
        ]
        everything += [{"nodes": nodes, "kind": "ours", **run} for run in alone]
        show(nodes, "ours", median(alone))
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1))


def sizes(text: str) -> list[int]:
    """``2,8`` → [2, 8]"""
    return [int(part) for part in text.split(",") if part]


def enter_namespace() -> None:
    """Start over in a network namespace of our own, if this machine lets us: its loopback carries only our bytes."""
    if os.environ.get(INSIDE):
        up_loopback()
        return
    unshare = shutil.which("unshare")
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    if unshare and subprocess.run([unshare, *flags, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[INSIDE] = "1"
        os.execv(unshare, [unshare, *flags, sys.executable, *sys.argv])
    print("no network namespace of our own (unshare): bytes include whatever else uses the loopback", flush=True)


def up_loopback() -> None:
    """``ip link set lo up``, where there may be no ``ip``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS


if __name__ == "__main__":
    main()
