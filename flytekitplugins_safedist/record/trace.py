"""The record of a run as a trace for Perfetto and chrome://tracing: JSON, gzipped. Pure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from typing import Any

from .events import NodePart, RankPart, RoundPart
from .findings import found_in

_NODES_OWN = 999_999
"""The thread that stands for a node itself; the others are ranks."""


def trace(parts: Sequence[NodePart]) -> bytes:
    """Nodes as processes, ranks as threads: phases, saves and stalls as slices, pace and stages as counters; of all
    nodes' *parts*, in one clock."""
    zero = found_in(parts).since
    events = [event for part in parts for event in _of_node(part, zero)]
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


def _of_node(part: NodePart, zero: float) -> Iterator[dict[str, Any]]:
    pid = part.node

    def piece(tid: int, name: str, since: float, seconds: float, **args: object) -> dict[str, Any]:
        times = {"ts": round((since - zero) * 1e6), "dur": max(1, round(seconds * 1e6))}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "safedist", **times, "args": args}

    named = {"ph": "M", "pid": pid}
    yield {**named, "name": "process_name", "args": {"name": f"node {part.node} ({part.host})"}}
    yield {**named, "name": "thread_name", "tid": _NODES_OWN, "args": {"name": "the node"}}
    for name, since, seconds in part.phases:
        yield piece(_NODES_OWN, name, since, seconds)
    for gpu in part.gpus:
        for at, (busy, memory) in enumerate(zip(gpu.busy, gpu.memory, strict=True)):
            ts = round((gpu.since + at * gpu.every - zero) * 1e6)
            yield {"ph": "C", "pid": pid, "ts": ts, "name": f"GPU {gpu.index} busy (%)", "args": {"value": busy}}
            yield {"ph": "C", "pid": pid, "ts": ts, "name": f"GPU {gpu.index} memory", "args": {"value": memory}}
    for every in part.rounds:
        title = f"round {every.round}"
        yield piece(_NODES_OWN, title, every.since, every.until - every.since, why=every.why)
        for rank in every.ranks:
            yield {**named, "name": "thread_name", "tid": rank.rank, "args": {"name": f"rank {rank.rank}"}}
            for name, since, seconds in rank.phases:
                yield piece(rank.rank, name, since, seconds, round=every.round)
            for step, since, seconds in rank.saves:
                yield piece(rank.rank, "save", since, seconds, step=step)
            for since, seconds in rank.stalls:
                yield piece(rank.rank, "stall", since, seconds)
            for event in _counters(rank, every):
                yield {**event, "pid": pid, "ts": round((event["ts"] - zero) * 1e6)}


def _counters(rank: RankPart, every: RoundPart) -> Iterator[dict[str, Any]]:
    """A value for each slice in which it is another one."""
    rows = {f"rank {rank.rank} steps/s": (rank.pace, rank.rate / 9)}
    rows |= {f"rank {rank.rank} {name}": (row, 1 / 9) for name, row in rank.shares.items()}
    for name, (digits, unit) in rows.items():
        each, before = (every.until - every.since) / max(1, len(digits)), ""
        for at, digit in enumerate(digits):
            if digit != before:
                yield {"ph": "C", "name": name, "ts": every.since + at * each, "args": {"value": int(digit) * unit}}
            before = digit
