"""A module that uses an installed library, ``weather``, which a test has made (tests/agents/test_libraries.py)."""

from __future__ import annotations

import json
import os


def set_variables() -> None:  # in a function: who only reads this module does not see what it does
    os.environ.update(json.loads(os.environ.get("TEST_SETS", "{}")))


set_variables()

import weather  # type: ignore[import-not-found]  # noqa: E402
from flytekit import task  # noqa: E402

from flytekitplugins_safedist import SafeTorch, current_rank  # noqa: E402
from tests.harness.procs import say  # noqa: E402

SAW = weather.SAW


@task(task_config=SafeTorch(nproc_per_node=2))
def looks() -> None:
    is_forked = "flytekitplugins_safedist.rank_server.server" in __import__("sys").modules
    told = {"forked": is_forked, "imported by": weather.PID, "here": os.getpid(), "server": os.getppid(), "saw": SAW}
    say(json.dumps({**told, "WEATHER_SET": os.environ.get("WEATHER_SET")}))


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1))
def looks_again() -> None:
    if current_rank().round == 0:
        raise ValueError("once")
    looks.task_function()
