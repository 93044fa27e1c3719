"""What the ranks of two nodes find out about a directory that both nodes have at the same path."""

from __future__ import annotations

import json
import os
import uuid

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch, current_rank
from flytekitplugins_safedist.fs import atomic_write, default_group, exchange, once_per_node, shared_scope

PLACE = "/mnt/volume/data"


def look() -> str:
    """Each rank's report; the task returns those of all."""
    me = current_rank()
    scope = shared_scope(PLACE)

    def fill() -> int:
        with atomic_write(os.path.join(PLACE, f"filled-{uuid.uuid4().hex}"), "w") as file:
            file.write(str(me.rank))
        return me.rank

    report = {
        "over": default_group().coordination.where.partition(" at ")[0],
        "kind": scope.kind,
        "parts": scope.parts,
        "leader": scope.leader,
        "filled_by": once_per_node("fill", fill, path=PLACE),
        "node_by": once_per_node("look", lambda: me.rank),
    }
    exchange("filled", "")  # all that will be filled is: now each counts
    report["filled"] = len([name for name in os.listdir(PLACE) if name.startswith("filled-")])
    return json.dumps([json.loads(text) for text in exchange("reports", json.dumps(report))])


@task(task_config=SafeTorch(nodes=2, nproc_per_node=2))
def places_torch() -> str:
    return look()


@task(task_config=SafeHorovod(nodes=2, nproc_per_node=2))
def places_horovod() -> str:
    return look()
