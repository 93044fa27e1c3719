"""A rank's failure as the whole job sees it, and which of several counts as the cause."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """How a rank failed, as the whole job sees it.

    Attributes:
        node, rank: where; ``rank`` is the global rank.
        time_ns: when, by that node's clock (``time.time_ns``).
        consequence: whether the rank failed only because another one had (it lost its peer): 0 for no, and the more the
            less its failure explains.
        text: the outcome record, as text.
    """

    node: int
    rank: int
    time_ns: int
    consequence: int
    text: str

    def dump(self) -> str:
        """As stored."""
        return json.dumps([self.node, self.rank, self.time_ns, self.consequence, self.text], ensure_ascii=False)

    @classmethod
    def parse(cls, raw: bytes) -> Failure:
        """Read a stored value."""
        node, rank, time_ns, consequence, text = json.loads(raw)
        return cls(int(node), int(rank), int(time_ns), int(consequence), str(text))

    def earlier_than(self, other: Failure) -> bool:
        """Whether this is nearer to the root: causes before consequences, then by time, then by rank."""
        return (self.consequence, self.time_ns, self.rank) < (other.consequence, other.time_ns, other.rank)


def propose(store: Any, key: str, mine: Failure, dumped: str) -> bytes:
    """Put my failure in place unless one nearer to the root is there; returns what is in place."""
    before = ""
    while True:
        if before and not mine.earlier_than(Failure.parse(before.encode())):
            return before.encode()
        found: str = store.compare_set(key, before, dumped).decode()
        if found == dumped:
            return dumped.encode()
        before = found
