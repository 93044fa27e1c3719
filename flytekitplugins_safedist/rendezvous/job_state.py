"""Where a job with a range of nodes stands: one small value in the store, moved only by compare_set.

The same key as in a group of fixed size (``Keys.generation``) decides everything: which round counts, who is in it,
whether it is to be left, and how the job ended. Being one value, "all are done" and "somebody wants to join" cannot
both win, and a node that slept through a round change can neither end the job nor believe that it is to upload.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .protocol import SUPERSEDED, End


@dataclass(frozen=True)
class JobState:
    """One reading of the job.

    Attributes:
        round: the round that counts; -1 before the first.
        members: process numbers of its nodes, by node rank.
        moving: its nodes are asked to leave it for a new one.
        end: how the job ended, in this round; or None.
    """

    round: int = -1
    members: tuple[int, ...] = ()
    moving: bool = False
    end: End | None = None

    @property
    def uploader(self) -> int:
        """Process number of the node that uploads: node 0 of the round in which the job ended. -1: there is none."""
        return self.members[0] if self.end is not None and self.members else -1

    def next(self, members: tuple[int, ...]) -> JobState:
        """The round after this one."""
        return JobState(self.round + 1, members)

    def asked_to_move(self) -> JobState:
        """The same round, to be left."""
        return replace(self, moving=True)

    def after(self, round_no: int) -> JobState | None:
        """To be left for a round after ``round_no``, which was on another store; None where it is past that already."""
        return JobState(round_no, moving=True) if self.round < round_no else None

    def ended(self, end: End) -> JobState:
        """The end of the job, in this round."""
        return replace(self, end=end)

    def text(self) -> str:
        """As stored; "" is what a store without the key says."""
        return "" if self == JobState() else json.dumps(asdict(self))

    @classmethod
    def parse(cls, raw: bytes) -> JobState:
        """Read a stored value."""
        if not raw:
            return cls()
        data = json.loads(raw)
        end = data["end"]
        return cls(
            int(data["round"]),
            tuple(int(member) for member in data["members"]),
            bool(data["moving"]),
            None if end is None else End(**{**end, "missing": tuple(end["missing"])}),
        )


def change(store: Any, key: str, wanted: Callable[[JobState], JobState | None]) -> JobState:
    """Move the standing by compare_set; returns how it is then. An ended job stays as it is.

    Args:
        store: the job's.
        key: where the standing is.
        wanted: from the present one, the one to be; None to leave it. Asked again when another node was faster.
    """
    before = bytes(store.compare_set(key, "", ""))
    while True:
        now = JobState.parse(before)
        after = wanted(now) if now.end is None else None
        if after is None:
            return now
        found = bytes(store.compare_set(key, before.decode(), after.text()))
        if found == after.text().encode():
            return after
        before = found


def supersede(store: Any, key: str) -> None:
    """End a job's standing on a store that its nodes have left for a newer one, unless the job has ended."""
    change(store, key, lambda now: now.ended(End("superseded", -1, SUPERSEDED)))
