"""What Horovod's waiting costs where ranks outnumber the cores, and the latency of a small allreduce: with and without
the patch of the wait (``horovod_build/patches.py``).

The first is `make demo`'s command on two cores: wall time, and the processor time of the program and of the kernel, of
all its processes. The second needs two cores that nobody else uses. Runs are interleaved; medians are printed. Another
Horovod to compare with is a directory that holds one:

    git stash; python horovod_build/build.py --no-install --wheel-dir /tmp/wheel; git stash pop  # without the patch
    python -m pip install --no-deps --no-index --target /tmp/unpatched /tmp/wheel/horovod-*.whl
    python benchmarks/waiting.py --against /tmp/unpatched --runs 3
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORES = 2
PYFLYTE = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"


@dataclass(frozen=True)
class Run:
    """One run of the demo, in seconds."""

    wall: float
    program: float
    kernel: float


def demo(horovod: Path | None, epochs: int) -> Run:
    """`make demo`'s command with the Horovod of a directory, or with the installed one."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    example = str(ROOT / "examples" / "digits_horovod.py")
    _run(["-c", PYFLYTE, "run", example, "digits", "--epochs", str(epochs)], horovod)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(time.monotonic() - began, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)


def latency(horovod: Path | None) -> float:
    """Microseconds of a small allreduce between two ranks."""
    return float(_run([str(ROOT / "benchmarks" / "waiting_project" / "waiting_latency.py")], horovod).splitlines()[-1])


def _run(arguments: list[str], horovod: Path | None) -> str:
    paths = [str(path) for path in (horovod, os.environ.get("PYTHONPATH")) if path]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": scratch}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Run all, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a directory with another Horovod")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    variants: dict[str, Path | None] = {"this": None}
    if options.against is not None:
        variants["against"] = options.against.absolute()
    demos: dict[str, list[Run]] = {name: [] for name in variants}
    small: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.runs):
        for name, horovod in variants.items():
            demos[name].append(demo(horovod, options.epochs))
            small[name].append(latency(horovod))
            print(f"{name:8} {demos[name][-1]}, {small[name][-1]:.0f} us; load {os.getloadavg()[0]:.1f}", flush=True)
    for name in variants:
        medians = (
            f"{each.name} {statistics.median(getattr(r, each.name) for r in demos[name]):.1f} s" for each in fields(Run)
        )
        print(f"{name:8} {', '.join(medians)}; a small allreduce {statistics.median(small[name]):.0f} us")


if __name__ == "__main__":
    main()
