"""What is in the store: names of keys, meaning of values. Pure; no store, no clock, no thread.

Every value is a decimal counter or a short text. The generation is the only number that decides anything: it moves by
``compare_set(g -> g + 1)``, or ends by ``compare_set(g -> "end ...")``, so that all nodes agree on its history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import (
    FencedError,
    GroupClosedError,
    NotReplacedError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreLostError,
)

VERSION = 2
FIRST = "0"

_END = "end "
"""Starts the value of ``generation`` when the group is over."""

EndKind = Literal["done", "failed", "timeout", "lost", "replacements", "superseded"]
"""``timeout``: nodes never came; ``lost``: nodes of a job that had begun did not come back; ``replacements``: that
happened too often; ``superseded``: the other nodes have gone over to a newer node 0."""

SUPERSEDED = "a newer node 0 has taken the place of the one that holds this store"

NAMED_AT_MOST = 16
"""Missing nodes named one by one in a message; the rest are counted."""


@dataclass(frozen=True)
class Keys:
    """Names of the keys of one job. ``run_id`` keeps two jobs apart that meet on one address by mistake; the first
    thing that they read says so (:mod:`.strangers`)."""

    run_id: str

    def _key(self, name: str) -> str:
        return f"safedist/{self.run_id}/{name}"

    @property
    def hello(self) -> str:
        """What node 0 says about the group; the first thing a node reads, and the same for every run: another job's
        node finds out where it is, instead of waiting for a key that never comes."""
        return "safedist/hello"

    @property
    def generation(self) -> str:
        """The generation that nodes should be in; or ``end`` and why (:class:`End`)."""
        return self._key("gen")

    @property
    def claims(self) -> str:
        """How many processes ever claimed a slot."""
        return self._key("claims")

    @property
    def byes(self) -> str:
        """How many processes left in good order."""
        return self._key("byes")

    def bye(self, node: int, incarnation: int) -> str:
        """Whether this process of a node has left in good order."""
        return self._key(f"bye/{node}/{incarnation}")

    @property
    def carried(self) -> str:
        """What survives of the job when this store is lost (:class:`~.carried.Carried`)."""
        return self._key("carried")

    @property
    def replacements(self) -> str:
        """How many times a node's place was taken by a new process."""
        return self._key("replaced")

    def incarnation(self, node: int) -> str:
        """What has claimed this node's slot (:class:`~.slots.Slot`); the latest owns it."""
        return self._key(f"inc/{node}")

    def arrived(self, node: int) -> str:
        """The last generation this node arrived in: read only to name the missing."""
        return self._key(f"at/{node}")

    def heartbeat(self, node: int) -> str:
        """Counts up while the node's agent is alive."""
        return self._key(f"beat/{node}")

    def count(self, generation: int) -> str:
        """Arrivals in this generation."""
        return self._key(f"n/{generation}")

    def offer(self, generation: int) -> str:
        """What node 0 offers to this generation: addresses, as a JSON object of texts."""
        return self._key(f"lead/{generation}")

    def go(self, generation: int) -> str:
        """The decision about this generation (:class:`Go`), taken once by compare_set."""
        return self._key(f"go/{generation}")

    def wakeup(self, generation: int) -> str:
        """Set when this generation is no longer the current one: wakes those who run in it."""
        return self._key(f"wakeup/{generation}")

    def judge(self, generation: int) -> str:
        """The one node that looks up who is missing when deadlines expire."""
        return self._key(f"judge/{generation}")

    def job(self, name: str) -> str:
        """Keys of :class:`~.jobstore.JobStore`."""
        return self._key(f"job/{name}")


@dataclass(frozen=True)
class Go:
    """Whether a generation came together: ``go`` with node 0's ``values``, or not (it moved on, or ended).

    ``carried`` is the copy of :class:`~.carried.Carried`, as text, that every node keeps from then on.
    """

    go: bool
    values: Mapping[str, str] = field(default_factory=dict)
    carried: str = ""

    def text(self) -> str:
        """As stored."""
        return json.dumps({"go": self.go, "values": dict(self.values), "carried": self.carried}, ensure_ascii=False)

    @classmethod
    def parse(cls, raw: bytes) -> Go:
        """Read a stored value."""
        found = _fields(raw)
        return cls(
            bool(found["go"]), {str(key): str(value) for key, value in found["values"].items()}, found["carried"]
        )


