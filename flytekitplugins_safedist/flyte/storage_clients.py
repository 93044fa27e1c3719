"""Clients of object stores that this process opened, closed before it ends.

flytekit reaches stores through fsspec's asynchronous file systems, and those close nothing by themselves: aiohttp then
writes ``Unclosed client session`` and ``Unclosed connector`` at level ERROR as the last lines of every log, after a
success as after a failure.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any

from ..compat import flytekit as flytekit_inside

PATIENCE_SECONDS = 2.0
"""How long closing may take in all: a store that hangs must not hold up a process that is done."""


def close(patience: float = PATIENCE_SECONDS) -> None:
    """Close what fsspec's file systems hold open. Call it last: whatever uses one of them afterwards fails.

    Args:
        patience: seconds, in all.
    """
    deadline = time.monotonic() + patience
    for loop, closing in list(_open_clients()):
        # Whatever goes wrong here, the process has done its work: nothing is left to be told.
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(closing, loop).result(max(0.0, deadline - time.monotonic()))


def forget_dead_loops() -> None:
    """Let flytekit and fsspec make new event loops in the place of those whose descriptors the user's code has closed:
    they would wait for an answer of theirs for ever."""
    flytekit_inside.forget_dead_loops()
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None and asyn.loop[0] is not None and not flytekit_inside.answers(asyn.loop[0]):
        asyn.loop[0] = asyn.iothread[0] = None
        for kind in _kinds(asyn.AsyncFileSystem):
            kind.clear_instance_cache()  # each instance keeps its loop


def _open_clients() -> Iterator[tuple[asyncio.AbstractEventLoop, Coroutine[Any, Any, Any]]]:
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is None:
        return
    for kind in _kinds(asyn.AsyncFileSystem):
        # fsspec keeps every instance there for the next one who asks (fsspec/spec.py, _Cached).
        for filesystem in list(vars(kind).get("_cache", {}).values()):
            # flytekit names its own loop, and fsspec keeps it among the options only (get_async_filesystem_for_path).
            loop = filesystem.storage_options.get("loop") or filesystem._loop
            if loop is None or not loop.is_running():
                continue
            if (client := vars(filesystem).get("_s3creator")) is not None:  # s3fs
                yield loop, client.__aexit__(None, None, None)
            session = vars(filesystem).get("_session")  # gcsfs, fsspec's own for http
            if session is not None and asyncio.iscoroutinefunction(getattr(session, "close", None)):
                yield loop, session.close()


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    further: list[type[Any]] = kind.__subclasses__()
    for inner in further:
        yield from _kinds(inner)
