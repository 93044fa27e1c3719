"""Who owns a node's place on one store. Each claim takes the place from the process before it.

A pod's new process is always newer than what was in its place before: it takes it. A process that survived the loss of
the store before this one brings the number that it had there, and takes the place only from what is older: were it to
take it from a new process, a node that was cut off and replaced would come back and fence its own replacement.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import FencedError
from . import departures, relapses
from .carried import Carried, change
from .client import Connection
from .protocol import Keys, Slot
from .settings import GroupSettings


def claim(store: Any, key: str, brought: int) -> tuple[Slot, Slot]:
    """Claim a place; returns how it was before and after.

    Raises:
        FencedError: a newer process has it.
    """
    mine = uuid.uuid4().hex
    seen = bytes(store.compare_set(key, "", ""))
    while True:
        before = Slot.parse(seen)
        after = before.claimed(brought)
        if after is None:
            raise FencedError(
                "another process has taken this node's place in the group",
                seen=f"process {before.number} owns the slot",
                expected=f"none newer than process {brought}, which is this one",
                hint="nothing, if the pod was recreated; otherwise two pods carry the same node rank",
            )
        wanted = after.text(mine)
        found = bytes(store.compare_set(key, seen.decode(), wanted))
        if found == wanted.encode():
            return before, after
        seen = found


def missing(store: Any, keys: Keys, nodes: int, generation: int) -> tuple[int, ...]:
    """The nodes that have not arrived in ``generation``. Two requests for each."""

    def there(key: str) -> bool:
        return bool(store.check([key])) and int(store.get(key)) >= generation

    return tuple(node for node in range(nodes) if not there(keys.arrived(node)))


@dataclass(frozen=True)
class Farewells:
    """How many processes claimed a place, were replaced in it, and have said goodbye."""

    claims: int
    replaced: int
    byes: int

    def all_left(self, expected: int) -> bool:
        """Whether nobody is left who could still ask; ``expected``: nodes that are waited for although none came."""
        return self.byes >= max(self.claims - self.replaced, expected)


def farewells(store: Any, keys: Keys) -> Farewells:
    """Count them."""
    return Farewells(*(int(store.add(key, 0)) for key in (keys.claims, keys.replacements, keys.byes)))


def await_farewells(control: Connection, all_left: Callable[[Any], bool], seconds: float) -> None:
    """For the node with the store, from which the others read the end: wait until nobody is left who could ask, but not
    for the dead.

    Args:
        control: connection for short calls.
        all_left: asks the raw store.
        seconds: the longest.
    """
    deadline, pause, never = time.monotonic() + seconds, 0.01, threading.Event()
    while time.monotonic() < deadline:
        if control.call("waiting for the others to leave", all_left, timeout=2.0):
            return
        never.wait(pause)
        pause = min(0.2, pause * 1.5)


@dataclass(frozen=True)
class Replaced:
    """What taking a dead process's place has come to.

    Attributes:
        count: times that nodes were replaced in this job.
        finished: the round in which this node's ranks had succeeded before, or None.
        again: whether this node is lost again and again soon after it is back.
    """

    count: int
    finished: int | None
    again: bool


def replace(store: Any, keys: Keys, settings: GroupSettings, *, before: int, mine: int) -> Replaced:
    """Take, as process ``mine``, the place of process ``before`` of this node; that costs the replacement budget."""
    goodbye = keys.bye(settings.node_rank, before)
    # A process that was stopped in good order has said goodbye, and now counts among the replaced as well.
    if store.check([goodbye]):
        store.add(keys.byes, -1)
    finished = departures.succeed(store, keys, settings.node_rank)
    store.add(keys.replacements, 1)
    short = settings.short_life / settings.heartbeat_interval
    again = relapses.is_one(store, keys, settings.node_rank, mine, short)
    return Replaced(change(store, keys.carried, Carried.taken_again).retaken, finished, again)
