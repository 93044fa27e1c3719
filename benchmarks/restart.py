"""Restart after a rank's failure, 2 nodes x 2 ranks: from the failure until every rank is back in the function.

Two nodes are two agents on loopback; the same function, interleaved runs, medians. The peers:

- ``torchrun --max-restarts`` with its c10d rendezvous. Its restarts are counted per agent and one failure can cost
  several, so it is given three. Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 it does not come back at all.
- ``horovodrun`` in elastic mode. It bans the host of a rank that fails, so it is given a third one to go on with, under
  this machine's own address; with two hosts and ``--blacklist-cooldown-range 1 2`` it did not come back.

    python benchmarks/restart.py --runs 5
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).parent / "restart_project"
NODES, RANKS_PER_NODE = 2, 2
DEADLINE_SECONDS = 180.0


def free_port() -> int:
    """A TCP port that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Command = tuple[list[str], dict[str, str]]
"""Arguments, and further variables."""


def torchrun(node: int, port: int, directory: Path) -> Command:
    """One node's torchrun."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", str(port)]
    size = ["--nnodes", str(NODES), "--nproc-per-node", str(RANKS_PER_NODE), "--max-restarts", "3"]
    host = ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", "127.0.0.1"]
    module = [sys.executable, "-m", "torch.distributed.run"]
    variables = {"BENCH_DIRECTORY": str(directory), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [*module, *size, *rendezvous, *host, str(PROJECT / "restart_script.py")], variables


def horovodrun(node: int, port: int, directory: Path) -> Command | None:
    """The one horovodrun, which starts the ranks of every host; these are all this machine, so it needs no ssh."""
    if node > 0:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", port))  # sends nothing: only asks for this machine's own address
        spare = probe.getsockname()[0]
    discover = directory / "discover.sh"
    lines = "".join(f"echo {host}:{RANKS_PER_NODE}\n" for host in ("localhost", "127.0.0.1", spare))
    discover.write_text(f"#!/bin/sh\n{lines}")
    discover.chmod(0o755)
    size = str(NODES * RANKS_PER_NODE)
    options = ["--gloo", "-np", size, "--min-np", size, "--max-np", size, "--host-discovery-script", str(discover)]
    return ["horovodrun", *options, sys.executable, str(PROJECT / "restart_elastic.py")], {
        "BENCH_DIRECTORY": str(directory)
    }


def safedist(task: str) -> Callable[[int, int, Path], Command]:
    """One node's pod, as a PyTorchJob starts it."""

    def command(node: int, port: int, directory: Path) -> Command:
        from flyteidl.core import literals_pb2

        inputs = literals_pb2.LiteralMap()
        inputs.literals["directory"].scalar.primitive.string_value = str(directory)
        file = directory / f"inputs-{node}.pb"
        file.write_bytes(inputs.SerializeToString())
        arguments = ["--inputs", str(file), "--output-prefix", str(directory / "out")]
        arguments += ["--raw-output-data-prefix", str(directory / "raw")]
        arguments += ["--resolver", "flytekit.core.python_auto_container.default_task_resolver"]
        arguments += ["--", "task-module", "restart_script", "task-name", task]
        pod = {
            "SAFEDIST_BACKEND": "horovod" if task == "safe_horovod" else "torch",
            "SAFEDIST_NODES": str(NODES),
            "SAFEDIST_NPROC_PER_NODE": str(RANKS_PER_NODE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(NODES),
            "RANK": str(node),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "PET_NNODES": str(NODES),
            "PET_NODE_RANK": str(node),
            "PET_NPROC_PER_NODE": "auto",
            "FLYTE_INTERNAL_EXECUTION_ID": f"bench{port}",
        }
        return ["safedist-execute", "--", "pyflyte-execute", *arguments], pod

    return command


def run(variant: Callable[[int, int, Path], Command | None]) -> float:
    """Seconds from the failure to the last rank's second entry."""
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        directory, port = Path(name), free_port()
        nodes = []
        for node in range(NODES):
            started = variant(node, port, directory)
            if started is None:
                continue
            command, more = started
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, **more, "PATH": path, "PYTHONPATH": str(PROJECT)}
            with (directory / f"log-{node}").open("wb") as log:
                nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + DEADLINE_SECONDS
        for process in nodes:
            process.wait(max(1.0, deadline - time.monotonic()))
        entries = [float(mark.read_text()) for mark in directory.glob("again-*")]
        if len(entries) != NODES * RANKS_PER_NODE or any(process.returncode for process in nodes):
            for log_file in sorted(directory.glob("log-*")):
                print(log_file.read_text()[-3000:], file=sys.stderr)
            raise SystemExit("a run did not come back")
        return max(entries) - float((directory / "failed").read_text())


def main() -> None:
    """Run all, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    variants: dict[str, Callable[[int, int, Path], Command | None]] = {
        "torchrun": torchrun,
        "horovodrun": horovodrun,
        "SafeTorch": safedist("safe_torch"),
        "SafeHorovod": safedist("safe_horovod"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.runs):
        for name, variant in variants.items():
            seconds[name].append(run(variant))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        print(f"{name:12} {median:6.2f} s   median of {arguments.runs} ({spread})")
    for ours, peer in (("SafeTorch", "torchrun"), ("SafeHorovod", "horovodrun")):
        print(f"{ours} / {peer}: {medians[ours] / medians[peer]:.2f}")


if __name__ == "__main__":
    main()
