"""A module that puts objects of its own in the place of the standard streams when it is imported, as loggers do."""

from __future__ import annotations

import sys
from typing import TextIO

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank


class Noting:
    """As little as ``print`` needs: a ``write``, and no ``flush``, ``encoding`` or ``reconfigure``."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        return self.below.write(text.replace("seen", "noted: seen"))


sys.stdout = Noting(sys.stdout)  # type: ignore[assignment]
sys.stderr = Noting(sys.stderr)  # type: ignore[assignment]


@task(task_config=SafeTorch(nproc_per_node=2))
def preloaded() -> str:
    print(f"seen by {current_rank().rank}")
    return f"rank {current_rank().rank}"


@task(task_config=SafeTorch(nproc_per_node=2, start_method="spawn"))
def spawned() -> str:
    print(f"seen by {current_rank().rank}")
    return f"rank {current_rank().rank}"
