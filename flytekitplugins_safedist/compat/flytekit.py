"""flytekit's private names, looked up here and nowhere else. Imports flytekit only inside its functions."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from . import lookup

_PATIENCE_SECONDS = 5.0


def stop_event_loops() -> None:
    """End the threads in which flytekit runs its event loops, where they are idle; flytekit makes new ones when asked.

    flytekit keeps one per thread that ever converted a value (``flytekit.utils.asyn``, ``loop_manager``): a launch plan
    with ``default_inputs`` at module level is enough. They hold nothing between two calls, and are never used in a
    forked process (their key holds the process id), so that ending them loses nothing. One that is busy is left alone.

    Raises:
        IncompatibleVersionError: flytekit keeps them in another way.
    """
    asyn = sys.modules.get("flytekit.utils.asyn")
    if asyn is None:
        return
    runners: dict[str, Any] = lookup(lookup(asyn, "loop_manager", of="flytekit"), "_runner_map", of="flytekit")
    for name, runner in list(runners.items()):
        # The names as Python mangles them: they are private to the class.
        loop = lookup(runner, "_TaskRunner__loop", of="flytekit")
        thread = lookup(runner, "_TaskRunner__runner_thread", of="flytekit")
        if thread is not None and thread.is_alive():
            if asyncio.all_tasks(loop):
                continue
            # Its helpers first: the loop does not end them when it is merely stopped.
            ending = asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop)
            with contextlib.suppress(TimeoutError):
                ending.result(_PATIENCE_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_PATIENCE_SECONDS)
        del runners[name]
