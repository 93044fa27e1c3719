"""Restart after a rank's failure, 2 nodes x 2 ranks: from the failure until every rank is back in the function, and
until every rank has made the first step of an optimizer there; and the CPU seconds that the new ranks took until then.

Two nodes are two agents on loopback; the same function, interleaved runs, medians. The peers:

- ``torchrun --max-restarts`` with its c10d rendezvous. Its restarts are counted per agent and one failure can cost
  several, so it is given three. Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 it does not come back at all.
- ``horovodrun`` in elastic mode. It bans the host of a rank that fails, so it is given a third one to go on with, under
  this machine's own address; with two hosts and ``--blacklist-cooldown-range 1 2`` it did not come back.

With ``--lose-node-0``, node 0's agent is killed when all ranks are in the function, and started again at once under its
old address: from that start until every rank is back in the function. torchrun's other agent ends then, whatever
``--max-restarts`` says, so there is nothing to measure: what became of it is printed. horovodrun has no such node.

    python benchmarks/restart.py --runs 5
    python benchmarks/restart.py --lose-node-0 --runs 5
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.registered import registered_as

PROJECT = Path(__file__).parent / "restart_project"
sys.path.insert(1, str(PROJECT))
NODES, RANKS_PER_NODE = 2, 2
DEADLINE_SECONDS = 180.0
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphans of ours become our children."""


def free_port() -> int:
    """A TCP port that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Command = tuple[list[str], dict[str, str]]
"""Arguments, and further variables."""

Variant = Callable[[int, int, Path], "Command | None"]
"""The command of a node, from its number, a free port, and the run's directory."""


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
            **registered_as(getattr(importlib.import_module("restart_script"), task).task_config),
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


@dataclass(frozen=True)
class Back:
    """Seconds from the failure to the last rank's second entry, and to its first step then; the ranks' CPU seconds."""

    entry: float
    step: float
    cpu: float


def run(variant: Variant) -> Back:
    """One run, to its end."""
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
        failed = float((directory / "failed").read_text())
        steps = [json.loads(mark.read_text()) for mark in directory.glob("step-*")]
        return Back(max(entries) - failed, max(at for at, _ in steps) - failed, sum(cpu for _, cpu in steps))


def start(variant: Variant, node: int, port: int, directory: Path, **more: str) -> subprocess.Popen[bytes]:
    """One node."""
    started = variant(node, port, directory)
    assert started is not None
    command, variables = started
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **variables, **more, "PATH": path, "PYTHONPATH": str(PROJECT)}
    with (directory / f"log-{node}").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def kill(process: subprocess.Popen[bytes]) -> None:
    """A node with all that it started: torchrun's ranks have sessions of their own, and outlive their agent."""
    with suppress(psutil.NoSuchProcess):
        end(psutil.Process(process.pid).children(recursive=True))
    process.kill()
    process.wait()


def end(processes: list[psutil.Process]) -> None:
    """End them, whatever has become of them meanwhile."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(processes)


def run_losing_node_0(variant: Variant, patience: float) -> tuple[float, float | str]:
    """Seconds from the first start to all ranks' entry; and from the start of node 0's replacement to the last rank's
    second entry, or why there is no such thing."""
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        directory, port, ranks = Path(name), free_port(), NODES * RANKS_PER_NODE
        begun = time.time()
        nodes = [start(variant, node, port, directory, BENCH_LOSE_NODE_0="1") for node in range(NODES)]
        try:
            wait_until(lambda: len(list(directory.glob("there-*"))) == ranks, DEADLINE_SECONDS)
            first = max(float(mark.read_text()) for mark in directory.glob("first-*")) - begun
            kill(nodes[0])
            (directory / "failed").touch()
            replaced = time.time()
            nodes[0] = start(variant, 0, port, directory, BENCH_LOSE_NODE_0="1")
            back = wait_until(lambda: len(list(directory.glob("again-*"))) == ranks, patience)
            if not back:
                left = nodes[1].poll()
                return first, "did not come back: the other agent " + (
                    "waits" if left is None else f"had ended with {left}"
                )
            wait_until(lambda: all(node.poll() == 0 for node in nodes), DEADLINE_SECONDS)
            return first, max(float(mark.read_text()) for mark in directory.glob("again-*")) - replaced
        finally:
            for node in nodes:
                kill(node)
            end(psutil.Process().children(recursive=True))  # those whose agent had ended are ours now


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def lose_node_0(runs: int, patience: float) -> None:
    """Run all, interleaved, and print medians."""
    variants: dict[str, Variant] = {
        "torchrun": torchrun,
        "SafeTorch": safedist("safe_torch"),
        "SafeHorovod": safedist("safe_horovod"),
    }
    found: dict[str, list[float | str]] = {name: [] for name in variants}
    firsts: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs):
        for name, variant in variants.items():
            first, again = run_losing_node_0(variant, patience)
            firsts[name].append(first)
            found[name].append(again)
    for name, results in found.items():
        seconds = [one for one in results if isinstance(one, float)]
        for why in sorted({one for one in results if isinstance(one, str)}):
            print(f"{name:12} {results.count(why)} of {runs}: {why}, {patience:g} s after the replacement's start")
        if seconds:
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(f"{name:12} {statistics.median(seconds):6.2f} s   median of {len(seconds)} ({spread})")
        print(
            f"{name:12} {statistics.median(firsts[name]):6.2f} s   for comparison: from the first start of both nodes"
        )


def main() -> None:
    """Run all, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--lose-node-0", action="store_true")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a lost node 0 is given to come back")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if arguments.lose_node_0:
        lose_node_0(arguments.runs, arguments.patience)
        return
    variants: dict[str, Variant] = {
        "torchrun": torchrun,
        "horovodrun": horovodrun,
        "SafeTorch": safedist("safe_torch"),
        "SafeHorovod": safedist("safe_horovod"),
    }
    found: dict[str, list[Back]] = {name: [] for name in variants}
    for _ in range(arguments.runs):
        for name, variant in variants.items():
            found[name].append(run(variant))
    report(found)


def report(found: dict[str, list[Back]]) -> None:
    """Print the medians."""
    pairs = (("SafeTorch", "torchrun"), ("SafeHorovod", "horovodrun"))
    for what in ("entry", "step", "cpu"):
        values = {name: [getattr(one, what) for one in each] for name, each in found.items()}
        medians = {name: statistics.median(each) for name, each in values.items()}
        print({"entry": "until the last entry", "step": "until the first step", "cpu": "CPU of the ranks"}[what])
        for name, each in values.items():
            print(f"  {name:12} {medians[name]:6.2f} s   median of {len(each)} ({min(each):.2f} to {max(each):.2f})")
        print("  " + ", ".join(f"{ours} / {peer}: {medians[ours] / medians[peer]:.2f}" for ours, peer in pairs))


if __name__ == "__main__":
    main()
