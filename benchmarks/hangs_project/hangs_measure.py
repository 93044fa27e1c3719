"""Steps of ranks that are watched for hangs or not, and ranks that stand still to be looked at."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

from flytekit import task

from flytekitplugins_safedist import Hangs, SafeTorch, current_rank

RANKS = int(os.environ.get("HANGS_RANKS", "4"))
LOOKS = os.environ.get("HANGS_LOOKS", "")
ELEMENTS, WIDTH = 250_000, 256
WARMUP = 20


def cpu_of(pid: int) -> float:
    """Seconds that a process has computed, and no process that it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@task(
    task_config=SafeTorch(
        nproc_per_node=RANKS, hangs=Hangs(action="report", floor=10 * float(LOOKS)) if LOOKS else Hangs()
    )
)
def measured(steps: int) -> str:
    """The median step, a product of matrices and an all-reduce of 1 MB, as rank 0 sees it; the agent's share of a
    core meanwhile."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor, matrix = torch.ones(ELEMENTS), torch.ones(WIDTH, WIDTH)
    took = []
    for step in range(WARMUP + steps):
        if step == WARMUP:
            began, agent = time.monotonic(), cpu_of(int(os.environ["HANGS_AGENT"]))
        at = time.perf_counter()
        _ = matrix @ matrix
        dist.all_reduce(tensor)
        took.append(time.perf_counter() - at)
    share = (cpu_of(int(os.environ["HANGS_AGENT"])) - agent) / (time.monotonic() - began)
    dist.destroy_process_group()
    return json.dumps({"step": statistics.median(took[WARMUP:]), "agent": share})


@task(task_config=SafeTorch(nproc_per_node=RANKS))
def stands() -> None:
    """All ranks are connected; each says that it is there, and sleeps."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    directory = Path(os.environ["HANGS_THERE"])
    (directory / str(current_rank().rank)).touch()
    time.sleep(3600)
