"""One directory that eight ranks of a node read: what comes from the store, and how long it takes.

    python benchmarks/inputs.py [--files 200] [--megabytes 100] [--rate 100] [--runs 1] [--dir DIR]

Against as many processes with flytekit alone, interleaved. The store is moto's S3 API behind a proxy that lets
``--rate`` megabytes through in a second, as a node's share of a network would. Seconds are from the first rank's
beginning to the last one's end; with ``--rate 0`` nothing is held back, and the store's own speed is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "inputs_project"))

from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.proxy import Proxy


class Network(Proxy):
    """Counts what goes through, and holds it to a rate."""

    def __init__(self, target: int, rate: float) -> None:
        self.bytes, self._rate, self._free = 0, rate, time.monotonic()
        self._turn = threading.Lock()
        super().__init__(target)

    def _seen(self, data: bytes) -> None:
        with self._turn:
            self.bytes += len(data)
            if self._rate:
                self._free = max(self._free, time.monotonic()) + len(data) / self._rate
                pause = self._free - time.monotonic()
        if self._rate and pause > 0:
            time.sleep(pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--dir", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        measure(options, Path(directory))


def measure(options: argparse.Namespace, root: Path) -> None:
    (root / "scratch").mkdir()
    store = S3(root)
    network = Network(int(store.endpoint.rpartition(":")[2]), options.rate * 1e6)
    os.environ.update(store.environment)
    os.environ.update(
        {"FLYTE_AWS_ENDPOINT": f"http://127.0.0.1:{network.port}", "INPUTS_SCRATCH": str(root / "scratch")}
    )
    import inputs_measure
    from flytekit.types.directory import FlyteDirectory

    try:
        content = os.urandom(options.megabytes * 1_000_000 // options.files)
        for number in range(options.files):
            store.put(f"data/{number:05}", content)
        uri = f"s3://{BUCKET}/data"
        ways: dict[str, Callable[[int], Any]] = {
            "flytekit alone": lambda run: inputs_measure.with_flytekit(uri, str(root / f"alone-{run}")),
            "safedist": lambda _run: json.loads(inputs_measure.with_safedist(folder=FlyteDirectory(uri))),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(options.runs):
            for name, way in ways.items():
                gets, passed = store.count("GET", "data/"), network.bytes
                times = way(run)
                gets, passed = store.count("GET", "data/") - gets, network.bytes - passed
                assert {size for _, _, size in times} == {len(content) * options.files}, times
                took = max(end for _, end, _ in times) - min(begin for begin, _, _ in times)
                seconds[name].append(took)
                print(f"{name}: {gets} GETs, {passed / 1e6:.1f} MB, {took:.2f} s", flush=True)
        ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(f"flytekit alone takes {ratio:.2f} times as long")
    finally:
        network.close()
        store.close()


if __name__ == "__main__":
    main()
