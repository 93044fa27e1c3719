"""The container's termination message: what Kubernetes, and with it Flyte, shows of a container that has ended.

It imports next to nothing, and is safe in a signal's handler: who dies undecided in the first instants says why, too.
"""

from __future__ import annotations

import os

PATH = "/dev/termination-log"
"""Where Kubernetes looks for it (``terminationMessagePath``); there only in a pod."""

LIMIT = 4096
"""Bytes that the kubelet takes; of a longer file its end, which says least."""


def say(text: str, *, alone: bool = False) -> None:
    """Add *text* behind what is there, while there is room, unless it is there already; ``alone``: only if nothing is.

    Outside a pod there is no such file, and none is made.
    """
    try:
        file = os.open(PATH, os.O_RDWR)
    except OSError:
        return
    try:
        before = os.read(file, LIMIT)
        said = text.encode("utf-8", "backslashreplace") + b"\n"
        if said.rstrip() not in before and not (alone and before):
            os.write(file, _cut(said, LIMIT - len(before)))
    except OSError:
        return
    finally:
        os.close(file)


def _cut(text: bytes, room: int) -> bytes:
    """As much as there is room for, in whole lines if more than one fits, and in whole characters."""
    if len(text) <= room:
        return text
    whole = text[:room].rpartition(b"\n")[0] or text[: max(0, room - 1)]
    return whole.decode("utf-8", "ignore").encode() + b"\n" if room > 1 else b""
