"""What is known of a rank's collectives, from outside, while it waits: torch's flight recorder, or how often it has
waited for Horovod.

torch's own C++ thread answers on a socket of the rank's, without Python's lock: also where Python stands still.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compat import torch as torch_inside
from .stacks import Stack

READ_SECONDS = 0.5
"""For all ranks of a node together to answer; a rank takes a millisecond or two, and one that is stopped never does."""

LATEST = 16

_COLLECTIVES, _PYTHON = "fr_trace_json", "dump_traceback"


@dataclass(frozen=True)
class Begun:
    """A collective that a rank has begun.

    Attributes:
        group: torch's name of the process group, the same on each rank.
        number: counts the group's collectives.
        operation: with what it is about: ``all_reduce of Float[3]``.
        timeout: seconds after which torch itself gives it up.
    """

    group: str
    number: int
    operation: str
    timeout: float = field(default=1800.0, compare=False)

    def __str__(self) -> str:
        """For people."""
        return f"{self.operation} (#{self.number} of group {self.group})"


@dataclass(frozen=True)
class Recorded:
    """The collectives of one rank so far.

    Attributes:
        counts: how many it has begun, by group.
        pending: the first of each group that has not ended.
        latest: that it has begun, ended or not, at most :data:`LATEST`.
    """

    counts: dict[str, int] = field(default_factory=dict)
    pending: tuple[Begun, ...] = ()
    latest: tuple[Begun, ...] = ()


HOROVOD = "Horovod"
"""In the place of a group's name."""

HOROVODS = ("/horovod/common/", "/horovod/torch/")
"""Of a path: Horovod's own code. A project may be in a directory of that name, too."""


def of_horovod(begun: int, ended: int, stack: Stack = (), about: str = "") -> Recorded:
    """The same of a rank of Horovod's, which counts its waits, and knows what the latest is *about*; which operation it
    waits in is in its main thread's stack. It gives up no wait by itself."""
    called = [frame.function for frame in stack if any(part in frame.file for part in HOROVODS)]
    operation = (called[-1] if called else "a collective") + (f" of {about}" if about else "")
    waits = Begun(HOROVOD, begun, operation, timeout=math.inf)
    pending = (waits,) if begun > ended else ()
    return Recorded({HOROVOD: begun}, pending, pending)


def serve(path: Path) -> None:
    """In a rank: have torch answer on a socket. Nothing happens where torch is not imported, or cannot."""
    if not torch_inside.has_worker_server():
        return
    # It says on stderr that it listens, at the head of every rank's log.
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with contextlib.suppress(Exception):  # a path that is too long for a socket: there is no record then
            torch_inside.serve_workers(str(path))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def read(ranks: Mapping[int, Path]) -> dict[int, Recorded]:
    """The records of ranks that answer in :data:`READ_SECONDS`, by rank."""
    found = {}
    for rank, answer in _asked(ranks, _COLLECTIVES).items():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):  # another torch's
            found[rank] = parse(json.loads(answer))
    return found


def holding_the_interpreter(ranks: Mapping[int, Path]) -> list[int]:
    """Ranks in which torch's thread is there, and does not get Python's lock."""
    return sorted(_asked(ranks, "ping").keys() - _asked(ranks, _PYTHON).keys())


def parse(dump: dict[str, Any]) -> Recorded:
    """Read torch's JSON (version 2.x)."""
    groups = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in dump["entries"]}
    counts = {groups.get(key, key): int(at["last_enqueued_collective"]) for key, at in dump["pg_status"].items()}
    done = {groups.get(key, key): int(at["last_completed_collective"]) for key, at in dump["pg_status"].items()}
    pending: dict[str, Begun] = {}
    latest = []
    for entry in dump["entries"]:
        if entry["is_p2p"]:
            continue
        group, number = groups[str(entry["pg_id"])], int(entry["collective_seq_id"])
        begun = Begun(group, number, _operation(entry), int(entry["timeout_ms"]) / 1000)
        latest.append(begun)
        if not entry["retired"] and begun.number > done.get(begun.group, 0):
            pending.setdefault(begun.group, begun)
    counts = {group: max(0, count) for group, count in counts.items()}
    return Recorded(counts, tuple(pending.values()), tuple(latest[-LATEST:]))


def _operation(entry: dict[str, Any]) -> str:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    shapes = ", ".join(f"{kind}{list(size)}" for kind, size in inputs)
    return f"{name} of {shapes}" if shapes else name


def _asked(ranks: Mapping[int, Path], what: str) -> dict[int, bytes]:
    """The bodies of the answers to one question to several ranks at once."""
    answers: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for rank, path in ranks.items():
            sock = opened.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(READ_SECONDS)
            with contextlib.suppress(OSError):  # no such socket: torch is not imported there, or it has ended
                sock.connect(str(path))
                sock.sendall(f"POST /handler/{what} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
                sock.setblocking(False)  # noqa: FBT003
                selector.register(sock, selectors.EVENT_READ, (rank, bytearray()))
        deadline = time.monotonic() + READ_SECONDS
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank, data = key.data
                try:
                    part = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                except OSError:
                    part = b""
                data += part
                if not part:
                    selector.unregister(key.fileobj)
                    head, _, body = bytes(data).partition(b"\r\n\r\n")
                    if b" 200 " in head.partition(b"\r\n")[0]:
                        answers[rank] = body
    return answers
