"""The record of a run as a trace for Perfetto and chrome://tracing: JSON, gzipped. Pure."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from .findings import Findings
from .summary import NodeSummary, expanded

_NODES_OWN = 999_999
"""The thread that stands for a node itself; the others are ranks."""
_PROFILED = 1_000_000
"""The first thread of rank 0's profile; then that of rank 1's, and so on."""

_Event = dict[str, Any]


def trace(found: Findings) -> bytes:
    """Nodes as processes, ranks as threads: phases, saves and stalls as slices, pace and stages as counters."""
    events: list[_Event] = []
    for node in found.nodes:
        its: list[_Event] = [{"ph": "M", "name": "process_name", "args": {"name": f"node {node.node} ({node.host})"}}]
        for (tid, name), slices in _tracks(node, found.since).items():
            its.append({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
            its += [{"ph": "X", "tid": tid, **each} for each in _nested(slices)]
        its += _counters(node, found.since)
        events += [{"pid": max(0, node.node), **each} for each in its]  # a node may have come to no round
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


def _tracks(node: NodeSummary, zero: float) -> dict[tuple[int, str], list[_Event]]:
    """By thread and its name the slices: what the node did, what each rank did, beside it what torch saw of that."""
    tracks = defaultdict[tuple[int, str], list[_Event]](list)

    def add(tid: int, track: str, name: str, since: float, seconds: float, **args: object) -> None:
        times = {"ts": round((since - zero) * 1e6), "dur": max(1, round(seconds * 1e6))}
        tracks[tid, track].append({"name": name, "cat": "safedist", **times, "args": args})

    for name, since, seconds in node.phases:
        add(_NODES_OWN, "the node", name, since, seconds)
    for every in node.rounds:
        add(_NODES_OWN, "the node", f"round {every.round}", every.since, every.until - every.since, why=every.why)
        for rank in every.ranks:
            for name, since, seconds, more in rank.pieces():
                add(rank.rank, f"rank {rank.rank}", name, since, seconds, round=every.round, **more)
            clock, names, slices = expanded(rank.profile) if rank.profile else (0.0, [], [])
            start = (clock + node.offset - zero) * 1e6
            for name, at, ns, took in slices:
                times = {"ts": round(start + ns / 1e3, 3), "dur": took / 1e3}
                track = _PROFILED * (rank.rank + 1) + at, f"rank {rank.rank}: {names[at]}"
                tracks[track].append({"name": name, "cat": "torch", **times})
    return tracks


def _nested(slices: list[_Event]) -> list[_Event]:
    """Have them lie apart, or one within the other, as they are drawn: times are rounded. Of two that overlap the one
    is cut that loses less by it."""
    around: list[_Event] = []
    for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        ts, end = each["ts"], _end(each)
        while around and _end(around[-1]) < end:
            outer = around[-1]
            if end - _end(outer) <= _end(outer) - ts:
                end = _end(outer)
                each["dur"] = round(end - ts, 3)
            else:
                outer["dur"] = min(outer["dur"], round(ts - outer["ts"], 3))
                around.pop()
        around.append(each)
    return slices


def _end(slice_: _Event) -> float:
    return float(round(slice_["ts"] + slice_["dur"], 3))


def _counters(node: NodeSummary, zero: float) -> Iterator[_Event]:
    """A value for each slice of the time in which it is another one."""
    rows: list[tuple[str, float, float, Sequence[float]]] = []
    for gpu in node.gpus:
        rows.append((f"GPU {gpu.index} busy (%)", gpu.since, gpu.every, gpu.busy))
        rows.append((f"GPU {gpu.index} memory", gpu.since, gpu.every, gpu.memory))
    for rank in (rank for every in node.rounds for rank in every.ranks):
        digits = {"steps/s": (rank.pace, rank.rate / 9), **{name: (row, 1 / 9) for name, row in rank.shares.items()}}
        for name, (row, unit) in digits.items():
            rows.append((f"rank {rank.rank} {name}", rank.began, rank.every, [int(digit) * unit for digit in row]))
    for name, since, every, values in rows:
        for at, value in enumerate(values):
            if not at or value != values[at - 1]:
                ts = round((since + at * every - zero) * 1e6)
                yield {"ph": "C", "name": name, "ts": ts, "args": {"value": value}}
