"""Rank 0 returns a path as another rank, maybe on another node, has told it: it is not there."""

from __future__ import annotations

import os

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeTorch, current_rank

TWO = SafeTorch(nproc_per_node=2, max_restarts=1)


def _told() -> str:
    scratch = current_rank().scratch
    return os.environ["TEST_PATH"].format(other=scratch.with_name("rank-1"), own=scratch)


@task(task_config=TWO)
def file() -> FlyteFile:
    return FlyteFile(_told())


@task(task_config=TWO)
def text() -> FlyteFile:
    return _told()  # type: ignore[return-value]


@task(task_config=TWO)
def directories() -> dict[str, list[FlyteDirectory]]:
    return {"saved": [FlyteDirectory(_told())]}
