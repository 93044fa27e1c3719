"""In a range of nodes: who of a round that is left comes to the next one.

Torch elastic only counts: when the minimum is there, it hopes for some time that more will come. After the first round
the nodes know better: those of the last one come, except who has left or fallen silent. So they gather first, and then
torch elastic need not hope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import NotReplacedError, RendezvousTimeoutError
from . import departures
from .protocol import Keys
from .settings import RangeSettings


@dataclass(frozen=True)
class Gathering:
    """Those who meet again.

    Attributes:
        keys: names of the job's keys.
        round_no: the round that is left.
        members: its processes, by node rank.
        gone: node ranks that have fallen silent, as this node's watch has seen it.
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

    def _ready(self, node: int) -> str:
        return self.keys.job(f"ready/{self.round_no}/{node}")


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
