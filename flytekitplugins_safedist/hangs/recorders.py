"""What a rank waits in, asked from outside: torch's flight recorders, or how often it has waited for Horovod.

torch has a recorder for gloo, one for NCCL, and since 2.15 one for each other backend; a thread of its own in C++
answers on a socket, without Python's lock, also where Python stands still. Of groups it tells names only: who their
members are is in a file beside the socket (:mod:`.evidence`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import stacks
from .evidence import groups_file, ranks_of, text_of
from .stacks import Stack
from .waits import HOROVOD, Wait

READ_SECONDS = 5.0
"""For a rank to answer all that is asked. It takes a millisecond; a second where it holds 20,000 operations."""

LOCK_SECONDS = 0.5
"""For Python's lock, by somebody who needs it for less than a millisecond."""

LATEST = 16
"""Operations of each rank, for who has called which in the place of another."""

_ANY = {"gloo": "fr_trace_json", "nccl": "dump_nccl_trace_json"}
"""What to ask a rank that has noted no groups yet."""

_ENDS = re.compile(r"\d+")
_MOST_AT_ONCE = 16

_NOTHING: dict[str, Any] = {"groups": {}, "recorders": {}, "endless": (), "again": {}, "closed": ()}
"""That a rank has noted of its groups."""

Names = dict[tuple[str, str], str]
"""Of groups, by backend and id: entries that have left a recorder named them."""

_GONE = "\0"
"""The name of one that is closed, or whose name another has by now."""


@dataclass
class RankRecord:
    """What is known of one rank's operations.

    Attributes:
        waits: the first of each group that has not ended, by :attr:`Wait.key`.
        begun: how many it has begun, by the same.
        latest: what it has begun last, ended or not: key, number and operation; at most :data:`LATEST`.
        count: grows with each operation, messages among them.
        timeout: the shortest one of those that are remembered, in seconds.
        is_whole: a group that is not in *begun* was never used.
        unwatched: backends of which this torch records nothing; or why nothing at all is watched.
        backends: of its groups.
    """

    waits: dict[str, Wait] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    latest: list[tuple[str, int, str]] = field(default_factory=list)
    count: int = 0
    timeout: float = math.inf
    is_whole: bool = False
    unwatched: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


def read(sockets: Mapping[int, Path], names: dict[int, Names]) -> dict[int, RankRecord]:
    """The records of ranks that answer, by rank; none where the container may have no further thread.

    Args:
        sockets: by rank.
        names: of groups, by rank: kept from look to look.
    """
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        found = pool.map(lambda rank: (rank, _read(rank, sockets[rank], names.setdefault(rank, {}))), sockets)
        return {rank: record for rank, record in found if record is not None}
    return {}


def stack(path: Path) -> Stack | None:
    """A rank's main thread's: no signal is needed. None where torch's thread does not get Python's lock: each such
    question keeps one more of its threads, of which there are a few."""
    threads = stacks.parse((ask(path, "dump_traceback", LOCK_SECONDS) or b"").decode(errors="replace"))
    return threads[0] if threads else None


def of_horovod(rank: int, world_size: int, waits: tuple[int, int, str], stack: Stack = ()) -> RankRecord:
    """The same of a rank of Horovod's, which counts the waits that it has begun, and ended, and knows what the latest
    is about; which operation it waits in is in its main thread's stack. Horovod gives up no wait by itself."""
    begun, ended, about = waits
    called = [frame.function for frame in stack if frame.matches(stacks.HOROVODS)]
    operation = (called[-1] if called else "a collective") + (f" of {about}" if about else "")
    wait = Wait(rank, HOROVOD, text_of(range(world_size)), operation, begun, 0.0, HOROVOD)
    return RankRecord({wait.key: wait} if begun > ended else {}, {wait.key: begun}, is_whole=True)


def merge(rank: int, noted: Mapping[str, Any], dumps: Mapping[str, Any], names: Names) -> RankRecord:
    """Torch's answers, by backend, and what the rank has noted, as one record.

    Args:
        rank: whose.
        noted: see :func:`.evidence.groups_file`; {} where it is not there yet.
        dumps: what recorders have said (torch's JSON); {} of one that has not answered.
        names: of its groups, as far as they are known; added to.
    """
    reading = _Reading(rank, {**_NOTHING, **noted}, names)
    reading.record.is_whole = bool(dumps) or noted.get("recorders") == {}  # it is in no group any more
    for backend, dump in dumps.items():
        reading.take(backend, dump)
    return reading.record


