"""Tasks for ``map_task``."""

from __future__ import annotations

from typing import Annotated

from flytekit import Artifact, task

from flytekitplugins_safedist import SafeTorch

PARTED = Artifact(name="parted", partition_keys=["region"])


@task(task_config=SafeTorch(nproc_per_node=2))
def parted(pickled: set, factor: int) -> Annotated[int, PARTED]:
    """A set is pickled by flytekit, for want of a type of Flyte's."""
    return PARTED.create_from(factor * sum(pickled), region="eu")
