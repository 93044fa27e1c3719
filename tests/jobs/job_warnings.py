"""Tasks of somebody whose warnings are errors: what is not theirs warns as well (flytekit reads ``disable_deck``)."""

from __future__ import annotations

import warnings

from flytekit import map_task, task, workflow

from flytekitplugins_safedist import SafeTorch, current_rank

warnings.simplefilter("error")


@task(task_config=SafeTorch(nproc_per_node=2), enable_deck=True)
def strict() -> str:
    """Its own warnings are errors still."""
    try:
        warnings.warn("mine", UserWarning, stacklevel=1)
    except UserWarning:
        return "done"
    return "a warning of the user's was no error"


@task(task_config=SafeTorch())
def strict_part(x: int) -> int:
    return x + current_rank().rank


@workflow
def mapped(xs: list[int]) -> list[int]:
    return map_task(strict_part)(x=xs)
