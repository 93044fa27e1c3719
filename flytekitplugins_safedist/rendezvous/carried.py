"""What a job keeps when the process that holds its store is lost. Pure: values in, values out.

Every node has a copy. Those that survive bring theirs to the store that comes next: in any order, stale and fresh, more
than once. Merging is a join (commutative, associative, idempotent), so what the job knows in the end depends on none
of that. Budgets are kept as what they were spent on (a round, a store), not as counts: two survivors that both tell of
one loss cannot make it two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

Budget = Literal["restarts", "losses"]
K = TypeVar("K", int, str)

_TEXT_LIMIT = 200
"""Characters of a reason. Every node gets all of them with each round."""

_TEXTS = 8
"""Reasons that are kept, of the latest rounds; of the others only that they were spent."""


@dataclass(frozen=True, order=True)
class Unit:
    """What one unit of a budget went for: when (nanoseconds, by the clock of the node that spent it), and why."""

    time_ns: int
    why: str


@dataclass(frozen=True)
class Carried:
    """What survives of a job.

    Attributes:
        round: the highest round that may have begun; -1 before the first. None up to it is used again.
        restarts: of the user's ``max_restarts``, by the round that failed.
        losses: nodes that were lost, by the round that ended for it.
        stores: the same budget, where the job's store was lost with its node; by the store's id.
        retaken: how often a new process took the place of one before it.
    """

    round: int = -1
    restarts: Mapping[int, Unit] = field(default_factory=dict)
    losses: Mapping[int, Unit] = field(default_factory=dict)
    stores: Mapping[str, Unit] = field(default_factory=dict)
    retaken: int = 0

    def merge(self, other: Carried) -> Carried:
        """What both know."""
        return Carried(
            max(self.round, other.round),
            _union(self.restarts, other.restarts),
            _union(self.losses, other.losses),
            _union(self.stores, other.stores),
            max(self.retaken, other.retaken),
        )

    @property
    def interrupted(self) -> bool:
        """Whether the job has run, and something became of it: not told by ``round``, which only *may* have begun."""
        return bool(self.restarts or self.losses or self.stores or self.retaken)

    def reached(self, round_no: int) -> Carried:
        """The same, when ``round_no`` may have begun."""
        return self if round_no <= self.round else replace(self, round=round_no)

    def taken_again(self) -> Carried:
        """The same, when one more place was taken by a new process."""
        return replace(self, retaken=self.retaken + 1)

    def without_store(self, store: str, unit: Unit) -> Carried:
        """The same, when ``store`` was lost and another has taken its place."""
        return replace(self, stores=_union(self.stores, {store: _short(unit)}))

    @property
    def lost(self) -> int:
        """How often nodes were lost."""
        return len(self.losses) + len(self.stores)

    def spend(self, budget: Budget, limit: int, round_no: int, unit: Unit) -> tuple[Carried, int | None]:
        """Take one of ``limit`` units for the end of ``round_no``; once for a round, however many ask.

        Returns what is known then, and the number of the unit (from 1) or None when the budget is used up.
        """
        spent: Mapping[int, Unit] = getattr(self, budget)
        count = len(spent) if budget == "restarts" else self.lost
        # A round ends once: whatever else is said of it later changes nothing.
        if round_no <= max(spent, default=-1):
            return self, count
        if count >= limit:
            return self, None
        more = _union(spent, {round_no: _short(unit)})
        return (replace(self, restarts=more) if budget == "restarts" else replace(self, losses=more)), count + 1

    def told(self) -> str:
        """For people who were not there: what the job has been through; "" where that is nothing."""
        lost = {**{f"round {at}": unit for at, unit in self.losses.items()}, **self.stores}
        named = {f"round {at}": unit for at, unit in self.restarts.items()}
        parts = [
            f"{len(spent)} {name} ({'; '.join(unit.why for unit in sorted(spent.values()) if unit.why)})"
            for name, spent in (("restart(s)", named), ("time(s) nodes were lost", lost))
            if spent
        ]
        return ", ".join(parts)

    def text(self) -> str:
        """As stored; "" is what a store without the key says."""
        if self == Carried():
            return ""
        spent = [_listed(self.restarts), _listed(self.losses), _listed(self.stores)]
        return json.dumps([self.round, *spent, self.retaken], ensure_ascii=False)

    @classmethod
    def parse(cls, raw: bytes) -> Carried:
        """Read a stored value."""
        if not raw:
            return cls()
        round_no, restarts, losses, stores, retaken = json.loads(raw)
        return cls(int(round_no), _mapped(restarts, int), _mapped(losses, int), _mapped(stores, str), int(retaken))


def change(store: Any, key: str, wanted: Callable[[Carried], Carried]) -> Carried:
    """Change what a job's store knows, by compare_set; returns what it knows then.

    Args:
        store: the job's.
        key: where it is.
        wanted: from what is known, what is to be. Asked again when another node was faster.
    """
    before = bytes(store.compare_set(key, "", ""))
    while True:
        now = Carried.parse(before)
        after = wanted(now)
        if after == now:
            return now
        found = bytes(store.compare_set(key, before.decode(), after.text()))
        if found == after.text().encode():
            return after
        before = found


def _union(first: Mapping[K, Unit], other: Mapping[K, Unit]) -> Mapping[K, Unit]:
    merged: dict[K, Unit] = dict(first)
    for at, unit in other.items():
        merged[at] = min(unit, merged.get(at, unit))
    for at in sorted(merged)[:-_TEXTS]:
        merged[at] = Unit(0, "")
    return merged


def _listed(spent: Mapping[K, Unit]) -> list[list[object]]:
    return [[at, unit.time_ns, unit.why] for at, unit in sorted(spent.items())]


def _mapped(listed: list[list[Any]], key: Callable[[Any], K]) -> Mapping[K, Unit]:
    return {key(at): Unit(int(time_ns), str(why)) for at, time_ns, why in listed}


def _short(unit: Unit) -> Unit:
    why = unit.why[:_TEXT_LIMIT].encode("utf-8", "backslashreplace").decode()
    return replace(unit, why=why)
