"""Who takes part in a job, as its coordinator knows it; who may begin a round, and who is missing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .facts import Rules
from .messages import Hello

NAMED_AT_MOST = 16
"""Missing nodes named one by one in a message; the rest are counted."""

Key = int | str
"""A place: the node_rank where the job's size is fixed, the process's id in a range."""


@dataclass(slots=True)
class Node:
    """The process in one place.

    Attributes:
        key, process, host, started_ns: who it is.
        since: when it said hello first.
        heard: when it was heard last; of one whose connection is lost, when that was.
        round: the one that it was told to begin last, by this coordinator or one before.
        place: its node_rank in that.
        is_new: whether it had been in none before it came.
        linked: whether it is connected.
        machine: what it is on, as in :attr:`.facts.History.excluded`.
        where: the same, for people.
        state: ``ready`` for a round; ``running``; ``done``; ``stands in``: its part of the round is done, and it has no
            ranks: it took the place of a process whose ranks had returned, or its own had, and are ended; ``absent``:
            its ranks run or end, but not in the round that is counted; ``cannot``: it can start none.
    """

    key: Key
    process: str
    host: str
    started_ns: int
    since: float
    heard: float
    round: int
    is_new: bool
    place: int = -1
    linked: bool = True
    machine: str = ""
    where: str = ""
    state: Literal["ready", "running", "done", "stands in", "absent", "cannot"] = "ready"


class Nodes:
    """All processes that take part, by place and by process; who came last is the last.

    Args:
        rules: of the job.
        host: the process of node 0.
        excluded: machines whose nodes take no part.
    """

    def __init__(self, rules: Rules, host: str, excluded: Callable[[], Collection[str]]) -> None:
        self._rules = rules
        self._host = host
        self._excluded = excluded
        self._places: dict[Key, Node] = {}
        self._processes: dict[str, Node] = {}
        self.came: set[str] = set()
        """Processes that ever came."""

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
        """Give a free place to a process."""
        node = Node(key, hello.process, hello.host, hello.started_ns, now, now, hello.round, is_new=hello.round < 0)
        node.machine, node.where = hello.ground, hello.where
        self._places[key] = self._processes[hello.process] = node
        self.came.add(hello.process)
        return node

    def remove(self, node: Node) -> None:
        """Free its place."""
        del self._places[node.key], self._processes[node.process]

    def is_excluded(self, node: Node) -> bool:
        """Whether it takes no part, for its machine; node 0 always does."""
        return node.machine in self._excluded() and node.process != self._host

    def take_part(self) -> list[Node]:
        """All others."""
        return [node for node in self if not self.is_excluded(node)]

    def ready(self) -> list[Node]:
        """Who can take part in a round, in order, node 0 first; nobody while that cannot."""
        found = [node for node in self.take_part() if node.state == "ready" and node.linked]
        found.sort(key=lambda node: node.key if self._rules.fixed else node.process != self._host)
        return found[: self._rules.max_nodes] if found and found[0].process == self._host else []

    def are_enough(self, ready: Sequence[Node], *, hoped: int, since: float, now: float) -> bool:
        """Whether a round begins with those who are ready.

        Args:
            ready: see :meth:`ready`.
            hoped: how many there were in the round before, less those that are known to be gone; 0 before the first.
            since: when the round before was settled.
            now: of the same clock.
        """
        rules = self._rules
        if not max(1, rules.min_nodes) <= len(ready) < rules.max_nodes:
            return len(ready) == rules.max_nodes
        come = sum(node.state in ("ready", "absent") for node in self.take_part())
        if 0 < hoped <= come == len(ready):
            return True  # those of the round before are all there again
        were_enough = sorted(node.since for node in ready)[rules.min_nodes - 1]
        return now - max(since, were_enough) >= rules.last_call

    def missing(self) -> list[str]:
        """The names of those who are waited for; of a range, how many."""
        rules = self._rules
        ready = {node.key for node in self.take_part() if node.state == "ready" and node.linked}
        if rules.fixed:
            return [str(key) for key in range(rules.max_nodes) if key not in ready]
        return [f"{max(1, rules.min_nodes - len(ready))} of {rules.min_nodes}"]


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
