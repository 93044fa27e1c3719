"""The generations of a group of fixed size, as its store has them: which one counts, and what was decided about each.

Reads and writes, each a request or two; nothing here waits for another node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..errors import StoreLostError
from . import slots
from .carried import Carried, change
from .connections import Links
from .protocol import FIRST, Go, Keys, State
from .settings import GroupSettings


@dataclass(frozen=True)
class Round:
    """A generation that came together: its number and what node 0 offers to it."""

    generation: int
    values: Mapping[str, str]


class Generations:
    """One node's way to them.

    Args:
        links: connections to the store.
        keys: names of the job's keys.
        settings: who this node is.
    """

    def __init__(self, links: Links, keys: Keys, settings: GroupSettings) -> None:
        self._links = links
        self._keys = keys
        self._settings = settings

    def read(self) -> State:
        """Where the group stands, and who owns this node's place."""
        keys, node = self._keys, self._settings.node_rank

        def read(store: Any) -> State:
            # compare_set reads, and writes the first generation if nobody has. One request then reads generation and
            # owner together: a process that sees a generation its replacement may count in also sees that it is fenced.
            store.compare_set(keys.generation, "", FIRST)
            return State.parse(*store.multi_get([keys.generation, keys.incarnation(node)]))

        return self._links.control.call("reading the generation", read)

    def replace(self, generation: int, value: str) -> None:
        """Put ``value`` (the next one, or the end) in the place of ``generation``, unless another has."""
        key, before = self._keys.generation, str(generation)
        self._links.control.call("ending a round", lambda store: store.compare_set(key, before, value))
        self.wake(generation)

    def wake(self, generation: int) -> None:
        """Wake those who wait for ``generation`` to form, and those who run in it."""
        self.decide(generation, Go(go=False))
        wakeup = self._keys.wakeup(generation)
        self._links.control.call("waking the others", lambda store: store.set(wakeup, "1"))

    def offer(self, generation: int, values: Mapping[str, str]) -> None:
        """Node 0: what the ranks of ``generation`` meet at."""
        key, text = self._keys.offer(generation), json.dumps(dict(values))
        self._links.control.call("offering addresses", lambda store: store.set(key, text))

    def arrive(self, generation: int) -> int:
        """Count this node in; returns how many are there."""
        keys, node = self._keys, self._settings.node_rank

        def arrive(store: Any) -> int:
            store.set(keys.arrived(node), str(generation))
            return int(store.add(keys.count(generation), 1))

        return self._links.control.call("arriving", arrive)

    def complete(self, generation: int) -> Go:
        """Last to arrive: everyone may go, unless the generation moved on meanwhile."""
        offer, key = self._keys.offer(generation), self._keys.carried

        def read(store: Any) -> tuple[bytes, Carried]:
            return bytes(store.get(offer)), change(store, key, lambda now: now.reached(generation))

        offered, known = self._links.control.call("completing the round", read)
        return self.decide(generation, Go(go=True, values=json.loads(offered), carried=known.text()))

    def decide(self, generation: int, wanted: Go) -> Go:
        """Take the decision about ``generation``, once for all nodes, and wake those who wait for it."""
        key = self._keys.go(generation)

        def decide(store: Any) -> bytes:
            decided = bytes(store.compare_set(key, "", wanted.text()))
            # compare_set wakes nobody who waits for the key; writing the same value again does.
            store.set(key, decided)
            return decided

        return Go.parse(self._links.control.call("deciding about the round", decide))

    def peek(self, generation: int) -> Go | None:
        """The decision about ``generation``; None where there is none yet."""
        key = self._keys.go(generation)

        def look(store: Any) -> bytes | None:
            return bytes(store.get(key)) if store.check([key]) else None

        found = self._links.control.call("looking for the decision", look)
        return None if found is None else Go.parse(found)

    def heard(self, came: Future[bytes], timeout: float) -> Go:
        """The decision that a waiting call has brought, within ``timeout`` seconds.

        Raises:
            StoreLostError: the store went away meanwhile.
        """
        from torch.distributed import DistError

        settings = self._settings
        try:
            return Go.parse(came.result(timeout))
        except DistError as error:
            raise StoreLostError(
                "the job's store went away while this node waited for the others",
                where={"node": settings.node_rank, "store": f"{settings.host}:{settings.port}"},
                seen=str(error).splitlines()[0],
                hint="look at node 0's pod first",
            ) from error

    def missing(self, generation: int) -> tuple[int, ...]:
        """The nodes that have not arrived in ``generation``."""
        keys, nodes = self._keys, self._settings.nodes
        return self._links.control.call(
            "finding out who is missing", lambda store: slots.missing(store, keys, nodes, generation)
        )
