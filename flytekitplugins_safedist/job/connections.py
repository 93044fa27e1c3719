"""The server's side of one connection."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable

from .. import frames
from ..errors import RendezvousError
from .messages import Message, Refused

_UNSENT_BYTES = 1 << 26
"""What one connection may leave unread before it is closed."""


class Way:
    """The way to one node: its connection, or this process's own inbox."""

    def __init__(self, send: Callable[[Message], object], drop: Callable[[], object]) -> None:
        self.send = send
        self.drop = drop


def superseded(by: str) -> Refused:
    """What a node 0 is told that has been left for a newer one."""
    return Refused("fenced", f"a newer node 0 answers under this node's name, and leads the job (found by {by[:64]})")


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    if not writer.is_closing():
        writer.write(frames.packed(message.dump()))
        if writer.transport.get_write_buffer_size() > _UNSENT_BYTES:
            writer.transport.abort()


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
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
