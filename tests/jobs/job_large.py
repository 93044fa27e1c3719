"""Tasks whose outputs are too large for Flyte, alone or together."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task

from flytekitplugins_safedist import SafeTorch

COUNT = 2_500


class Results(NamedTuple):
    """A small output and a large one: few items of a thousand letters, because flytekit converts each by itself."""

    epochs: int
    losses: list[str]


def losses() -> list[str]:
    return [f"{step:01000d}" for step in range(COUNT)]


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1))
def large() -> Results:
    return Results(7, losses())
