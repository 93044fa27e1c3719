"""``barrier`` and ``exchange``: all ranks come to one point, or all learn who did not.

Who sees that all have come, and who runs out of patience, leave one verdict, the first wins: so it cannot be that some
ranks pass and others fail, and nobody waits on after somebody gave up.
"""

from __future__ import annotations

import contextlib
import json
import time

from ..errors import FsError, FsTimeoutError
from . import mount_info
from .context import timeout_s
from .group import Group, default_group
from .waiting import brisk_pauses

LOOK_S = 0.25
FAREWELL_S = 10.0
"""How long rank 0, where it holds the store, stays for those who have come and have yet to read that all have."""


def barrier(name: str = "", *, timeout: float | None = None, group: Group | None = None) -> None:
    """Return when every rank of the job has called this (with this name, as often as this one).

    Args:
        name: sets apart barriers that different threads wait at.
        timeout: seconds; without it SAFEDIST_FS_TIMEOUT, without that five minutes. The first rank whose time is up
            ends it for all.
        group: the ranks; without it ``default_group()``.

    Raises:
        FsTimeoutError: in every rank, naming those that did not come.
    """
    _meet(group or default_group(), f"barrier/{name}", None, timeout)


def exchange(name: str, text: str, *, timeout: float | None = None, group: Group | None = None) -> list[str]:
    """A barrier at which every rank leaves a text; return those of all ranks, in the order of their ranks.

    Raises:
        FsTimeoutError: in every rank, naming those that did not come.
    """
    return _meet(group or default_group(), f"exchange/{name}", text, timeout)


class Occasion:
    """One collective call, with all the points at which its ranks meet.

    A rank that fails before a point is not one turn behind in the next call: the call is counted once, when it begins.

    Args:
        name: what the ranks are called to; calls of one name are matched in their order.
        group: the ranks.
        timeout: seconds at each point; see ``barrier``.
    """

    def __init__(self, name: str, group: Group, timeout: float | None) -> None:
        self.group, self.timeout = group, timeout
        self.place = f"{name}/{group.turn(name)}"
        self._points: list[str] = []

    def agree(self, point: str, text: str) -> str:
        """What the first rank to come has proposed."""
        return self.group.coordination.put_once(self._at(point), text)

    def exchange(self, point: str, text: str) -> list[str]:
        """As the function, at one point of this call."""
        return _meet_at(self.group, self._at(point), text, self.timeout)

    def barrier(self, point: str) -> None:
        """As the function, at one point of this call."""
        _meet_at(self.group, self._at(point), None, self.timeout)

    def leave_word(self, point: str, text: str) -> None:
        """Take part in the ``exchange`` at a point without waiting: for a rank that must leave at once."""
        coordination, me, place = self.group.coordination, self.group.identity, self._at(point)
        coordination.put(f"{place}/text/{me.rank}", text)
        if coordination.arrive(place, me.rank) >= me.world_size:
            coordination.put_once(f"{place}/end", _collect(self.group, place, with_texts=True))

    def close(self) -> None:
        """Say that this rank will ask for nothing of this call again; the last one clears its notes away."""
        coordination, me = self.group.coordination, self.group.identity
        try:
            if coordination.arrive(f"{self.place}/gone", me.rank) >= me.world_size:
                for key in [*self._points, f"{self.place}/gone"]:
                    coordination.clear(key, me.world_size)
        except FsError:  # whoever held the coordination store has left it; with it go the notes
            return

    def _at(self, point: str) -> str:
        key = f"{self.place}/{point}"
        self._points.append(key)
        return key


def _meet(group: Group, name: str, text: str | None, timeout: float | None) -> list[str]:
    turn = group.turn(name)
    texts = _meet_at(group, f"{name}/{turn}", text, timeout)
    if turn > 0:  # whoever is here has left the turn before: nobody will ask for it again
        with contextlib.suppress(FsError):  # rank 0 may have ended, and the store with it: the notes are gone
            group.coordination.forget(f"{name}/{turn - 1}", group.identity.rank)
    return texts


def _meet_at(group: Group, place: str, text: str | None, timeout: float | None) -> list[str]:
    coordination, me = group.coordination, group.identity
    began = time.monotonic()
    limit = timeout_s(timeout)
    if text is not None:
        coordination.put(f"{place}/text/{me.rank}", text)
    complete = coordination.arrive(place, me.rank) >= me.world_size
    verdict: str | None = None
    while verdict is None:
        left = limit - (time.monotonic() - began)
        if complete:
            verdict = coordination.put_once(f"{place}/end", _collect(group, place, with_texts=text is not None))
        elif left <= 0:
            verdict = coordination.put_once(f"{place}/end", _missing(group, place, limit))
        else:
            verdict = coordination.wait(f"{place}/end", min(LOOK_S, left))
            complete = verdict is None and coordination.count(place) >= me.world_size
    outcome = json.loads(verdict)
    if coordination.held_by_rank_0:
        _see_off(group, place, me.world_size - len(outcome.get("missing", ())))
    if "missing" in outcome:
        raise _gave_up(group, place, outcome)
    texts: list[str] = outcome["texts"]
    return texts


def _see_off(group: Group, place: str, came: int) -> None:
    """Say that the verdict is read. Rank 0 waits until all say so: it may end next, and the store with it."""
    try:
        left = group.coordination.arrive(f"{place}/left", group.identity.rank)
        if group.identity.rank == 0:
            deadline = time.monotonic() + FAREWELL_S
            for pause in brisk_pauses(group.identity.world_size):
                if left >= came or time.monotonic() >= deadline:
                    return
                time.sleep(pause)
                left = group.coordination.count(f"{place}/left")
    except FsError:  # rank 0 has seen this rank's word, and is gone before its answer is here
        return


def _collect(group: Group, place: str, *, with_texts: bool) -> str:
    if not with_texts:
        return json.dumps({"texts": []})
    texts = []
    for rank in range(group.identity.world_size):
        text = group.coordination.wait(f"{place}/text/{rank}", 120.0)  # left before arriving; perhaps not visible yet
        if text is None:
            raise FsError("a rank's note is not there", where={"rank": rank, "store": group.coordination.where})
        texts.append(text)
    return json.dumps({"texts": texts})


def _missing(group: Group, place: str, limit: float) -> str:
    everyone = range(group.identity.world_size)
    came = group.coordination.members(place, everyone)
    waited = f"{limit:.1f} s by rank {group.identity.rank} on {mount_info.host()}"
    return json.dumps({"missing": [rank for rank in everyone if rank not in came], "waited": waited})


def _gave_up(group: Group, place: str, outcome: dict[str, object]) -> FsTimeoutError:
    missing = outcome["missing"]
    listed = ", ".join(str(rank) for rank in missing) if isinstance(missing, list) else str(missing)
    return FsTimeoutError(
        f"ranks did not come to the meeting point: {listed or 'none, but too late'}",
        where={"point": place, "rank": group.identity, "store": group.coordination.where},
        seen=f"waited {outcome['waited']}",
        expected=f"{group.identity.world_size} ranks",
        hint="see what these ranks do instead: a hang before this point, an early return, a death, or the same call "
        "with another name or path",
    )
