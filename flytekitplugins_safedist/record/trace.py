"""The record of a run as a trace for Perfetto and chrome://tracing: JSON, gzipped. Pure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .findings import found_in
from .profile import unpacked
from .summary import NodeSummary, RankSummary

_NODES_OWN = 999_999
"""The thread that stands for a node itself; the others are ranks."""
_PROFILED = 1_000_000
"""The first thread of rank 0's profile; then that of rank 1's, and so on."""


def trace(nodes: Sequence[NodeSummary]) -> bytes:
    """Nodes as processes, ranks as threads: phases, saves and stalls as slices, pace and stages as counters; of all
    *nodes*, in one clock."""
    zero = found_in(nodes).since
    events = [event for node in nodes for event in _of_node(node, zero)]
    _nest([event for event in events if event["ph"] == "X"])
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)


def _nest(slices: Sequence[dict[str, Any]]) -> None:
    """Have slices of one thread lie apart, or one within the other, as they are drawn: times are rounded. Of two that
    overlap the one is cut that loses less by it."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        around, ts, end = threads.setdefault((each["pid"], each["tid"]), []), each["ts"], _end(each)
        while around and _end(around[-1]) < end:
            outer = around[-1]
            if end - _end(outer) <= _end(outer) - ts:
                end = _end(outer)
                each["dur"] = round(end - ts, 3)
            else:
                outer["dur"] = min(outer["dur"], round(ts - outer["ts"], 3))
                around.pop()
        around.append(each)


def _end(event: Mapping[str, Any]) -> float:
    return float(round(event["ts"] + event["dur"], 3))


def _of_node(node: NodeSummary, zero: float) -> Iterator[dict[str, Any]]:
    pid = max(0, node.node)  # of a node that came to no round

    def at(since: float) -> int:
        return round((since - zero) * 1e6)

    def piece(tid: int, name: str, since: float, seconds: float, **args: object) -> dict[str, Any]:
        times = {"ts": at(since), "dur": max(1, round(seconds * 1e6))}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "safedist", **times, "args": args}

    def counter(name: str, since: float, value: float) -> dict[str, Any]:
        return {"ph": "C", "pid": pid, "ts": at(since), "name": name, "args": {"value": value}}

    named = {"ph": "M", "pid": pid}
    yield {**named, "name": "process_name", "args": {"name": f"node {node.node} ({node.host})"}}
    yield {**named, "name": "thread_name", "tid": _NODES_OWN, "args": {"name": "the node"}}
    for name, since, seconds in node.phases:
        yield piece(_NODES_OWN, name, since, seconds)
    for gpu in node.gpus:
        for number, (busy, memory) in enumerate(zip(gpu.busy, gpu.memory, strict=True)):
            yield counter(f"GPU {gpu.index} busy (%)", gpu.since + number * gpu.every, busy)
            yield counter(f"GPU {gpu.index} memory", gpu.since + number * gpu.every, memory)
    for every in node.rounds:
        yield piece(_NODES_OWN, f"round {every.round}", every.since, every.until - every.since, why=every.why)
        for rank in every.ranks:
            yield {**named, "name": "thread_name", "tid": rank.rank, "args": {"name": f"rank {rank.rank}"}}
            for name, since, seconds, args in _pieces(rank, every.round):
                yield piece(rank.rank, name, rank.since + since, seconds, **args)
            for event in _profile(rank, zero - node.offset):
                yield {**event, "pid": pid}
            for name, since, value in _counters(rank):
                yield counter(name, rank.since + since, value)


def _pieces(rank: RankSummary, number: int) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """What is drawn of a rank: name, begin, seconds, and more."""
    yield from ((name, since, seconds, {"round": number}) for name, since, seconds in rank.phases)
    yield from (("save", since, seconds, {"step": step}) for step, since, seconds in rank.saves)
    yield from (("stall", since, seconds, {}) for since, seconds in rank.stalls)


def _profile(rank: RankSummary, zero: float) -> Iterator[dict[str, Any]]:
    """What torch saw, on tracks beside the rank's."""
    if not rank.profile:
        return
    since, tracks, slices = unpacked(rank.profile)
    first, start = _PROFILED * (rank.rank + 1), (since - zero) * 1e6
    for at, track in enumerate(tracks):
        yield {"ph": "M", "tid": first + at, "name": "thread_name", "args": {"name": f"rank {rank.rank}: {track}"}}
    for name, at, ns, took in slices:
        times = {"ts": round(start + ns / 1e3, 3), "dur": took / 1e3}
        yield {"ph": "X", "tid": first + at, "name": name, "cat": "torch", **times}


def _counters(rank: RankSummary) -> Iterator[tuple[str, float, float]]:
    """A value for each slice of the time in which it is another one: its name and begin."""
    rows = {f"rank {rank.rank} steps/s": (rank.pace, rank.rate / 9)}
    rows |= {f"rank {rank.rank} {name}": (row, 1 / 9) for name, row in rank.shares.items()}
    for name, (digits, unit) in rows.items():
        before = ""
        for at, digit in enumerate(digits):
            if digit != before:
                yield name, rank.sliced + at * rank.every, int(digit) * unit
            before = digit
