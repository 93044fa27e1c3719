"""In a range of nodes: who of a round that is left comes to the next one.

Torch elastic only counts: when the minimum is there, it hopes for some time that more will come. After the first round
the nodes know better: those of the last one come, except who has left or sends no heartbeat. So they gather first, and
then torch elastic need not hope.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import NodeLostError, NotReplacedError, RendezvousTimeoutError
from . import departures
from .client import Connection
from .protocol import Keys
from .settings import RangeSettings

_POLL = 0.05
"""Seconds between two looks for what another node is about to say."""


@dataclass(frozen=True)
class Gathering:
    """Those who meet again.

    Attributes:
        keys: names of the job's keys.
        round_no: the round that is left.
        members: its processes, by node rank.
        gone: node ranks whose heartbeats are overdue, as this node's watch has seen it.
    """

    keys: Keys
    round_no: int
    members: Sequence[int]
    gone: Callable[[], Sequence[int]]

    def ready(self, store: Any, node: int) -> None:
        """Say that a node's ranks have ended, and that it comes."""
        store.set(self._ready(node), "1")

    def look(self, store: Any) -> tuple[set[int], set[int]]:
        """Who is to come, and who of them is not ready yet."""
        left = departures.left(store, self.keys, self.round_no, len(self.members))
        gone = {*left, *self.gone()}
        byes = [self.keys.job(f"bye/{member}") for member in self.members]
        coming = {node for node, bye in enumerate(byes) if node not in gone and not store.check([bye])}
        return coming, {node for node in coming if not store.check([self._ready(node)])}

    def meet(self, control: Connection, node: int, check: Callable[[], None], is_over: Callable[[], bool]) -> set[int]:
        """Be ready, and wait until all who are to come are; returns those.

        Args:
            control: connection for short calls.
            node: this one.
            check: raises what ends the wait.
            is_over: whether nobody need be waited for any more.
        """
        control.call("being ready", lambda store: self.ready(store, node))
        pause = threading.Event()
        while True:
            check()
            coming, missing = control.call("gathering", self.look)
            if not missing or is_over():
                return coming
            pause.wait(_POLL)

    def _ready(self, node: int) -> str:
        return self.keys.job(f"ready/{self.round_no}/{node}")


def count_again(control: Connection, keys: Keys, members: int, check: Callable[[], None], deadline: float) -> None:
    """On a new store, where nobody is known yet: wait until as many have come as there were, for as long as a first
    round waits for further nodes."""
    pause = threading.Event()
    while time.monotonic() < deadline:
        check()
        if control.call("gathering", lambda store: int(store.add(keys.claims, 0))) >= members:
            return
        pause.wait(_POLL)


def too_few(settings: RangeSettings, came: int, *, begun: bool) -> RendezvousTimeoutError:
    """The error where the minimum did not come together.

    Args:
        settings: the range.
        came: how many processes there have been.
        begun: whether there has been a round.
    """
    kind = NotReplacedError if begun else RendezvousTimeoutError
    return kind(
        f"fewer than {settings.min_nodes} nodes came together within {settings.timeout:g} s",
        where={"store": f"{settings.host}:{settings.port}"},
        seen=f"{came} process(es) have joined since the job began, this one included",
        expected=f"{settings.min_nodes} to {settings.max_nodes} nodes at the same time",
        hint="look at the missing pods: pending, crashed, or unable to reach this address; or raise "
        "timeouts.rendezvous",
    )


def too_many(settings: RangeSettings, count: int) -> NodeLostError:
    """The error where more processes have joined than the job has nodes and replacements."""
    return NodeLostError(
        "too many processes have joined this job",
        where={"store": f"{settings.host}:{settings.port}"},
        seen=f"{count} processes",
        expected=f"at most {settings.max_nodes} nodes and {settings.max_replacements} replacements",
        hint="look at the pods of this job that ended: evicted, out of memory, or their machine gone",
    )
