"""Whether a trace is what the document of Chrome's trace event format says, and what Perfetto can draw.

Perfetto's own trace processor is a binary that its package loads from the network, which tests do not have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

KEYS = {
    "X": ({"ph", "pid", "tid", "name", "cat", "ts", "dur"}, {"args"}),
    "C": ({"ph", "pid", "name", "ts", "args"}, set()),
    "M": ({"ph", "pid", "name", "args"}, {"tid"}),
}
"""Of each phase that there is here: what an event must have, and may have."""

METADATA = {"process_name", "thread_name"}


def check(trace: Mapping[str, Any]) -> None:
    """Raise AssertionError for what is not so."""
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads, slices, counters = set(), defaultdict(list), defaultdict(list)
    for event in trace["traceEvents"]:
        needed, possible = KEYS[event["ph"]]
        assert needed <= set(event) <= needed | possible, event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        for number in ("pid", "tid"):
            assert type(event.get(number, 0)) is int, event
            assert 0 <= event.get(number, 0) < 1 << 31, event
        for microseconds in ("ts", "dur"):
            assert type(event.get(microseconds, 0)) in (int, float), event
            assert math.isfinite(event.get(microseconds, 0)), event
        assert event.get("dur", 0) >= 0, event
        if event["ph"] == "M":
            assert event["name"] in METADATA, event
            assert ("tid" in event) == (event["name"] == "thread_name"), event
            assert set(event["args"]) == {"name"}, event
            assert isinstance(event["args"]["name"], str), event
            threads.add((event["pid"], event.get("tid")))
        elif event["ph"] == "X":
            assert isinstance(event["cat"], str), event
            assert isinstance(event.get("args", {}), dict), event
            slices[event["pid"], event["tid"]].append(event)
        else:
            assert event["args"], event
            assert all(type(value) in (int, float) and math.isfinite(value) for value in event["args"].values()), event
            counters[event["pid"], event["name"]].append(event["ts"])
    assert set(slices) <= threads, "each thread has a name"
    assert {(pid, None) for pid, _ in (*slices, *counters)} <= threads, "each process has a name"
    for found in counters.values():
        assert found == sorted(set(found)), "a counter has one value at a time"
    for each in slices.values():
        _nested(each)


def _nested(slices: list[dict[str, Any]]) -> None:
    """Slices of one thread are apart, or one within the other: others cannot be drawn, and are left out."""
    around: list[dict[str, Any]] = []
    for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        while around and _end(around[-1]) <= event["ts"]:
            around.pop()
        assert not around or _end(event) <= _end(around[-1]), (around[-1], event)
        around.append(event)


def _end(event: Mapping[str, Any]) -> float:
    return round(event["ts"] + event["dur"], 3)
