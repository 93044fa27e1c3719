"""One node's checks before the first rank of its job starts: a short-lived process, which has a rank's variables as the
only one of its node, and leaves a :class:`.judge.NodeReport`.

The nodes' probes meet in the round's key-value corner, so that each knows where the others listen, and none ends before
all have tried.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import envvars
from ..meeting import Meeting, of_rank, own_address
from ..topology.devices import device_files
from .judge import DISK, NodeReport, Subject, Trouble
from .machine import Finding, check_directory, check_network, check_shared_memory, check_torch, torch_facts

_CONNECT_SECONDS, _DIALLED_AT_ONCE = 15.0, 64
_DISK_MIB, _REDUCED_MIB = 64, 64
_TIMES = 4
_FIRST_ASKED, _THEN_TOLD = 0.4, 0.6  # parts of the time: node 0 asks where all listen, and the others ask it
_KEY = "safedist/preflight"
_ANY_PORT = 9  # nothing is sent there


def main() -> None:
    """A process of its own, with a directory to examine, the file to report to, and until when, of the monotonic clock,
    to wait for the others. Ends when its standard input does: with the agent."""
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
    gc.disable()  # looks through torch's modules, which are there to stay: an eighth of its import
    directory, file, until = sys.argv[1:]
    for report in examined(Path(directory), float(until), os.environ):
        part = Path(f"{file}.part")
        part.write_text(json.dumps(report.to_dict()))
        part.replace(file)
    os._exit(0)  # a process group whose peers have gone may not end by itself


def examined(directory: Path, until: float, env: Mapping[str, str]) -> Iterator[NodeReport]:
    """What is found of the other nodes, early: whoever then never ends has told that. Then all checks of this node."""
    meeting, node, nodes = of_rank(env), int(env[envvars.RANK]), int(env[envvars.WORLD_SIZE])
    peers = Peers(meeting, node, nodes, until, env[envvars.MASTER_ADDR]) if meeting is not None and nodes > 1 else None
    report = NodeReport()
    if peers is not None:
        report = NodeReport(unreached=peers.unreached, ahead=peers.ahead, slack=peers.slack)
        yield report
    facts = _or_why(torch_facts)
    troubles, measured = list(_troubles(directory, facts, env)), {DISK: {"": _disk(directory)}}

    def can(subject: Subject, what: str, remedy: str, measure: Callable[[], dict[str, dict[str, float]]]) -> bool:
        result = _or_why(measure)
        if isinstance(result, str):
            troubles.append(Trouble(subject, is_broken=True, text=f"{what} fails: {result}; {remedy}"))
        else:
            measured.update(result)
        return not isinstance(result, str)

    remedy = "see nvidia-smi on the node, and its kernel's log for Xid errors"
    computes = isinstance(facts, dict) and can("Gpu", "a matrix product", remedy, lambda: _computing(facts["gpus"]))
    if peers is not None and peers.all_can(can=computes):
        remedy = "see whether ranks may use this network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
        on_gpu = facts["gpus"] > 0
        can("Network", "an all-reduce between nodes", remedy, lambda: _reducing(peers, on_gpu=on_gpu))
        peers.together("measured")  # none is to wait for one that has gone
    yield replace(report, troubles=tuple(troubles), measured=measured)


def _or_why(ask: Callable[[], Any]) -> Any:
    """What it says; or why it says nothing, in one line."""
    try:
        return ask()
    except Exception as error:  # torch's, NCCL's, a broken build's
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _troubles(scratch: Path, facts: dict[str, Any] | str, env: Mapping[str, str]) -> Iterator[Trouble]:
    checks: dict[Subject, Iterator[Finding]] = {
        "Gpu": check_torch(facts, env, device_files()),
        "SharedMemory": check_shared_memory(),
        "Disk": check_directory(scratch),
        "Dns": check_network(),
    }
    for subject, findings in checks.items():
        for each in findings:
            if each.status != "ok":
                yield Trouble(subject, each.status == "broken", f"{each.check}: {each.what} ({each.remedy})")


# --- measures --------------------------------------------------------------------------------------------------------
def _disk(directory: Path) -> float:
    """Megabytes a second, through to the disk; 0 where nothing can be written."""
    block = os.urandom(1 << 20)

    def write() -> None:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(_DISK_MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    try:
        return _DISK_MIB * 2**20 / 1e6 / _timed(write)
    except OSError:
        return 0.0


def _computing(gpus: int) -> dict[str, dict[str, float]]:
    import torch

    def speed(device: str, size: int, kind: Any) -> float:
        x = torch.ones(size, size, device=device, dtype=kind)
        seconds = _timed(lambda: (x @ x, gpus and torch.cuda.synchronize(device)))
        return float(2 * size**3 / 1e12 / seconds)

    if not gpus:
        return {"matrix product, TFLOP/s:": {"": speed("cpu", 1024, torch.float32)}}
    devices = {f"GPU {index}": f"cuda:{index}" for index in range(gpus)}
    free = {name: torch.cuda.mem_get_info(device)[0] / 2**30 for name, device in devices.items()}
    speeds = {name: speed(device, 8192, torch.float16) for name, device in devices.items()}
    return {"free GPU memory, GiB:": free, "matrix product, TFLOP/s:": speeds}


def _timed(work: Callable[[], object]) -> float:
    """Seconds for one, at best: the first one warms up, and what else a machine does is not what is measured."""
    ends = [time.perf_counter()]
    for _ in range(_TIMES):
        work()
        ends.append(time.perf_counter())
    return min(end - began for began, end in pairwise(ends[1:]))


def _reducing(peers: Peers, *, on_gpu: bool) -> dict[str, dict[str, float]]:
    """Gigabytes a second of an all-reduce with the better of two neighbours in a ring: whoever is slow is so with both,
    and its neighbours are not."""
    import torch
    import torch.distributed as dist

    if peers.node == 0:
        store = dist.TCPStore(peers.address, 0, is_master=True, wait_for_workers=False)
        peers.meeting.set(f"{_KEY}/store", f"{peers.address} {store.port}".encode())
    else:
        host, port = (peers.meeting.wait(f"{_KEY}/store", peers.left()) or b"").decode().split()
        store = dist.TCPStore(host, int(port), is_master=False, timeout=peers.limit())
    x = torch.ones(_REDUCED_MIB << 18, device="cuda:0" if on_gpu else "cpu")
    best = 0.0
    for pair in peers.pairs():
        # No group of all, and groups within it: how torch names those that overlap differs from rank to rank.
        own = dist.PrefixStore("-".join(map(str, pair)), store)
        place = {"store": own, "rank": pair.index(peers.node), "world_size": 2, "timeout": peers.limit()}
        dist.init_process_group("nccl" if on_gpu else "gloo", **place)
        seconds = _timed(lambda: (dist.all_reduce(x), on_gpu and torch.cuda.synchronize()))
        dist.destroy_process_group()
        best = max(best, _REDUCED_MIB * 2**20 / 1e9 / seconds)
    return {"all-reduce with a neighbour, GB/s:": {"": best}}


# --- the other nodes -------------------------------------------------------------------------------------------------
class Peers:
    """The probes of all nodes, as this one finds them: listens, and connects to each.

    Args:
        meeting: the round's corner.
        node, nodes: which of how many.
        until: when to wait for the others, of the monotonic clock.
        leader: the host of node 0, whom this one reaches by the address that others reach it by.
    """

    def __init__(self, meeting: Meeting, node: int, nodes: int, until: float, leader: str) -> None:
        self.node, self.nodes, self._until, self.meeting = node, nodes, until, meeting
        self.address = own_address(leader, _ANY_PORT)
        self.unreached: dict[int, str] = {}
        self.ahead = self.slack = 0.0
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=nodes)
        threading.Thread(target=self._answer, daemon=True).start()
        meeting.set(f"{_KEY}/at/{node}", f"{self.address} {self._listener.getsockname()[1]}".encode())
        places = self._places()
        with ThreadPoolExecutor(_DIALLED_AT_ONCE) as pool:
            list(pool.map(self._dial, places.keys(), places.values()))

    def left(self) -> float:
        """Seconds to wait for others."""
        return max(0.0, self._until - time.monotonic())

    def limit(self) -> timedelta:
        """For torch, a little more."""
        return timedelta(seconds=self.left() + 1)

    def all_can(self, *, can: bool) -> bool:
        """Whether every node has reached all others and can measure with them, as this one says of itself: nobody waits
        for one that will not come."""
        self.meeting.add(f"{_KEY}/cannot", int(not can or bool(self.unreached)))
        return self.together("tried") and self.meeting.add(f"{_KEY}/cannot", 0) == 0

    def pairs(self) -> list[tuple[int, int]]:
        """This node's neighbours in a ring, with itself, in an order in which no two wait for each other."""
        ring = [(one, (one + 1) % self.nodes) for one in range(self.nodes if self.nodes > 2 else 1)]
        first, second, last = ring[0 : self.nodes - 1 : 2], ring[1::2], ring[self.nodes - 1 :: 2]
        ordered = dict.fromkeys([*first, *second, *last])
        return [(min(pair), max(pair)) for pair in ordered if self.node in pair]

    def _places(self) -> dict[int, str]:
        """Where each other probe listens, "" where it has not begun. Node 0 asks for all, and the others ask node 0:
        each asking each is a million calls at 1000 nodes."""
        key, whole = f"{_KEY}/at", self.left()
        if self.node == 0:
            kept = (1 - _FIRST_ASKED) * whole  # for what comes after
            answers = (self.meeting.wait(f"{key}/{peer}", max(0.0, self.left() - kept)) for peer in range(self.nodes))
            self.meeting.set(key, json.dumps([(where or b"").decode() for where in answers]).encode())
        answer = self.meeting.wait(key, _THEN_TOLD * whole)
        places = json.loads(answer) if answer else [""]  # then only node 0 is known to be missing
        return {peer: where for peer, where in enumerate(places) if peer != self.node}

    def together(self, what: str) -> bool:
        """Whether all have come this far, in time."""
        if self.meeting.add(f"{_KEY}/{what}", 1) == self.nodes:
            self.meeting.set(f"{_KEY}/all-{what}", b"")
        return self.meeting.wait(f"{_KEY}/all-{what}", self.left()) is not None and self.left() > 0

    def _answer(self) -> None:
        """With this node's clock."""
        while True:
            with suppress(OSError), self._listener.accept()[0] as sock:
                sock.sendall(repr(time.time()).encode())

    def _dial(self, peer: int, where: str) -> None:
        host, _, port = where.partition(" ")
        seconds = min(_CONNECT_SECONDS, self.left())
        if not where or not seconds:  # hundreds that do not answer: those that were dialled name the partition
            self.unreached[peer] = "was not dialled: no time was left" if where else "its checks have not begun"
            return
        began = time.time()
        try:
            with socket.create_connection((host, int(port)), timeout=seconds) as sock:
                theirs = float(sock.recv(64, socket.MSG_WAITALL))
        except (OSError, ValueError) as error:
            self.unreached[peer] = f"{host}:{port}: {error}"
            return
        if peer == 0:
            ended = time.time()
            self.ahead, self.slack = (began + ended) / 2 - theirs, (ended - began) / 2
