"""A task of two nodes with two ranks each that reads its inputs in every rank; ``$TEST_HOW`` says what else happens."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank

TIMEOUTS = Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=60)


@dataclass
class Settings:
    weights: FlyteFile
    several: list[FlyteFile]


def texts(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.txt"))}


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2, max_restarts=1, timeouts=TIMEOUTS))
def reads(
    folder: FlyteDirectory,
    file: FlyteFile,
    several: list[FlyteFile],
    named: dict[str, FlyteFile],
    settings: Settings,
) -> str:
    """What each rank finds in its inputs, and what it then finds in the directory of its node."""
    import torch.distributed as dist

    me = current_rank()
    (me.node_dir / f"round-{me.round}-rank-{me.rank}").touch()
    dist.init_process_group("gloo")
    own = Path(folder)
    found = {
        "folder": texts(own),
        "files": [
            Path(each).read_text() for each in (file, *several, *named.values(), settings.weights, *settings.several)
        ],
        "name": Path(file).name,
    }
    (own / f"rank-{me.rank}").touch()  # in this rank's own directory
    (own / "a.txt").unlink()
    if os.environ["TEST_HOW"] == "writes in place" and me.rank == 1:
        (own / "deep" / "b.txt").write_text("B")  # as root, whom no mode stops
    dist.barrier()
    found["own"] = sorted(each.name for each in own.iterdir())
    found["node"] = sorted(each.name for each in me.node_dir.iterdir())
    found["mode"] = oct(me.node_dir.stat().st_mode & 0o777)
    if os.environ["TEST_HOW"] == "killed" and (me.rank, me.round) == (3, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    every: list[object] = [None] * me.world_size
    dist.all_gather_object(every, found)
    dist.destroy_process_group()
    return json.dumps(every)
