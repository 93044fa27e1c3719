"""Where a rank's checkpoints go, from the user's word and from Flyte's context."""

from __future__ import annotations

import os

from ..compat import flytekit as flytekit_inside
from ..errors import CheckpointError
from .places import Facts

SIBLING = "-safedist"
"""Beside Flyte's checkpoint prefix, not in it: all that is in there is ``current_context().checkpoint``'s."""


def gather(where: str | os.PathLike[str] | None, *, attempt: int) -> Facts:
    """The facts of this attempt.

    Args:
        where: the user's own place, one for all attempts; None: Flyte's checkpoint prefix of this attempt.
        attempt: from 0.

    Raises:
        CheckpointError: there is neither.
    """
    from flytekit import FlyteContextManager

    parameters = FlyteContextManager.current_context().user_space_params
    destination, source = flytekit_inside.checkpoint_places(parameters) if parameters is not None else (None, None)
    outputs = parameters.output_metadata_prefix if parameters is not None else None
    execution = parameters.execution_id if parameters is not None else None
    named = (execution.project, execution.domain, execution.name) if execution is not None else None
    if where is not None:
        return Facts(own=os.fspath(where), outputs=outputs, attempt=attempt, execution=named)
    if not destination:
        raise CheckpointError(
            "there is no place for checkpoints",
            seen="no Flyte checkpoint prefix in this process, and no place given",
            hint='give one: checkpoints("/shared/run-7") or checkpoints("s3://bucket/run-7")',
        )
    before = source if source and source != destination else None
    return Facts(
        own=_beside(destination),
        before=_beside(before) if before else None,
        outputs=outputs,
        attempt=attempt,
        execution=named,
    )


def _beside(prefix: str) -> str:
    return prefix.rstrip("/") + SIBLING
