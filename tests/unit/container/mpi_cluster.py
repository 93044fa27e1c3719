"""A launcher pod of an MPIJob and its workers, on this machine.

The way into the workers is a stand-in, as there is no cluster here: a script with the interface of the operator's
``kubexec.sh`` (``kubectl exec``) or of ``ssh``, which runs the command on this machine, in an environment like the
worker's. Everything else is real: the launcher, the workers' first processes and the agents are processes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from flytekitplugins_safedist.container.mpi import plan

PACKAGE = Path(__file__).parents[3]
PROGRAM = "import sys; from flytekitplugins_safedist.tools.cli import mpi_launch; sys.exit(mpi_launch())"
LAUNCHER = [sys.executable, "-c", PROGRAM]
ADDRESS = "10.9.9.9"


class Cluster:
    """The job of some workers; ``out`` is a directory that all have.

    Attributes:
        workers: their first processes, by host.
    """

    def __init__(self, root: Path, hosts: list[str], *, over: str = "kubexec.sh") -> None:
        self.hosts, self.root, self.out = hosts, root, root / "out"
        self.out.mkdir()
        # The path of a socket has room for 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
        self.binaries = root / "bin"
        self.binaries.mkdir()
        self.moves_node_0_to(ADDRESS)
        script(self.binaries / "safedist-mpi-launch", f'exec {shlex.join(LAUNCHER)} "$@"')
        kept = f"PATH={self.binaries}:$PATH" if over == "kubexec.sh" else f"-i PATH={self.binaries}:/usr/bin:/bin"
        enter = f"exec env {kept} TMPDIR={self.tmp}/$host PYTHONPATH={PACKAGE}"
        self.reach = root / over
        script(self.reach, f'set -x; echo "$@" >> {root}/commands; host=$1; shift; {enter} /bin/sh -c "$*"')
        (root / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
        self.env = {
            **os.environ,
            "PATH": f"{self.binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(PACKAGE),
            "OMPI_MCA_plm_rsh_agent": str(self.reach),
            "OMPI_MCA_orte_default_hostfile": str(root / "hostfile"),
        }
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.launchers: list[subprocess.Popen[str]] = []

    def moves_node_0_to(self, address: str) -> None:
        """Let ``hostname -i`` in the workers say another address."""
        beside = self.root / "hostname"
        script(beside, f"echo 127.0.0.1 {address}")
        beside.replace(self.binaries / "hostname")

    def begin(self, *hosts: str, **environment: str) -> None:
        """Start the first process of these workers, or of all."""
        for host in hosts or self.hosts:
            tmp = self.tmp / host
            tmp.mkdir(exist_ok=True)
            env = {**self.env, "TMPDIR": str(tmp), "SECRET_OF_WORKER": "w", **environment}
            with (self.root / f"{host}.log").open("ab") as log:
                self.workers[host] = subprocess.Popen(
                    [*LAUNCHER, "--wait"], env=env, cwd=self.root, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def log(self, host: str) -> str:
        """What a worker and its agents have written."""
        return (self.root / f"{host}.log").read_text()

    def start(self, agent: str, *args: str) -> subprocess.Popen[str]:
        """Start a launcher of agents that run this code."""
        command = ["--nodes", str(len(self.hosts)), "--", sys.executable, "-c", agent, *args]
        launcher = subprocess.Popen(
            [*LAUNCHER, *command], env=self.env, cwd=self.root, stderr=subprocess.PIPE, text=True
        )
        self.launchers.append(launcher)
        return launcher

    def run(self, agent: str, *args: str) -> tuple[int, str]:
        """A launcher's exit status, and what it said."""
        launcher = self.start(agent, *args)
        _, err = launcher.communicate(timeout=40)
        return launcher.returncode, err

    def launch(self, agent: str) -> plan.Launch:
        """For a launcher in this very process."""
        return plan.plan(
            [sys.executable, "-c", agent],
            nodes=len(self.hosts),
            environment=self.env,
        )

    def order(self, rank: int, agent: str, node_0: str = "", found: float = 0.0) -> subprocess.Popen[str]:
        """What the launcher does for one worker."""
        order = self.launch(agent).agent(rank, node_0, found)
        return subprocess.Popen(order, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def told(self, rank: int) -> dict[str, dict[str, str]]:
        return json.loads((self.out / str(rank)).read_text())

    def end(self) -> None:
        """Kill everything that is left."""
        for process in (*self.workers.values(), *self.launchers):
            if process.poll() is None:
                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    one.send_signal(signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.tmp)


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def says(process: subprocess.Popen[str], text: str) -> None:
    """Wait for a line of a launcher's that holds *text*."""
    assert process.stderr is not None
    assert any(text in line for line in process.stderr), f"it ended without saying {text!r}"
