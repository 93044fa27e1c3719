"""Restart after a rank's failure, 2 nodes x 2 ranks: from the failure until every rank is back in the function.

Against ``torchrun --max-restarts`` with its c10d rendezvous: two agents on loopback each, the same function,
interleaved runs, medians. torchrun's restarts are counted per agent and one failure can cost several, so it is given
three. (horovodrun's elastic mode has no like: it blacklists the host of a rank that fails, and on two hosts that is the
end of the job; ``--horovod`` shows the time of ours alone.)

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


def torchrun(node: int, port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    """One node's torchrun."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", str(port)]
    size = ["--nnodes", str(NODES), "--nproc-per-node", str(RANKS_PER_NODE), "--max-restarts", "3"]
    host = ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", "127.0.0.1"]
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, *size, *rendezvous, *host, str(PROJECT / "restart_script.py")], {"BENCH_DIRECTORY": str(directory)}


def safedist(task: str) -> Callable[[int, int, Path], tuple[list[str], dict[str, str]]]:
    """One node's pod, as a PyTorchJob starts it."""

    def command(node: int, port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
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


def run(variant: Callable[[int, int, Path], tuple[list[str], dict[str, str]]]) -> float:
    """Seconds from the failure to the last rank's second entry."""
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        directory, port = Path(name), free_port()
        nodes = []
        for node in range(NODES):
            command, more = variant(node, port, directory)
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, **more, "PATH": path, "PYTHONPATH": str(PROJECT)}
            with (directory / f"log-{node}").open("wb") as log:
                nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + DEADLINE_SECONDS
        for process in nodes:
            process.wait(max(1.0, deadline - time.monotonic()))
        entries = [float(mark.read_text()) for mark in directory.glob("again-*")]
        if len(entries) != NODES * RANKS_PER_NODE or any(process.returncode for process in nodes):
            for node in range(NODES):
                print((directory / f"log-{node}").read_text()[-3000:], file=sys.stderr)
            raise SystemExit("a run did not come back")
        return max(entries) - float((directory / "failed").read_text())


def main() -> None:
    """Run all, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--horovod", action="store_true")
    arguments = parser.parse_args()
    variants = {"torchrun": torchrun, "SafeTorch": safedist("safe_torch")}
    if arguments.horovod:
        variants["SafeHorovod"] = safedist("safe_horovod")
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.runs):
        for name, variant in variants.items():
            seconds[name].append(run(variant))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        print(f"{name:12} {median:6.2f} s   median of {arguments.runs} ({spread})")
    print(f"SafeTorch / torchrun: {medians['SafeTorch'] / medians['torchrun']:.2f}")


if __name__ == "__main__":
    main()
