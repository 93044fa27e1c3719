"""The Flyte context of the task, carried into ranks as plain values, and entered there.

A rank is a new process: what ``flytekit.current_context()`` and file access need is written down by the agent
(:func:`take`) and set up again in the rank (:func:`entered`), with the rank's own sandbox and working directory.

flytekit's ``setup_execution`` does not serve there. It names the working directory by random numbers of the process
that has imported flytekit: ranks forked from it get one directory together (tried with flytekit 1.16). And each rank
would have its own date of the execution, be in a pod also in a local run, have no decks, and install what
``_F_RUNTIME_PACKAGES`` names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from flytekit import FlyteContext, FlyteContextManager
from flytekit.configuration import SerializationSettings, StatsConfig
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.constants import ERROR_FILE_NAME, OUTPUT_FILE_NAME
from flytekit.core.context_manager import ExecutionParameters, ExecutionState, OutputMetadataTracker
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.mock_stats import MockStats
from flytekit.interfaces.stats.taggable import get_stats
from flytekit.loggers import user_space_logger
from flytekit.models.core import identifier

from ..compat import flytekit as flytekit_inside
from .order import FlyteSnapshot

IN_POD = "TASK_EXECUTION"
"""The mode of a task in its pod, by the name that flytekit's ``ExecutionState.Mode`` has for it."""


def take() -> FlyteSnapshot:
    """The current context of flytekit, as it is inside ``Task.execute``."""
    ctx = FlyteContextManager.current_context()  # which is never without an execution: flytekit has one for local runs
    params, settings = ctx.user_space_params, ctx.serialization_settings
    execution, task = params.execution_id, params.task_id
    destination, source = flytekit_inside.checkpoint_places(params)
    return FlyteSnapshot(
        mode=(ctx.execution_state.mode or ExecutionState.Mode.LOCAL_TASK_EXECUTION).name,
        raw_output_prefix=ctx.file_access.raw_output_prefix,
        users_raw_output_prefix=params.raw_output_prefix,
        output_metadata_prefix=params.output_metadata_prefix,
        execution_id=(execution.project, execution.domain, execution.name),
        task_id=(task.project, task.domain, task.name, task.version),
        execution_date=params.execution_date.isoformat(),
        checkpoint_dest=destination,
        checkpoint_src=source,
        enable_deck=bool(params.enable_deck),
        serialization=settings.serialized_context if settings is not None else None,
        metadata=flytekit_inside.execution_metadata(ctx.file_access),
    )


def store() -> FileAccessProvider:
    """flytekit's way to the store, in the current context."""
    return FlyteContextManager.current_context().file_access


def uploaded_to(prefix: str, access: FileAccessProvider) -> bool:
    """Whether an attempt's outputs, or its one error, are in the store already.

    Args:
        prefix: the directory of an attempt's outputs in the store.
        access: the way to the store.

    Raises:
        Exception: whatever the store's client raises.
    """
    return any(access.exists(f"{prefix.rstrip('/')}/{name}") for name in (OUTPUT_FILE_NAME, ERROR_FILE_NAME))


@contextlib.contextmanager
def entered(
    snapshot: FlyteSnapshot, sandbox: Path, access: type[FileAccessProvider] | None = None, *, restarted: bool = False
) -> Iterator[FlyteContext]:
    """Make ``snapshot`` the current Flyte context of this process.

    Args:
        snapshot: from :func:`take`, in the agent.
        sandbox: a directory of this rank alone; flytekit's local sandbox and working directory are made in it.
        access: the class of flytekit's way to the store; None: flytekit's own.
        restarted: whether ranks ran before in this attempt; what they saved is the checkpoint then.
    """
    file_access = (access or FileAccessProvider)(
        local_sandbox_dir=str(sandbox),
        raw_output_prefix=snapshot.raw_output_prefix,
        execution_metadata=snapshot.metadata or None,
    )
    ctx = FlyteContextManager.current_context()
    builder = ctx.with_file_access(file_access)
    if snapshot.serialization:
        builder = builder.with_serialization_settings(SerializationSettings.from_transport(snapshot.serialization))
    checkpoint = _checkpoint(snapshot, file_access, restarted=restarted)
    state = ctx.new_execution_state(working_dir=str(sandbox / "engine")).with_params(
        mode=ExecutionState.Mode[snapshot.mode], user_space_params=_parameters(snapshot, sandbox, checkpoint)
    )
    builder = builder.with_execution_state(state).with_output_metadata_tracker(OutputMetadataTracker())
    with FlyteContextManager.with_context(builder) as entered_ctx:
        yield entered_ctx


@contextlib.contextmanager
def downloading_to(sandbox: Path, ctx: FlyteContext) -> Iterator[FlyteContext]:
    """Inside, what flytekit is to download, at once or later, gets its place below ``sandbox``."""
    access = type(ctx.file_access)(
        local_sandbox_dir=str(sandbox),
        raw_output_prefix=ctx.file_access.raw_output_prefix,
        execution_metadata=flytekit_inside.execution_metadata(ctx.file_access) or None,
    )
    with FlyteContextManager.with_context(ctx.with_file_access(access)) as inside:
        yield inside


def _checkpoint(snapshot: FlyteSnapshot, access: FileAccessProvider, *, restarted: bool) -> Any:
    destination, source = snapshot.checkpoint_dest, snapshot.checkpoint_src
    if destination is None:
        return None
    if restarted:
        return flytekit_inside.resuming_checkpoint(destination, source, access.exists)
    return SyncCheckpoint(checkpoint_dest=destination, checkpoint_src=source)


def _parameters(snapshot: FlyteSnapshot, sandbox: Path, checkpoint: Any) -> Any:
    working = sandbox / "work"
    working.mkdir(mode=0o700, exist_ok=True)
    stats: Any = MockStats()
    if snapshot.mode == IN_POD:
        stats = get_stats(cfg=StatsConfig.auto(), prefix=f"{'.'.join(snapshot.task_id[:3])}.user_stats")
    return ExecutionParameters(
        execution_id=identifier.WorkflowExecutionIdentifier(*snapshot.execution_id),
        execution_date=datetime.fromisoformat(snapshot.execution_date),
        stats=stats,
        logging=user_space_logger,
        tmp_dir=str(working),
        raw_output_prefix=snapshot.users_raw_output_prefix,
        output_metadata_prefix=snapshot.output_metadata_prefix,
        checkpoint=checkpoint,
        task_id=identifier.Identifier(identifier.ResourceType.TASK, *snapshot.task_id),
        enable_deck=snapshot.enable_deck,
    )
