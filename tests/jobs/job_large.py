"""Tasks whose outputs are too large for Flyte, alone or together."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task

from flytekitplugins_safedist import SafeTorch

COUNT = 300_000


class Results(NamedTuple):
    """A small output and a large one: each int takes some ten bytes as a literal."""

    epochs: int
    losses: list[int]


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1))
def large() -> Results:
    return Results(7, list(range(COUNT)))
