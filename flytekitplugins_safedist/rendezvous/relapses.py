"""Whether a node dies in the same place again and again: then it is not replaced as often as one that is preempted.

Measured in heartbeats of node 0, which holds the store: a clock that all nodes read alike, wherever a new process runs.
A function of a raw store, for one call; no waiting.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .protocol import Keys

TIMES = 3
"""Losses of one node that end the job, where the last ones follow each other closely."""


def is_one(store: Any, keys: Keys, node: int, incarnation: int, short: float) -> bool:
    """A new process takes a node's place: note when, and tell whether the node keeps dying.

    It does when it was lost :data:`TIMES` times, and each process in its place after the first one lived only shortly:
    none came far beyond where the last one died.

    Args:
        store: node 0's.
        keys: the job's.
        node: whose place is taken.
        incarnation: of the new process.
        short: a life, in heartbeats.
    """
    now = int(store.add(keys.heartbeat(0), 0))
    store.set(_taken(keys, node, incarnation), str(now))
    if incarnation <= TIMES:
        return False
    before = [_taken(keys, node, life) for life in range(incarnation - TIMES + 1, incarnation)]
    if not store.check(before):
        return False  # one of them was lost before it could say when it came
    times = [*(int(store.get(key)) for key in before), now]
    return all(later - earlier < short for earlier, later in pairwise(times))


def _taken(keys: Keys, node: int, incarnation: int) -> str:
    return keys.job(f"taken/{node}/{incarnation}")
