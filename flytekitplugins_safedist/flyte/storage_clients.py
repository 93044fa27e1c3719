"""Clients of object stores in a process whose descriptors the user's code has closed.

What they hold open at a process's end nobody closes: every process of ours ends before Python takes itself apart, which
is when aiohttp would write of each ``Unclosed client session`` as the last lines of the log.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..compat import flytekit as flytekit_inside


def forget_dead_loops() -> None:
    """Let flytekit and fsspec make new event loops in the place of those whose descriptors the user's code has closed:
    they would wait for an answer of theirs for ever."""
    flytekit_inside.forget_dead_loops()
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None and asyn.loop[0] is not None and not flytekit_inside.answers(asyn.loop[0]):
        asyn.loop[0] = asyn.iothread[0] = None
        for kind in _kinds(asyn.AsyncFileSystem):
            kind.clear_instance_cache()  # each instance keeps its loop


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    further: list[type[Any]] = kind.__subclasses__()
    for inner in further:
        yield from _kinds(inner)
