"""What the ranks of two nodes make of directories that both nodes have at the same path: one is the same in both."""

from __future__ import annotations

import json
from pathlib import Path

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.fs import barrier, download_once, once_per_job, once_per_node, rank_zero_first

PLACES = {"shared": Path("/mnt/shared/data"), "own": Path("/mnt/own/data")}


def exchange(name: str, text: str) -> list[str]:
    """The texts of all ranks, in the order of ranks."""
    me = current_rank()
    once_per_job(f"{name} of {me.rank}", lambda: text)
    barrier(name)
    return [once_per_job(f"{name} of {rank}", str) for rank in range(me.world_size)]


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2))
def places() -> str:
    """Each rank's report; the task returns those of all."""
    me = current_rank()
    source = Path("/tmp/weights")  # each node has its own: what is there afterwards says whose was fetched
    with rank_zero_first(per="node"):
        first = not source.exists()
        if first:
            source.write_text(str(me.node_rank))
    fetched = {
        name: download_once(source, place / "weights", shared=name == "shared").read_text()
        for name, place in PLACES.items()
    }
    report = {
        "rank": me.rank,
        "fetched_from": {name: int(node) for name, node in fetched.items()},
        "first": first,
        "node_by": once_per_node("look", lambda: me.rank),
        "job_by": once_per_job("look", lambda: me.rank),
    }
    return json.dumps([json.loads(text) for text in exchange("reports", json.dumps(report))])
