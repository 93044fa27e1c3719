"""The rendezvous under torch's own agents, unchanged: plain ``torchrun`` finds it through the entry point.

Ranks are tiny scripts that report to the test over a socket and do what they are told, so that every step is ordered.
"""

from __future__ import annotations

import configparser
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.rendezvous.client import ReservedPort

PATIENT = 120.0
ROOT = Path(__file__).parents[3]

RANK = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as told:
    told.sendall(json.dumps({"pid": os.getpid(), **{name: os.environ[name] for name in names}}).encode() + b"\\n")
    sys.exit(int(told.makefile().readline() or 77))
"""


class Rank:
    """A running rank: what it said about itself, and a way to end it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.env: dict[str, Any] = json.loads(connection.makefile().readline())

    def exit(self, code: int) -> None:
        self.connection.sendall(f"{code}\n".encode())


class Job:
    """Two nodes under torchrun."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENT)
        self.script = folder / "rank.py"
        self.script.write_text(RANK)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.pids: set[int] = set()
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed(folder)), str(ROOT)])}

    def launch(self, node: int, *, max_restarts: int = 0) -> subprocess.Popen[bytes]:
        conf = f"node_rank={node},timeout=100,heartbeat_interval=0.1,shutdown_grace=5"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=safedist", f"--rdzv-endpoint=localhost:{self.port}", "--rdzv-id=job"]
        command += [f"--rdzv-conf={conf}", f"--max-restarts={max_restarts}", "--monitor-interval=0.1"]
        command += [str(self.script), str(self.listener.getsockname()[1])]
        self.agents[node] = subprocess.Popen(command, env=self.env)
        return self.agents[node]

    def ranks(self) -> list[Rank]:
        """The two ranks of the next round, by rank."""
        found = sorted((self.rank() for _ in range(2)), key=lambda rank: int(rank.env["RANK"]))
        assert [rank.env["RANK"] for rank in found] == [rank.env["GROUP_RANK"] for rank in found] == ["0", "1"]
        assert len({rank.env["MASTER_PORT"] for rank in found}) == 1
        return found

    def rank(self) -> Rank:
        rank = Rank(self.listener.accept()[0])
        self.pids.add(rank.env["pid"])
        return rank

    def clean(self) -> None:
        pids = {agent.pid for agent in self.agents.values() if agent.poll() is None} | self.pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()
        self.listener.close()


def installed(folder: Path) -> Path:
    """Metadata as pip would install it, from setup.cfg: the tests also run where the package is only on the path."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    group = "torchrun.handlers"
    metadata = folder / "site" / "flytekitplugins_safedist-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flytekitplugins-safedist\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]{declared['options.entry_points'][group]}\n")
    return metadata.parent


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    reserved = ReservedPort()
    made = Job(tmp_path, reserved.port)
    yield made
    made.clean()
    reserved.close()


def test_a_failed_rank_restarts_the_ranks_of_both_nodes_on_a_fresh_port(job):
    agents = [job.launch(node, max_restarts=1) for node in (0, 1)]
    first = job.ranks()
    first[1].exit(1)
    second = job.ranks()
    assert second[0].env["MASTER_PORT"] != first[0].env["MASTER_PORT"]
    assert {rank.env["pid"] for rank in first} & {rank.env["pid"] for rank in second} == set()
    for rank in second:
        rank.exit(0)
    assert [agent.wait(PATIENT) for agent in agents] == [0, 0]


def test_a_killed_and_recreated_node_rejoins_and_costs_no_restart(job):
    survivor, lost = (job.launch(node, max_restarts=0) for node in (0, 1))
    first = job.ranks()
    lost.kill()
    lost.wait()
    os.kill(first[1].env["pid"], signal.SIGKILL)  # in a pod its ranks die with it
    back = job.launch(1)
    for rank in job.ranks():
        rank.exit(0)
    assert (survivor.wait(PATIENT), back.wait(PATIENT)) == (0, 0)


def test_a_node_that_gives_up_ends_the_other_nodes_too(job):
    agents = [job.launch(node, max_restarts=0) for node in (0, 1)]
    ranks = job.ranks()
    ranks[1].exit(3)
    # Rank 0 was never told to end: its agent must notice by itself that the group is closed.
    assert [agent.wait(PATIENT) for agent in agents] == [1, 1]
    with pytest.raises(ProcessLookupError):
        os.kill(ranks[0].env["pid"], 0)
