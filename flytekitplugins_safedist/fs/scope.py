"""``shared_scope``: is a path one file system for the whole job, one per node, or one per rank? Found out by asking.

Every rank leaves a file of its own under the path, all meet, and every rank says whose files it sees. What is seen is
proof: the names are random. What is not seen is believed only after a grace, because network clients are slow to show
it; unless no grace can help: a local file system of one kernel and any of another are two.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import FsError
from .barriers import Occasion
from .calls import retry_os_call
from .dirs import ensure_dir
from .group import Group, default_group
from .identity import Identity
from .mount_info import mount_of
from .process import boot_id
from .stale_files import aside
from .waiting import pauses, refresh

Kind = Literal["job", "node", "rank", "mixed"]

GRACE_S = 75.0
"""Longer than the 60 s for which NFS and parallel file systems have been seen to hide a new name."""


@dataclass(frozen=True)
class SharedScope:
    """Who shares the file system under a path.

    Args:
        kind: "job": one for all ranks; "node": one per node; "rank": one per rank; "mixed": none of these.
        parts: the ranks that share, as disjoint tuples in ascending order.
        path: what was asked about.
        rank: who asked.
    """

    kind: Kind
    parts: tuple[tuple[int, ...], ...]
    path: Path
    rank: int

    @property
    def part(self) -> int:
        """The index of the caller's part."""
        return next(index for index, ranks in enumerate(self.parts) if self.rank in ranks)

    @property
    def leader(self) -> int:
        """The rank that acts for the caller's part: its lowest."""
        return self.parts[self.part][0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the one of its part that acts for it."""
        return self.leader == self.rank


def shared_scope(
    path: str | os.PathLike[str],
    *,
    declared: Literal["job", "node", "rank"] | None = None,
    timeout: float | None = None,
    grace: float = GRACE_S,
    key: str = "",
    group: Group | None = None,
) -> SharedScope:
    """Find out who shares the directory ``path``; every rank must call it, at the same point.

    Args:
        path: a directory; made if it is not there.
        declared: the user's own word, which wins: nothing is probed.
        timeout: seconds for the ranks to come together; see ``barrier``.
        grace: seconds to wait for the files of ranks that might share a slow network file system. They are spent
            only where such files stay away: on separate mounts of network file systems.
        key: names the question; the same in all ranks. Calls of one key are matched in their order, so threads that ask
            at once must each say their own. (Not by path: that may be another one in each rank.)
        group: the ranks; without it ``default_group()``.

    Raises:
        FsError: a rank could not make or write the directory. All ranks get it, naming that rank.
        FsTimeoutError: a rank did not come.
    """
    place = Path(path)
    group = group or default_group()
    me = group.identity
    if me.single:
        ensure_dir(place)
        return SharedScope("job", ((0,),), place, 0)
    call = Occasion(f"scope/{key}", group, timeout)
    if declared is not None:
        return _declared(declared, place, call)
    token = call.agree("token", secrets.token_hex(8))
    probe = aside(place / f"{_prefix(token)[1:]}{me.rank}")
    try:
        report = {"node": me.node_rank, **_leave(place, probe)}
        tables = _all(call.exchange("place", json.dumps(report)), place)
        views = _all(call.exchange("seen", json.dumps(_look(place, token, tables, me, grace))), place)
        call.barrier("read")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    call.close()
    parts = partition([view["seen"] for view in views])
    return SharedScope(kind_of(parts, [table["node"] for table in tables]), parts, place, me.rank)


def _leave(place: Path, probe: Path) -> dict[str, Any]:
    try:
        ensure_dir(place)
        retry_os_call(probe.touch, probe, "leave a probe")
    except FsError as error:
        return {"error": str(error)}
    return {"local": mount_of(place).is_local, "boot": boot_id()}


def _all(texts: Sequence[str], place: Path) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = [json.loads(text) for text in texts]
    broken = {rank: table["error"] for rank, table in enumerate(tables) if "error" in table}
    if broken:
        rank, error = next(iter(broken.items()))
        others = f" (and {len(broken) - 1} more ranks)" if len(broken) > 1 else ""
        raise FsError(f"rank {rank}{others} cannot use the directory", where={"path": place}, seen=error)
    return tables


def _look(
    place: Path, token: str, tables: Sequence[Mapping[str, Any]], me: Identity, grace: float
) -> dict[str, list[int] | str]:
    """The ranks whose probes this rank sees, after all the patience that can help; or why it cannot look."""
    try:
        return {"seen": _seen(place, token, tables, me, grace)}
    except FsError as error:
        return {"error": str(error)}


def _seen(place: Path, token: str, tables: Sequence[Mapping[str, Any]], me: Identity, grace: float) -> list[int]:
    mine = tables[me.rank]
    may_be_late = {rank for rank, table in enumerate(tables) if not (mine["local"] or table["local"])}
    deadline = time.monotonic() + grace
    prefix = _prefix(token)
    for pause in pauses(me.world_size):
        refresh(place / prefix)
        names = retry_os_call(lambda: os.listdir(place), place, "list the probes")  # noqa: PTH208
        found = (name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix))
        seen = {me.rank, *map(int, found)}
        left = deadline - time.monotonic()
        if may_be_late <= seen or left <= 0:
            break
        time.sleep(min(pause, left))
    return sorted(seen)


def _prefix(token: str) -> str:
    """How the names of one call's probes begin, as ``aside`` makes them; behind it comes the rank, then a dot."""
    return f".scope-{token}-"


def partition(views: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Who shares with whom, if rank i sees the ranks ``views[i]``. Pure.

    One sighting is proof of sharing, in both directions, and through third ranks.
    """
    parent = list(range(len(views)))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    for rank, seen in enumerate(views):
        for other in seen:
            low, high = sorted((root(rank), root(other)))
            parent[high] = low
    parts: dict[int, list[int]] = {}
    for rank in range(len(views)):
        parts.setdefault(root(rank), []).append(rank)
    return tuple(tuple(parts[first]) for first in sorted(parts))


def kind_of(parts: Sequence[Sequence[int]], nodes: Sequence[int]) -> Kind:
    """The name of a partition, given each rank's node. Pure."""
    if len(parts) == 1:
        return "job"
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    found = {tuple(part) for part in parts}
    if found == {tuple(ranks) for ranks in by_node.values()}:
        return "node"
    if all(len(part) == 1 for part in parts):
        return "rank"
    return "mixed"


def _declared(kind: Literal["job", "node", "rank"], place: Path, call: Occasion) -> SharedScope:
    me = call.group.identity
    ensure_dir(place)
    if kind == "job":
        parts: tuple[tuple[int, ...], ...] = (tuple(range(me.world_size)),)
    elif kind == "rank":
        parts = tuple((rank,) for rank in range(me.world_size))
    else:
        nodes = [int(text) for text in call.exchange("declared", str(me.node_rank))]
        call.close()
        parts = tuple(tuple(r for r, n in enumerate(nodes) if n == node) for node in sorted(set(nodes)))
    return SharedScope(kind, parts, place, me.rank)
