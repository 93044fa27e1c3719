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
resumed from (dcp and torch.save do not ask the disk, but for dcp's files).
"Steps" is how many times as long a step of a training (matrix products) takes while a save is being written. Medians of
the turns, after one that does not count, in which buffers are made and modules imported.
"""

from __future__ import annotations

import argparse
import json
import os
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
COLUMNS = {
    "still": "stands still s",
    "durable": "durable s",
    "resume": "resume s",
    "steps": "steps x",
    "bytes": "bytes",
}


Save = Callable[[int], Callable[[], object]]


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256, help="of the state")
    parser.add_argument("--saves", type=int, default=5, help="of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", action="store_true", help="measure ckpt.save without a save, and nothing else")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options)
        return
    if options.steps:
        _steps()
        return
    found = _run(options)
    print(f"{options.ranks} ranks, {options.megabytes} MB, {options.saves} turns; medians")
    print(f"{'':24}" + "".join(f"{title:>16}" for title in COLUMNS.values()))
    for way, turns in found.items():
        print(f"{way:24}" + "".join(f"{statistics.median(turn[key] for turn in turns):16.3f}" for key in COLUMNS))


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


def _run(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """By way, what each turn took: the longest of all ranks."""
    place = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.where))
    try:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"),
                *(__file__, "--rank", "--megabytes", str(options.megabytes), "--saves", str(options.saves)),
                *("--where", str(place), "--ways", *options.ways),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        ranks = [json.loads(path.read_text()) for path in place.glob("report-*.json")]
        return {
            way: [
                {key: max(rank[way][turn][key] for rank in ranks) for key in COLUMNS} for turn in range(options.saves)
            ]
            for way in options.ways
        }
    finally:
        shutil.rmtree(place)


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensors = max(1, options.megabytes // 16)
    whole = {f"layer.{index}": torch.full((4 * 1024 * 1024,), float(index)) for index in range(tensors)}
    parts = _sharded(whole)
    ways = {
        way: _way(way.removesuffix(" sharded"), options.where / way, parts if way.endswith(" sharded") else whole)
        for way in options.ways
    }
    timings: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(options.saves + 1):
        for way, (save, resume) in ways.items():  # in turns: what else the machine does meets all alike
            timings[way].append(_turn(turn, save, resume, options.where / way))
    counted = {way: turns[1:] for way, turns in timings.items()}
    (options.where / f"report-{dist.get_rank()}.json").write_text(json.dumps(counted))
    dist.destroy_process_group()


def _turn(turn: int, save: Save, resume: Callable[[int], object], place: Path) -> dict[str, float]:
    """One save by one way, and a resume of it; then a save while training goes on."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    finish = save(2 * turn)
    still = time.perf_counter() - began
    finish()
    dist.barrier()
    durable = time.perf_counter() - began
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    dist.barrier()
    began = time.perf_counter()
    resume(2 * turn)
    dist.barrier()
    took = time.perf_counter() - began
    steps = _slowed(lambda: save(2 * turn + 1))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {"still": still, "durable": durable, "resume": took, "steps": steps, "bytes": size}


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


def _way(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[int], object]]:
    """What saves as a step and returns what waits for it; and what resumes the last one."""
    place.mkdir(exist_ok=True)
    if way == "safedist":
        return _ours(place, state)
    if way.startswith("dcp"):
        return _dcp(way, place, state)
    return _by_rank_0(way, place, state)


def _ours(place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[int], object]]:
    from flytekitplugins_safedist.checkpoint import Checkpoints

    mine = {"model": state}
    ckpt = Checkpoints(place, every=None, keep=None)
    ckpt.restore(mine)

    def save(step: int) -> Callable[[], object]:
        ckpt.save(step, mine, force=True)
        return ckpt.wait

    return save, lambda _: ckpt.restore(mine)


def _dcp(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[int], object]]:
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

    return save, lambda step: dcp.load(state, checkpoint_id=place / str(step), process_group=group)


def _by_rank_0(way: str, place: Path, state: dict[str, Any]) -> tuple[Save, Callable[[int], object]]:
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

    def resume(step: int) -> None:
        path = place / str(step)
        torch.load(path if path.is_file() else path / SyncCheckpoint.TMP_DST_PATH, weights_only=True)

    return save, resume


if __name__ == "__main__":
    main()
