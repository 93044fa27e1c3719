"""What a pod is told of its job when the task is registered: the one variable, as ``safedist render`` shows it."""

from __future__ import annotations

import json
from typing import Any

TIMEOUTS = {
    **{"code": 1800.0, "start": 600.0, "rendezvous": 900.0, "stop": 5.0},
    **{"exit": 60.0, "heartbeat": 60.0, "preemption": 20.0, "upload": 3600.0},
}


def registered(*, nodes: str = "1", nproc_per_node: int = 1, **more: Any) -> dict[str, str]:
    """The pod's variable.

    Args:
        nodes: "2", or "2:3" for a range.
        nproc_per_node: ranks of each.
        more: other fields than their usual values; of ``timeouts`` those that differ.
    """
    low, _, high = nodes.partition(":")
    job = {
        **{"version": 1, "backend": "torch", "min_nodes": int(low), "max_nodes": int(high or low)},
        **{"nproc_per_node": nproc_per_node, "nproc_is_open": False, "gpus": None, "start_method": "preload"},
        **{"max_replacements": 10, **more, "timeouts": {**TIMEOUTS, **more.get("timeouts", {})}},
    }
    return {"SAFEDIST_JOB": json.dumps(job)}
