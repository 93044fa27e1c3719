"""Who owns a node's place on one store. Each claim takes the place from the process before it.

A pod's new process is always newer than what was in its place before: it takes it. A process that survived the loss of
the store before this one brings the number that it had there, and takes the place only from what is older: were it to
take it from a new process, a node that was cut off and replaced would come back and fence its own replacement.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from ..errors import FencedError
from .protocol import Keys, Slot


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
