"""Steps of ranks that tell what they do, or do not; and a rank that is late in one stage."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank, stage

LOOP = 50_000
WIDTH, TIMES = 256, 8
DELAYED_STEPS = 12


@task(task_config=SafeTorch(nproc_per_node=4))
def delayed(rank: int, stage_: str) -> int:
    """Each step has three stages and a collective; one rank takes 50 ms longer for one of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me = current_rank()
    for step in range(DELAYED_STEPS):
        for name in ("load", "forward", "backward"):
            with stage(name):
                time.sleep(0.01 + 0.05 * ((me.rank, name) == (rank, stage_)))
        with stage("sync"):
            dist.barrier()
        me.progress(step)
    dist.destroy_process_group()
    return rank


def _cpu_of(pid: int) -> float:
    """Seconds that a process has computed, and no process that it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _untold(_name: str) -> AbstractContextManager[object]:
    return nullcontext()


@task(task_config=SafeTorch(nproc_per_node=1))
def steps(steps: int) -> str:
    """Seconds of processor that telling takes in each step that tells, and not telling in each that does not;
    of whole steps; of the telling in a loop; and the agent's share of a core."""
    import torch

    torch.set_num_threads(1)
    me, matrix, chance, clock = current_rank(), torch.rand(WIDTH, WIDTH) / WIDTH, random.Random(1), time.thread_time
    found: dict[str, list[float]] = {"told": [], "untold": [], "whole": []}
    began, agent = time.monotonic(), _cpu_of(int(os.environ["RECORD_AGENT"]))
    for step in range(steps):
        kind, calls, whole = chance.choice(("told", "untold")), 0.0, clock()
        tell = stage if kind == "told" else _untold
        for name, times in (("load", 1), ("forward", TIMES), ("backward", 1)):
            since = clock()
            block = tell(name)
            block.__enter__()
            calls += clock() - since
            product = matrix
            for _ in range(times):
                product = product @ matrix
            since = clock()
            block.__exit__(None, None, None)
            calls += clock() - since
        since = clock()
        if kind == "told":
            me.progress(step)
        found[kind].append(calls + clock() - since)
        found["whole"].append(clock() - whole)
    share = (_cpu_of(int(os.environ["RECORD_AGENT"])) - agent) / (time.monotonic() - began)
    since = clock()
    for step in range(LOOP):
        for name in ("load", "forward", "backward"):
            with stage(name):
                pass
        me.progress(step)
    return json.dumps({**found, "agent": share, "loop": (clock() - since) / LOOP})
