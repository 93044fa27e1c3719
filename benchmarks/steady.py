"""What safedist costs while ranks train: allreduce of 25 MB on four ranks, against plain ``horovodrun --gloo``.

Interleaved runs of the same function; medians and their ratio are printed.

    python benchmarks/steady.py --runs 7
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).parent / "steady_project"
RANKS = 4


def under_horovodrun() -> float:
    """Seconds per allreduce under ``horovodrun --gloo``."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "seconds"
        script = [sys.executable, str(PROJECT / "steady_measure.py"), str(result)]
        _run(["horovodrun", "--gloo", "-np", str(RANKS), "-H", f"localhost:{RANKS}", *script])
        return float(result.read_text())


def under_safedist() -> float:
    """Seconds per allreduce in a SafeHorovod task."""
    output = _run([sys.executable, "-c", "import steady_measure; print(steady_measure.measured())"])
    return float(output.splitlines()[-1])


def _run(command: list[str]) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Run both, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    variants: dict[str, Callable[[], float]] = {"horovodrun --gloo": under_horovodrun, "safedist": under_safedist}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(runs):
        for name, measure in variants.items():
            seconds[name].append(measure())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(f"{name:20} {25 / median:8.1f} MB/s   median of {runs} (step {low * 1e3:.1f} to {high * 1e3:.1f} ms)")
    print(f"throughput of safedist / horovodrun: {medians['horovodrun --gloo'] / medians['safedist']:.3f}")


if __name__ == "__main__":
    main()