class _Reading:
    """Of one rank's recorders."""

    def __init__(self, rank: int, noted: Mapping[str, Any], names: Names) -> None:
        self._rank, self._noted, self._names = rank, noted, names
        self._members: dict[str, str] = dict(noted["groups"])
        self._gone = {_GONE, *noted["closed"]}
        unwatched = tuple(name for name, question in noted["recorders"].items() if not question)
        self.record = RankRecord(unwatched=unwatched, backends=tuple(noted["recorders"]))

    def take(self, backend: str, dump: Mapping[str, Any]) -> None:
        """In torch's JSON."""
        record = self.record
        status = {id_: int(at["last_enqueued_collective"]) for id_, at in dump.get("pg_status", {}).items()}
        entries = [entry for entry in dump.get("entries", ()) if _backend(entry) == backend]
        for facts in dump.get("pg_config", {}).values():  # NCCL's has ranks, gloo's has not
            if facts["name"]:
                self._members.setdefault(facts["name"], text_of(json.loads(facts["ranks"])))
        # With TORCH_NCCL_BLOCKING_WAIT nobody notes the ends of operations.
        is_followed = not entries or max(status.values(), default=0) > 0
        record.is_whole = record.is_whole and bool(dump) and is_followed
        record.count += sum(status.values()) + (entries[-1]["record_id"] + 1 if entries else 0)
        # By its id, which no two groups have: the clock may be set back once a group was made again.
        since = {each["pg_id"] for each in entries if int(each["time_created_ns"]) >= self._made_at(each)}
        for some in _batches(entries):
            entry = some[-1]
            name, id_ = str(entry["process_group"][0]), (backend, str(entry["pg_id"]))
            if name in self._gone or entry["pg_id"] not in since:
                self._names[id_] = _GONE
                continue
            wait = self._wait(backend, entry, some)
            self._names[id_] = name
            record.begun[wait.key] = max(record.begun.get(wait.key, 0), wait.number)
            record.timeout = min(record.timeout, wait.timeout)
            record.latest += [(wait.key, wait.number, wait.operation)] if wait.number else []
            if is_followed and not entry["retired"]:
                record.waits.setdefault(wait.key, wait)
        del record.latest[:-LATEST]
        if entries and entries[0]["record_id"]:
            self._add_evicted(backend, status)

    def _made_at(self, entry: Mapping[str, Any]) -> int:
        return int(self._noted["again"].get(str(entry["process_group"][0]), 0))

    def _add_evicted(self, backend: str, status: Mapping[str, int]) -> None:
        """Groups all of whose entries have left the ring: no fewer than that."""
        for id_, count in status.items():
            name = self._names.get((backend, id_))
            self.record.is_whole = self.record.is_whole and name is not None
            if name is not None and name not in self._gone:
                key = Wait(self._rank, name, self._members.get(name, ""), "", 0, 0.0, backend).key
                self.record.begun.setdefault(key, max(0, count))

    def _wait(self, backend: str, entry: Mapping[str, Any], some: Sequence[Mapping[str, Any]]) -> Wait:
        name, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        members, parts = self._members.get(name, ""), some[:-1] or some
        operation = ", ".join(dict.fromkeys(_name(part) for part in parts))
        if any(part["is_p2p"] for part in parts):  # by the members' places in the group; what it counts is its own
            inside = ranks_of(members)
            ends = {int(end) for part in parts for end in _ENDS.findall(_name(part))}
            members = text_of(inside[end] for end in ends) if max(ends, default=len(inside)) < len(inside) else ""
            name, number = f"{name}, between ranks {members or 'unknown'}", 0
        else:
            inputs = zip(parts[0]["input_dtypes"], parts[0]["input_sizes"], strict=False)
            shapes = ", ".join(f"{kind}{list(size)}" for kind, size in inputs)
            operation += f" of {shapes}" if shapes else ""
        timeout = 0 if backend in self._noted["endless"] else int(entry.get("timeout_ms", 0)) / 1000
        since = int(entry["time_created_ns"]) / 1e9
        return Wait(self._rank, name, members, operation, number, since, backend, timeout if timeout > 0 else math.inf)


def ask(path: Path, what: str, seconds: float) -> bytes | None:
    """The answer of a rank's torch; None where there is none: it is not imported there, or the process is stopped."""
    connection = http.client.HTTPConnection("rank")
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(seconds)
        connection.sock.connect(str(path))
        connection.request("POST", f"/handler/{what}", headers={"Content-Length": "0"})
        answer = connection.getresponse()
        if answer.status == http.client.OK:
            return answer.read()
    return None


def _read(rank: int, path: Path, names: Names) -> RankRecord | None:
    noted = _parsed(groups_file(path).read_bytes)
    questions = noted.get("recorders", _ANY)
    until = time.monotonic() + READ_SECONDS
    dumps: dict[str, dict[str, Any]] = {}
    for name in filter(questions.get, questions):
        left = max(0.001, until - time.monotonic())
        dumps[name] = _parsed(partial(ask, path, questions[name], left))
    if not any(dumps.values()) and (dumps or not noted):
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):  # another torch's JSON
        return merge(rank, noted, dumps, names)
    return None


def _parsed(read: Callable[[], bytes | None]) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):  # not there yet, or not to be read
        return dict(json.loads(read() or b"{}"))
    return {}


def _backend(entry: Mapping[str, Any]) -> str:
    """An older torch answers for gloo, whichever backend it is asked for."""
    return str(entry["profiling_name"]).partition(":")[0]


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _batches(entries: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Each entry, after those that are parts of it. A part of a batch is never retired by itself: the entry behind it
    is that of the batch, and has its numbers."""
    places: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        place = (entry["pg_id"], entry["collective_seq_id"], entry["p2p_seq_id"])
        places.setdefault(place, []).append(entry)
    for some in places.values():
        yield from [some] if _name(some[-1]) == "coalesced" else ([entry] for entry in some)
