"""Checkpoints beside what else there is: how long training stands still, and how long saving and resuming take.

    python benchmarks/checkpoint.py --ranks 4 --megabytes 256 --saves 5
    python benchmarks/checkpoint.py --steps          # what ckpt.save costs in a task when no save is due

Every way saves the same replicated state from the same ranks (gloo, CPU) to one directory, in turns:

    torch.save        rank 0, synchronously, no fsync, no digest, not atomic
    dcp.save          torch.distributed.checkpoint, all ranks, synchronously
    dcp.async_save    the same by a thread; "stands still" is until it returns
    stock checkpoint  flytekit's SyncCheckpoint: rank 0, torch.save to memory, then write()
    full, sharded     flytekitplugins_safedist.checkpoint, with digests, fsync and manifest, by a thread

"Stands still" is the longest of the ranks, from the call until training may go on; "durable" is until the save can be
resumed from (dcp and torch.save do not ask the disk, but for dcp's files). Medians. Memory is the growth of rank 0's
high-water mark over the run, over the state's size; it is of one way at a time, each in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent / "checkpoint_project"
WAYS = ("torch.save", "dcp.save", "dcp.async_save", "stock checkpoint", "full", "sharded")


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256, help="of the state")
    parser.add_argument("--saves", type=int, default=5, help="of each way")
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", action="store_true", help="measure ckpt.save without a save, and nothing else")
    parser.add_argument("--rank-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _rank(options)
        return
    if options.steps:
        _steps()
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.saves):  # in turns: what else the machine does meets all alike
        for way in WAYS:
            found[way].append(_run(way, options))
    print(
        f"{options.ranks} ranks, {options.megabytes} MB, {options.saves} turns of two saves, the second counts; medians"
    )
    print(f"{'':18}{'stands still s':>15}{'durable s':>11}{'resume s':>10}{'bytes/state':>13}{'memory/state':>14}")
    for way, runs in found.items():
        row = [statistics.median(run[key] for run in runs) for key in ("still", "durable", "resume", "bytes", "memory")]
        print(f"{way:18}{row[0]:15.3f}{row[1]:11.2f}{row[2]:10.2f}{row[3]:13.2f}{row[4]:14.2f}")


def _steps() -> None:
    for every in ("steps", "time"):
        code = f"import step_measure; print(step_measure.measured(every={every!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        )
        print(f"every by {every}: {float(done.stdout.splitlines()[-1]) * 1e6:.2f} us per step")


def _run(way: str, options: argparse.Namespace) -> dict[str, float]:
    place = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.where))
    try:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"),
                *(__file__, "--rank-of", way, "--megabytes", str(options.megabytes), "--where", str(place)),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        reports = [json.loads(path.read_text()) for path in sorted(place.glob("report-*.json"))]
        return {
            "still": max(report["still"] for report in reports),
            "durable": max(report["durable"] for report in reports),
            "resume": max(report["resume"] for report in reports),
            "bytes": reports[0]["bytes"],
            "memory": reports[0]["memory"],
        }
    finally:
        shutil.rmtree(place)


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensors = max(1, options.megabytes // 16)
    state = {f"layer.{index}": torch.full((4 * 1024 * 1024,), float(index)) for index in range(tensors)}
    size = sum(one.numel() * 4 for one in state.values())
    save, resume = _way(options.rank_of, options.where / "saved", state)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    timings: dict[str, float] = {}
    for step in range(2):  # the first one makes the buffers, and imports
        dist.barrier()
        began = time.perf_counter()
        finish = save(step)
        timings["still"] = time.perf_counter() - began
        finish()
        dist.barrier()
        timings["durable"] = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory
    dist.barrier()
    began = time.perf_counter()
    resume()
    dist.barrier()
    timings["resume"] = time.perf_counter() - began
    written = sum(path.stat().st_size for path in (options.where / "saved").rglob("*") if path.is_file())
    report = {**timings, "bytes": written / 2 / size, "memory": grown / size}
    (options.where / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


Save = Callable[[int], Callable[[], object]]


def _way(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    """What saves as a step and returns what waits for it; and what resumes the last one."""
    place.mkdir(exist_ok=True)
    if way in ("full", "sharded"):
        return _ours(way, place, state)
    if way.startswith("dcp"):
        return _dcp(way, place, state)
    return _by_rank_0(way, place, state)


def _ours(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    import torch

    from flytekitplugins_safedist.checkpoint import Checkpoints

    held: dict[str, Any] = state
    if way == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        held = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    mine = {"model": held}
    ckpt = Checkpoints(place, every=None, keep=None)
    ckpt.restore(mine)

    def save(step: int) -> Callable[[], object]:
        ckpt.save(step, mine, force=True)
        return ckpt.wait

    return save, lambda: Checkpoints(place, every=None).restore(mine)


def _dcp(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    group = dist.new_group(backend="gloo")

    def save(step: int) -> Callable[[], object]:
        at = place / str(step)
        if way == "dcp.save":
            dcp.save(state, checkpoint_id=at, process_group=group)
            return lambda: None
        future: Any = dcp.async_save(state, checkpoint_id=at, process_group=group)
        finish: Callable[[], object] = future.result
        return finish

    return save, lambda: dcp.load(state, checkpoint_id=place / "1", process_group=group)


def _by_rank_0(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    import io

    import torch
    import torch.distributed as dist
    from flytekit.core.checkpointer import SyncCheckpoint

    def save(step: int) -> Callable[[], object]:
        if dist.get_rank() == 0 and way == "torch.save":
            torch.save(state, place / str(step))
        elif dist.get_rank() == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            SyncCheckpoint(checkpoint_dest=str(place / str(step))).write(buffer.getvalue())
        return lambda: None

    def resume() -> None:
        path = place / "1"
        torch.load(path if path.is_file() else path / SyncCheckpoint.TMP_DST_PATH, weights_only=True)

    return save, resume


if __name__ == "__main__":
    main()