@dataclass(frozen=True)
class End:
    """Why the group ended: the first one to say so.

    Attributes:
        kind: what ended it.
        node: the node that said so.
        text: the outcome, for people and for the other agents.
        missing: nodes that did not come.
    """

    kind: EndKind
    node: int
    text: str
    missing: tuple[int, ...] = ()

    def text_value(self) -> str:
        """As stored, in place of the generation: the end and its reason are one compare_set."""
        return _END + json.dumps(
            {"kind": self.kind, "node": self.node, "text": self.text, "missing": list(self.missing)},
            ensure_ascii=False,
        )

    @classmethod
    def parse(cls, raw: bytes) -> End:
        """Read a stored value, without its mark."""
        found = _fields(raw)
        return cls(found["kind"], int(found["node"]), str(found["text"]), tuple(int(node) for node in found["missing"]))

    def error(self, node: int, *, holds_store: bool = False) -> RendezvousError:
        """The error for ``node``, which finds the group over; ``holds_store``: the store is in its process."""
        if self.kind == "superseded":
            return self._superseded(node, holds_store=holds_store)
        if self.kind in ("timeout", "lost"):
            kind = NotReplacedError if self.kind == "lost" else RendezvousTimeoutError
            return kind(
                self.text,
                where={"node": node, "found by node": self.node},
                seen=f"missing: {', '.join(map(str, self.missing)) or 'none'}",
                expected="every node of the job",
                hint="look at the missing pods: pending, crashed, or unable to reach node 0; or raise "
                "timeouts.rendezvous",
            )
        where = {"node": node, "closed by node": self.node}
        if self.kind == "replacements":
            return GroupClosedError(self.text, where=where)
        return GroupClosedError("the group is closed", where=where, seen=f"{self.kind}: {self.text}")

    def _superseded(self, node: int, *, holds_store: bool) -> RendezvousError:
        where = {"node": node, "told by node": self.node}
        if holds_store:
            hint = "nothing, if the pod was recreated; otherwise two pods carry the same name"
            return FencedError("another process has taken this one's place", where=where, seen=SUPERSEDED, hint=hint)
        return StoreLostError("this store is left for a newer one", where=where, seen=SUPERSEDED)


@dataclass(frozen=True)
class Slot:
    """What has claimed a place on this store.

    Attributes:
        new: how many processes did that had been on no store before.
        brought: the highest number that a survivor of another store brought; 0 for none.
    """

    new: int = 0
    brought: int = 0

    @property
    def number(self) -> int:
        """The number of the process that owns the place: higher with every claim. 0: nobody does."""
        return self.new + self.brought

    def claimed(self, brought: int) -> Slot | None:
        """The place after a claim; None where the process that claims is the older one.

        Args:
            brought: the process's number on the store before; 0 for a process that was on none.
        """
        if brought == 0:
            return Slot(self.new + 1, self.brought)
        return Slot(0, brought) if self.new == 0 and brought > self.brought else None

    def text(self, claim: str) -> str:
        """As stored, with a name for the claim: two processes that claim at once would else write the same text, and
        both take it for their own."""
        return f"{self.new} {self.brought} {claim}"

    @classmethod
    def parse(cls, raw: bytes) -> Slot:
        """Read a stored value."""
        new, brought, *_ = raw.decode().split() or ("0", "0")
        return cls(int(new), int(brought))


@dataclass(frozen=True)
class State:
    """One atomic reading of the group by one node.

    Attributes:
        generation: the current generation; -1 when the group has ended.
        end: how it ended, or None.
        owner: the latest process that claimed this node's slot.
    """

    generation: int
    end: End | None
    owner: int

    @classmethod
    def parse(cls, generation: bytes, owner: bytes) -> State:
        """Read the values of ``generation`` and ``incarnation``."""
        text = generation.decode()
        if text.startswith(_END):
            return cls(-1, End.parse(text[len(_END) :].encode()), Slot.parse(owner).number)
        return cls(int(text), None, Slot.parse(owner).number)

    def check(self, node: int, incarnation: int) -> int:
        """The generation, if the group lives and this process still owns its slot.

        Raises:
            FencedError: another process took its place.
            GroupClosedError, RendezvousTimeoutError: the group has ended.
        """
        if self.owner != incarnation:
            raise FencedError(
                "another process took this node's place in the group",
                where={"node": node},
                seen=f"process {self.owner} owns the slot",
                expected=f"process {incarnation}, which is this one",
                hint="nothing, if the pod was recreated; otherwise two pods carry the same node rank",
            )
        if self.end is not None:
            raise self.end.error(node, holds_store=node == 0)
        return self.generation


@dataclass(frozen=True)
class Hello:
    """What node 0 expects of those who come: the run, the protocol, the size of the group; and which store this is."""

    nodes: int
    store: str
    run: str
    version: int = VERSION

    def text(self) -> str:
        """As stored."""
        return json.dumps({"version": self.version, "nodes": self.nodes, "store": self.store, "run": self.run})

    @classmethod
    def parse(cls, raw: bytes) -> Hello:
        """Read a stored value."""
        found = _fields(raw)
        return cls(int(found["nodes"]), str(found["store"]), str(found["run"]), int(found["version"]))


def supersede(store: Any, keys: Keys, node: int) -> None:
    """End a group of fixed size for a newer one, unless it has ended; ``node`` is who says so."""
    before = bytes(store.compare_set(keys.generation, "", FIRST))
    end = End("superseded", node, SUPERSEDED).text_value()
    while not before.decode().startswith(_END):
        found = bytes(store.compare_set(keys.generation, before.decode(), end))
        if found.decode() == end:
            store.set(keys.wakeup(int(before)), "1")
        before = found


def describe_nodes(nodes: Sequence[int], names: Sequence[str]) -> str:
    """``nodes 1 (job-worker-0), 3 (job-worker-2)``: at most :data:`NAMED_AT_MOST`, then how many more."""
    listed = [f"{node} ({names[node]})" if node < len(names) else str(node) for node in nodes[:NAMED_AT_MOST]]
    more = len(nodes) - len(listed)
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(listed) + (f" and {more} more" if more else "")


def _fields(raw: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(raw)
    return value
