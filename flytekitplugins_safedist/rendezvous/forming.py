"""How the nodes that torch elastic has brought together make one round of it: its number, its members, its addresses.

They tell each other on the store that torch elastic made for this round alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .carried import Carried
from .client import Connection

T = TypeVar("T")

_POLL = 0.05
"""Seconds between two looks for what another node is about to say."""

_RECORD = "safedist/round"
_MEMBER = "safedist/member/"
"""Keys under torch elastic's own prefix of the round."""


@dataclass(frozen=True)
class Formed:
    """A round that came together.

    Attributes:
        round: its number.
        members: process numbers of its nodes, by node rank.
        values: what its node 0 offers.
        known: what the job knows.
        store: of this round alone, for torch elastic's agent.
    """

    round: int
    members: tuple[int, ...]
    values: Mapping[str, str]
    known: Carried
    store: Any


class RoundStore:
    """The store of one round.

    Args:
        store: torch elastic's.
        connection: the connection that it is on.
        patience: seconds that another node may take.
        check: raises what ends the wait for another node.
    """

    def __init__(self, store: Any, connection: Connection, patience: float, check: Callable[[], None]) -> None:
        self._store = store
        self._connection = connection
        self._patience = patience
        self._check = check

    def enter(self, rank: int, number: int) -> None:
        """Say which process has ``rank``."""
        self._within(lambda: self._store.set(f"{_MEMBER}{rank}", str(number)))

    def members(self, size: int) -> tuple[int, ...] | None:
        """Node 0: the process of each rank; None where one did not say so in time."""
        keys = [f"{_MEMBER}{rank}" for rank in range(size)]
        if not self._await(keys):
            return None
        return tuple(int(self._within(lambda key=key: self._store.get(key))) for key in keys)  # type: ignore[misc]

    def tell(self, number: int, members: tuple[int, ...], values: Mapping[str, str], known: Carried) -> None:
        """Node 0: what the round is."""
        record = json.dumps({"round": number, "members": members, "values": dict(values), "carried": known.text()})
        self._within(lambda: self._store.set(_RECORD, record))

    def hear(self) -> Formed | None:
        """What node 0 told; None where nothing came in time."""
        if not self._await([_RECORD]):
            return None
        found = json.loads(self._within(lambda: bytes(self._store.get(_RECORD))))
        known = Carried.parse(found["carried"].encode())
        return Formed(int(found["round"]), tuple(found["members"]), found["values"], known, self._store)

    def _within(self, op: Callable[[], T]) -> T:
        return self._connection.call("forming the round", lambda _: op())

    def _await(self, keys: list[str]) -> bool:
        deadline, pause = time.monotonic() + self._patience, threading.Event()
        while not self._within(lambda: self._store.check(keys)):
            self._check()
            if time.monotonic() > deadline:
                return False
            pause.wait(_POLL)
        return True
