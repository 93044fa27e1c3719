"""Who takes part in a job, as its coordinator knows it: values, and who of two is the newer process. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .messages import Hello

NAMED_AT_MOST = 16
"""Missing nodes named one by one in a message; the rest are counted."""

Key = int | str
"""A place: the node_rank where the job's size is fixed, the process's id in a range."""


@dataclass
class Node:
    """The process in one place.

    Attributes:
        key, process, host, started_ns: who it is.
        order: in which order it came.
        since: when it said hello first.
        heard: when it was heard last; of one whose connection is lost, when that was.
        linked: whether it is connected.
        state: ``ready`` for a round; ``running``; ``done``; ``absent``: its ranks run or end, but not in the round that
            is counted; ``cannot``: it can start none.
        stands_in: it has no ranks in this round: it took the place of a process whose ranks had returned, or its own
            had, and are ended.
        round: the one that it was told to begin last, by this coordinator or one before.
        is_new: whether it had been in none before it came.
    """

    key: Key
    process: str
    host: str
    started_ns: int
    order: int
    since: float
    heard: float
    linked: bool = True
    state: str = "ready"
    stands_in: bool = False
    round: int = -1
    is_new: bool = True

    def is_older_than(self, hello: Hello) -> bool:
        """Whether a new process takes this one's place: always where this one cannot be heard, for a clock may be
        wrong; else the one that started later."""
        return not self.linked or hello.started_ns >= self.started_ns


class Nodes:
    """All processes that take part, by place and by process."""

    def __init__(self) -> None:
        self._places: dict[Key, Node] = {}
        self._processes: dict[str, Node] = {}
        self.came: set[str] = set()
        """Processes that ever came."""
        self._orders = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __getitem__(self, key: Key) -> Node:
        return self._places[key]

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._places.values()))

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: Key) -> Node | None:
        """The process in a place, or None."""
        return self._places.get(key)

    def of_process(self, process: str) -> Node | None:
        """The node of a process that has a place, or None."""
        return self._processes.get(process)

    def add(self, key: Key, hello: Hello, now: float) -> Node:
        """Give a place to a process; whoever had it has none any more."""
        self.remove(key)
        self.came.add(hello.process)
        self._orders += 1
        node = Node(key, hello.process, hello.host, hello.started_ns, self._orders, now, now, round=hello.round)
        node.is_new = hello.round < 0
        self._places[key] = self._processes[hello.process] = node
        return node

    def remove(self, key: Key) -> None:
        """Free a place."""
        node = self._places.pop(key, None)
        if node is not None:
            self._processes.pop(node.process, None)

    def vacate(self, node: Node) -> None:
        """Its process is lost, and its part of the round done: the place is kept, for a new process or for nobody."""
        self._processes.pop(node.process, None)
        node.process, node.stands_in, node.linked, node.heard = "", True, False, float("inf")

    def rest(self, seconds: float) -> None:
        """The coordinator itself stood still: nobody is blamed for that."""
        for node in self._places.values():
            node.heard += seconds


def overdue(nodes: Sequence[Node], now: float, *, grace: float, heartbeat: float) -> list[tuple[Node, str]]:
    """Who of some nodes counts as lost, and why."""
    found = []
    for node in nodes:
        silent = now - node.heard
        if not node.linked and silent > grace:
            found.append((node, f"its connection was lost, and it did not come back within {grace:g} s"))
        elif silent > heartbeat:
            found.append((node, f"no sign of life for {heartbeat:g} s"))
    return found


def listed(names: Sequence[str]) -> str:
    """Names for a message: at most :data:`NAMED_AT_MOST`, then how many more."""
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def wait_line(who: str, *, waited: float, limit: float, seen: str, awaits: str) -> str:
    """What a node that waits for others says meanwhile.

    Args:
        who: is missing.
        waited: seconds so far.
        limit: seconds in all.
        seen: what a look found.
        awaits: what Kubernetes may be waiting for.
    """
    left = max(0.0, limit - waited)
    times = f"{waited:.0f} s, {left:.0f} s more at most"
    return f"waiting for {who} for {times} ({seen}); Kubernetes may be waiting for {awaits}"
