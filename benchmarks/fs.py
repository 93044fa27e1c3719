"""The file-system toolkit against the plain calls: interleaved, medians of ratios, on the disk under ``--dir``.

    python benchmarks/fs.py [--dir DIR] [--repeat 9]

1. ``ensure_dir`` against ``os.makedirs(exist_ok=True)``, nobody else about: new directories, and ones that are there.
   CPU time of process and kernel, which other work on the machine disturbs least.
2. ``once_per_node`` over a process group, 8 ranks: from the end of the work (its result is that time) to each waiter.
3. ``atomic_write`` of 100 MB against write + fsync; both remove what they made.
4. 512 waiters on one path: the system calls per second that reach the file system. Counted for one real waiter that
   walks the real backoff of a rank of 512 on a clock that jumps, with audit hooks; times 512. That is a simulation: 512
   processes on the cores of one machine would wait for the processor, and look less often than on 64 nodes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from flytekitplugins_safedist.errors import FsTimeoutError
from flytekitplugins_safedist.fs import (
    atomic_write,
    barrier,
    ensure_dir,
    once_per_node,
    wait_for,
)

RANKS, WAITERS, CALLS_REACH = 8, 512, 1500
MB = 1 << 20
_fork = multiprocessing.get_context("fork")


def report(name: str, value: float, reach: float, unit: str, note: str = "") -> bool:
    """Print one result beside its reach; return whether it is within."""
    right = value <= reach
    print(f"{'ok ' if right else 'NO '} {name}: {value:.3f} {unit} (at most {reach:g}){note}", flush=True)
    return right


def ratio(ours: Callable[[int], float], theirs: Callable[[int], float], repeat: int) -> tuple[float, float, float]:
    """The median of the ratios of neighbouring measurements, and the medians of both sides in seconds."""
    pairs = []
    for turn in range(repeat):  # who is first changes: neither side has the warmer disk
        if turn % 2:
            right = theirs(turn)
            pairs.append((ours(turn), right))
        else:
            left = ours(turn)
            pairs.append((left, theirs(turn)))
    medians = (statistics.median(column) for column in zip(*pairs, strict=True))
    return (statistics.median(left / right for left, right in pairs), *medians)


# --- 1. directories ------------------------------------------------------------------------------------------------
def directories(root: Path, repeat: int) -> bool:
    """CPU time (kernel's included) of 1,000 directories with each; the second pass finds them there."""
    seconds: dict[str, list[float]] = {}

    def made(side: str, make: Callable[[str], Any]) -> Callable[[int], float]:
        def measure(turn: int) -> float:
            base = root / f"{side}{turn}"
            base.mkdir()
            names = [f"{base}/{index}" for index in range(1000)]
            times = []
            for _ in range(2):
                began = time.process_time()
                for name in names:
                    make(name)
                times.append(time.process_time() - began)
            seconds.setdefault(side, []).append(times[1])
            return times[0]

        return measure

    def makedirs(name: str) -> None:
        os.makedirs(name, exist_ok=True)  # noqa: PTH103  (what ours is measured against)

    fresh, ours, theirs = ratio(made("ours", ensure_dir), made("theirs", makedirs), repeat)
    note = f"; {ours / 1e-3:.1f} against {theirs / 1e-3:.1f} microseconds of CPU each"
    right = report("ensure_dir / os.makedirs, new directories", fresh, 1.2, "x", note)
    there = statistics.median(left / right for left, right in zip(seconds["ours"], seconds["theirs"], strict=True))
    return report("ensure_dir / os.makedirs, directories that are there", there, 1.2, "x") and right


# --- 2. once_per_node ----------------------------------------------------------------------------------------------
def once(root: Path, repeat: int) -> bool:
    """Milliseconds from the end of the work to its result in each waiter."""
    with _fork.Pool(RANKS) as pool:
        runs = pool.starmap(_once_in_rank, [(rank, f"{root}/store", repeat) for rank in range(RANKS)], chunksize=1)
    waited = [delay * 1e3 for of_rank in runs for delay in of_rank if delay >= 0]
    late = sorted(waited)[int(len(waited) * 0.9)]
    note = f"; 9 of 10 within {late:.2f} ms; {len(waited)} waits of {RANKS} processes on {os.cpu_count()} cores"
    return report("once_per_node, added per waiter, median", statistics.median(waited), 5.0, "ms", note)


def _once_in_rank(rank: int, store: str, repeat: int) -> list[float]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)

    def work() -> list[float]:
        time.sleep(0.1)  # the work; the others come to wait meanwhile
        return [rank, time.monotonic()]

    delays = []
    for turn in range(repeat):
        barrier()
        worker, ended = once_per_node(f"load{turn}", work)
        delays.append(time.monotonic() - ended if worker != rank else -1.0)
        time.sleep(0.05)  # a node has a core for each rank: what one does next takes none from those who still wait
    return delays


# --- 3. atomic_write -----------------------------------------------------------------------------------------------
def files(root: Path, repeat: int) -> bool:
    """Time 100 MB in blocks of 1 MB, brought to stable storage."""
    block = os.urandom(MB)

    def ours(_: int) -> float:
        began = time.perf_counter()
        with atomic_write(root / "ours") as file:
            for _block in range(100):
                file.write(block)
        took = time.perf_counter() - began
        (root / "ours").unlink()
        return took

    def theirs(_: int) -> float:
        began = time.perf_counter()
        with (root / "theirs").open("wb") as file:
            for _block in range(100):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        (root / "theirs").unlink()
        return took

    found, mine, plain = ratio(ours, theirs, repeat)
    note = f"; {mine:.3f} against {plain:.3f} s"
    return report("atomic_write / write + fsync, 100 MB", found, 1.05, "x", note)


# --- 4. the crowd --------------------------------------------------------------------------------------------------
def crowd(root: Path) -> bool:
    """Calls of one waiter of 512 in five minutes that pass in a moment, times 512."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    os.environ.update(zip(names, map(str, (0, WAITERS, 0, 8, 0)), strict=True))  # as torchrun
    calls: Counter[int] = Counter()
    clock = [0.0]
    counting = [True]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        # To open the path is one call to the server; scandir of its parent opens, looks at, and lists it: three. What
        # opens by os.open (which names no mode) says so twice.
        if counting[0] and (event in ("os.scandir", "os.listdir") or (event == "open" and args[1] is None)):
            calls[int(clock[0])] += 1 if event == "open" else 3

    def jump(seconds: float) -> None:
        clock[0] += seconds

    def now() -> float:
        return clock[0]

    sys.addaudithook(audit)  # stays for the life of the process: hence the switch
    with mock.patch("time.monotonic", now), mock.patch("time.sleep", jump):
        try:
            wait_for(root / "never", kind="file", timeout=300)
        except FsTimeoutError:
            counting[0] = False
    steady = sum(count for second, count in calls.items() if second >= 10) / 290 * WAITERS
    peak = calls[0] * WAITERS
    note = f"; {sum(calls.values())} calls of one in 300 s; in the first second, while it backs off, {peak}"
    return report(f"{WAITERS} waiters, steady state", steady, CALLS_REACH, "calls/s", note)


def main() -> None:
    """Run all four; the exit status is 1 if one is out of reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=None, help="where to measure: a directory on a local disk")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        root = Path(place)
        print(f"on {os.uname().sysname} {os.uname().release}, Python {sys.version.split()[0]}")
        results = [
            directories(root, options.repeat),
            once(root, options.repeat),
            files(root, options.repeat),
            crowd(root),
        ]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
