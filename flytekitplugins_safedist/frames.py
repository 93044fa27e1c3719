"""Length-prefixed frames on a stream: what nodes, ranks and the coordinator of a job send each other."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size
"""Before a frame's content: its length."""

HELLO_BYTES = 1 << 20
"""The longest first frame: nobody knows yet who sends it. It holds a history, of some hundred bytes an entry."""

RANK_BYTES = 1 << 26
"""The longest frame of a rank: what ranks exchange through the coordinator is small, but theirs to choose."""

NODE_BYTES = RANK_BYTES + (1 << 16)
"""The longest frame between nodes: a rank's call, and whose it is."""

MOST_BYTES = (1 << 32) - 1
"""The longest frame that there is: from an agent to its rank server, for a task may travel in it by value, with all
that it uses."""


class FrameError(ConnectionError):
    """The other side sends what is no frame, or one that is too long."""


def packed(*parts: bytes) -> bytes:
    """A frame of this content, as sent."""
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


def length(prefix: bytes | bytearray, limit: int) -> int:
    """The length of the content that follows a prefix of four bytes.

    Raises:
        FrameError: it is longer than ``limit``.
    """
    (found,) = _LENGTH.unpack(prefix)
    if found > limit:
        raise FrameError(f"a frame of {found} bytes was announced, and {limit} are allowed")
    return int(found)


def receive(sock: socket.socket, limit: int) -> bytes:
    """Read one frame's content from a blocking socket.

    Raises:
        OSError: the connection is lost, its timeout is over (``TimeoutError``), or the frame is too long.
    """
    return _exactly(sock, length(_exactly(sock, PREFIX_BYTES), limit))


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        parts += part
    return bytes(parts)


def call(head: dict[str, Any], body: bytes = b"") -> bytes:
    """A rank's call, or the answer to one, as a frame's content: a line of JSON, then bytes as they are."""
    return b"".join((json.dumps(head).encode(), b"\n", body))


def parsed_call(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The inverse.

    Raises:
        ValueError: it is none.
    """
    head, _, body = content.partition(b"\n")
    found = json.loads(head)
    if isinstance(found, dict):
        return found, body
    raise ValueError(f"the head of a call is no object: {head[:64]!r}")
