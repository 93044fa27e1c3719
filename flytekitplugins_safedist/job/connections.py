"""The server's side of one connection."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Protocol

from .. import frames
from ..errors import RendezvousError
from .messages import Message, Refused

_MOST_FILES = 1 << 20
"""Open files, where nothing limits them: Linux' own limit (``fs.nr_open``) as it is delivered."""

_UNSENT_BYTES = 1 << 26
"""What one connection may leave unread before it is closed."""


class Way(Protocol):
    """The way to one node: its connection, or this process's own inbox."""

    def send(self, message: Message) -> None: ...

    def drop(self) -> None: ...


class Connected:
    """The way to a node of another process. One of thousands."""

    __slots__ = ("_writer",)

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: Message) -> None:
        """Never waits; a node that reads nothing loses its connection."""
        if not self._writer.is_closing():
            self._writer.write(frames.packed(message.dump()))
            if self._writer.transport.get_write_buffer_size() > _UNSENT_BYTES:
                self.drop()

    def drop(self) -> None:
        self._writer.transport.abort()


class Own:
    """The way to the node of the coordinator's own process."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.send = send

    def drop(self) -> None:
        """There is nothing to close."""


def superseded(by: str) -> Refused:
    """What a node 0 is told that has been left for a newer one."""
    return Refused("fenced", f"a newer node 0 answers under this node's name, and leads the job (found by {by[:64]})")


async def frame_of(reader: asyncio.StreamReader, limit: int) -> bytes:
    return await reader.readexactly(frames.length(await reader.readexactly(4), limit))


def peer_of(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else "a process of this node"


def allow_open_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RendezvousError(
            "node 0 may not open enough connections for all nodes",
            where={"limit": "RLIMIT_NOFILE"},
            seen=f"{hard} open files at most",
            expected=f"at least {needed}",
            hint="raise the container's limit of open files (ulimit -Hn)",
        )
    # As many as there may be, and not as many as there are nodes: each thread of each rank may have a connection, too.
    most = max(needed, _MOST_FILES) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
