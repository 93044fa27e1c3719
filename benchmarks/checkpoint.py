"""Checkpoints beside what else there is: how long training stands still, and how long saving and resuming take.

    python benchmarks/checkpoint.py --ranks 4 --megabytes 256 --saves 5
    python benchmarks/checkpoint.py --steps          # what ckpt.save costs in a task when no save is due

Every way saves the same state from the same ranks (gloo, CPU) to one directory, in turns; it is replicated, or, where
the way is called sharded, each rank holds a part of it:

    torch.save        rank 0, synchronously, no fsync, no digest, not atomic
    dcp.save          torch.distributed.checkpoint, all ranks, synchronously
    dcp.async_save    the same by a thread, from a stager that is used again; "stands still" is until it returns
    stock checkpoint  flytekit's SyncCheckpoint: rank 0, torch.save to memory, then write()
    safedist          flytekitplugins_safedist.checkpoint, with digests, fsync and manifest, by a thread

"Stands still" is the longest of the ranks, from the call until training may go on; "durable" is until the save can be
resumed from (dcp and torch.save do not ask the disk, but for dcp's files). "Steps" is how much longer a step of a
training (matrix products) takes while a save is being written, in the rank that it slows most. Medians. Memory is the
growth of rank 0's high-water mark over the run, over the state's size; it is of one way at a time, each in processes of
its own.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent / "checkpoint_project"
REPLICATED = ("torch.save", "stock checkpoint", "dcp.save", "dcp.async_save", "safedist")
WAYS = (*REPLICATED, *(f"{way} sharded" for way in ("dcp.save", "dcp.async_save", "safedist")))
COLUMNS = {"still": "stands still s", "durable": "durable s", "resume": "resume s", "steps": "steps"}
OF_RANK_0 = {"bytes": "bytes/state", "memory": "memory/state"}
SAVES = 3
"""Of a run: one that makes the buffers and imports, one that is timed, one during which training goes on."""


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256, help="of the state")
    parser.add_argument("--saves", type=int, default=5, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
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
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for _ in range(options.saves):  # in turns: what else the machine does meets all alike
        for way in options.ways:
            found[way].append(_run(way, options))
    columns = {**COLUMNS, **OF_RANK_0}
    print(f"{options.ranks} ranks, {options.megabytes} MB, {options.saves} turns; medians")
    print(f"{'':24}" + "".join(f"{title:>16}" for title in columns.values()))
    for way, runs in found.items():
        print(f"{way:24}" + "".join(f"{statistics.median(run[key] for run in runs):16.3f}" for key in columns))


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
        slowest = {key: max(report[key] for report in reports) for key in COLUMNS}
        return slowest | {key: reports[0][key] for key in OF_RANK_0}
    finally:
        shutil.rmtree(place)


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint  # in all ranks and ways, though of some ranks it is needed in the resume only

    dist.init_process_group("gloo")
    tensors = max(1, options.megabytes // 16)
    whole = {f"layer.{index}": torch.full((4 * 1024 * 1024,), float(index)) for index in range(tensors)}
    size = sum(one.numel() * 4 for one in whole.values())
    way = options.rank_of.removesuffix(" sharded")
    state = whole if way == options.rank_of else _sharded(whole)
    save, resume = _way(way, options.where / "saved", state)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    timings: dict[str, float] = {}
    for step in range(SAVES - 1):
        dist.barrier()
        began = time.perf_counter()
        finish = save(step)
        timings["still"] = time.perf_counter() - began
        finish()
        dist.barrier()
        timings["durable"] = time.perf_counter() - began
    timings["steps"] = _slowed(lambda: save(SAVES - 1))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory
    dist.barrier()
    began = time.perf_counter()
    resume()
    dist.barrier()
    timings["resume"] = time.perf_counter() - began
    written = sum(path.stat().st_size for path in (options.where / "saved").rglob("*") if path.is_file())
    report = {**timings, "bytes": written / SAVES / size, "memory": grown / size}
    (options.where / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def _sharded(whole: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


def _slowed(save: Callable[[], Callable[[], object]]) -> float:
    """How many times as long as before a step takes while a save is being written; 1 where none is any more."""
    import torch
    import torch.distributed as dist

    a = torch.rand(384, 384)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(8):
            a @ a
        return time.perf_counter() - began

    dist.barrier()
    before = [step() for _ in range(50)]
    dist.barrier()
    finish, is_over, during = save(), threading.Event(), list[float]()

    def wait() -> None:
        finish()
        is_over.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not is_over.is_set():
        during.append(step())
    waiting.join()
    return statistics.fmean(during) / statistics.fmean(before) if during else 1.0


Save = Callable[[int], Callable[[], object]]


def _way(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    """What saves as a step and returns what waits for it; and what resumes the last one."""
    place.mkdir(exist_ok=True)
    if way == "safedist":
        return _ours(place, state)
    if way.startswith("dcp"):
        return _dcp(way, place, state)
    return _by_rank_0(way, place, state)


def _ours(place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    from flytekitplugins_safedist.checkpoint import Checkpoints

    mine = {"model": state}
    ckpt = Checkpoints(place, every=None, keep=None)
    ckpt.restore(mine)

    def save(step: int) -> Callable[[], object]:
        ckpt.save(step, mine, force=True)
        return ckpt.wait

    return save, lambda: ckpt.restore(mine)


def _dcp(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[], object]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    group = dist.new_group(backend="gloo")
    stager = DefaultStager(StagingOptions(*[False] * 4))  # what async_save makes for itself, but kept

    def save(step: int) -> Callable[[], object]:
        at = place / str(step)
        if way == "dcp.save":
            dcp.save(state, checkpoint_id=at, process_group=group)
            return lambda: None
        future: Any = dcp.async_save(state, checkpoint_id=at, process_group=group, async_stager=stager)
        finish: Callable[[], object] = future.result
        return finish

    return save, lambda: dcp.load(state, checkpoint_id=place / str(SAVES - 1), process_group=group)


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
        path = place / str(SAVES - 1)
        torch.load(path if path.is_file() else path / SyncCheckpoint.TMP_DST_PATH, weights_only=True)

    return save, resume


if __name__ == "__main__":
    main()
