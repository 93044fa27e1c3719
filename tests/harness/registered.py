"""What a pod is told of its job when the task is registered: the one variable, as ``safedist render`` shows it; and the
variables that were in its place when ``tests/contracts/oracle`` was recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

TIMEOUTS = {
    **{"code": 1800.0, "start": 600.0, "rendezvous": 900.0, "stop": 5.0},
    **{"exit": 60.0, "heartbeat": 60.0, "preemption": 20.0, "upload": 3600.0},
}

OPTIONS: dict[str, Any] = {
    "scratch": {
        "path": None,
        "keep": "never",
        "size_limit": None,
        "shared_caches": [],
        "share_inputs": True,
        "volume": "disk",
        "claim": None,
    },
    "logs": {"show": None, "tail_lines": 20, "prefix": "[rank {rank}] "},
    "hangs": {"action": "restart", "floor": None, "ceiling": 7200.0},
    "metrics": {"prometheus": None, "otlp": False},
    **{"preflight": None, "profile": None},
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
        **{"version": 2, "backend": "torch", "min_nodes": int(low), "max_nodes": int(high or low)},
        **{"nproc_per_node": nproc_per_node, "nproc_is_open": False, "gpus": None, "start_method": "preload"},
        **{"max_restarts": 0, "max_replacements": 10, "variables": [], "decks": None, **OPTIONS, **more},
        "timeouts": {**TIMEOUTS, **more.get("timeouts", {})},
    }
    return {"SAFEDIST_JOB": json.dumps(job)}


def registered_as(config: Any) -> dict[str, str]:
    """The same of a task's config, in what jobs of benchmarks differ by: size, budgets and timeouts."""
    return registered(
        backend="horovod" if type(config).__name__ == "SafeHorovod" else "torch",
        nodes=str(config.nnodes),
        nproc_per_node=config.nproc_per_node,
        start_method=config.start_method,
        max_restarts=config.max_restarts,
        timeouts=asdict(config.timeouts),
    )


def told_as_recorded(shown: Any) -> Any:
    """What is shown, with the variables of the recordings in the place of today's one: one for each fact of the job."""
    if isinstance(shown, Mapping):
        return {
            name: [each for one in value for each in _variables(one)] if name == "env" else told_as_recorded(value)
            for name, value in shown.items()
        }
    return [told_as_recorded(one) for one in shown] if isinstance(shown, list) else shown


def _variables(variable: dict[str, Any]) -> list[dict[str, Any]]:
    if variable["name"] != "SAFEDIST_JOB":
        return [variable]
    job = json.loads(variable["value"])
    low, high = job["min_nodes"], job["max_nodes"]
    values = {
        "NODES": str(high) if low == high else f"{low}:{high}",
        "NPROC_PER_NODE": str(job["nproc_per_node"]),
        "BACKEND": job["backend"],
        "START_METHOD": "" if job["start_method"] == "preload" else job["start_method"],
        "GPUS": str(job["gpus"] or ""),
    }
    return [{"name": f"SAFEDIST_{name}", "value": value} for name, value in values.items() if value]
