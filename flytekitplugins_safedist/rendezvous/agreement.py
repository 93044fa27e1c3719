"""What the agents of one round say to each other so that all ranks save at one step: keys on the job's store.

The steps are in :mod:`..ranks.shared_page`. Every method is one call of a raw store, without waiting. A call has four
stages, each a counter of the nodes that are there; a node never goes on to the next before all have reached this one:

``ready``   knows of the call. Only then do ranks stand still: for as long as the next two stages take, not for as long
            as news take to get around.
``heard``   has called its ranks, and put the highest floor of theirs in place.
``done``    expects nothing more of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from .protocol import Keys

T = TypeVar("T")
Stage = Literal["ready", "heard", "done"]


class _Call(Protocol):
    def __call__(self, what: str, op: Callable[[Any], T]) -> T: ...


@dataclass(frozen=True)
class News:
    """One look at a round.

    Attributes:
        preempted: whether a node of it was told to stop.
        listened: whether a rank of it would do something about that.
        call: number of the latest call; 0 before the first.
    """

    preempted: bool
    listened: bool
    call: int


@dataclass(frozen=True)
class Agreed:
    """What all nodes come to.

    Attributes:
        step: at which all ranks save; None where no rank saves by steps.
        urgent: whether a node was told to stop.
    """

    step: int | None
    urgent: bool


class RoundAgreement:
    """One node's way to the agreement of one round. Every method may raise
    :class:`~flytekitplugins_safedist.errors.StoreLostError`."""

    def __init__(self, call: _Call, keys: Keys, *, round_no: int, nodes: int) -> None:
        self._call = call
        self._keys = keys
        self._round = round_no
        self.nodes = nodes

    def look(self) -> News:
        """What is new."""
        told, listeners, call = self._key("told"), self._key("listeners"), self._key("call")

        def look(store: Any) -> News:
            # compare_set with nothing for nothing: a read that does not wait for a key that is not there.
            number = int(store.compare_set(call, "", "") or 0)
            return News(store.add(told, 0) > 0, store.add(listeners, 0) > 0, number)

        return self._call("asking whether the ranks are to save", look)

    def tell(self) -> None:
        """Say that this node was told to stop."""
        key = self._key("told")
        self._call("saying that this node is told to stop", lambda store: store.add(key, 1))

    def listen(self) -> None:
        """Say that a rank of the job would do something about a preemption."""
        key = self._key("listeners")
        self._call("saying that ranks listen", lambda store: store.add(key, 1))

    def begin(self, latest: int) -> int:
        """Begin the call after ``latest``, unless another node has; returns the number of the call that counts."""
        key, before = self._key("call"), str(latest) if latest else ""
        found = self._call("calling", lambda store: store.compare_set(key, before, str(latest + 1)))
        return int(found)

    def arrive(self, stage: Stage, number: int) -> None:
        """Say that this node has reached a stage of a call; once per node."""
        key = self._key(f"{stage}/{number}")
        self._call("saying how far a call is", lambda store: store.add(key, 1))

    def all_at(self, stage: Stage, number: int) -> bool:
        """Whether every node has reached a stage of a call."""
        key = self._key(f"{stage}/{number}")
        return self._call("asking how far a call is", lambda store: int(store.add(key, 0)) >= self.nodes)

    def propose(self, number: int, floor: int | None, *, urgent: bool) -> None:
        """Put this node's highest floor in place, unless a higher one is there; and arrive at ``heard``.

        Args:
            number: of the call.
            floor: the earliest step at which all ranks of this node can save; None where none saves by steps.
            urgent: whether this node knows of one that was told to stop.
        """
        place, heard, hurry = (self._key(f"{name}/{number}") for name in ("floor", "heard", "urgent"))

        def propose(store: Any) -> None:
            if urgent:
                store.set(hurry, "1")
            before = b""
            while floor is not None and (not before or int(before) < floor):
                found = bytes(store.compare_set(place, before.decode(), str(floor)))
                if found == str(floor).encode():
                    break
                before = found
            # In this order: who sees all nodes arrive sees what they have put in place.
            store.add(heard, 1)

        self._call("saying how far the ranks are", propose)

    def agreed(self, number: int) -> Agreed:
        """What all nodes come to, once all are at ``heard``."""
        place, hurry = self._key(f"floor/{number}"), self._key(f"urgent/{number}")

        def agreed(store: Any) -> Agreed:
            floor = bytes(store.compare_set(place, "", ""))
            return Agreed(int(floor) if floor else None, bool(store.compare_set(hurry, "", "")))

        return self._call("asking for the step", agreed)

    def _key(self, name: str) -> str:
        return self._keys.job(f"agree/{self._round}/{name}")
