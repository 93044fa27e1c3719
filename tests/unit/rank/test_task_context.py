"""The Flyte context goes from the agent into a rank: the same execution, but a sandbox and a directory of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import flytekit
import pytest
from flytekit import FlyteContext, FlyteContextManager
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.context_manager import ExecutionParameters, ExecutionState
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.mock_stats import MockStats
from flytekit.models.core import identifier

from flytekitplugins_safedist.rank import task_context
from flytekitplugins_safedist.rank.order import FlyteSnapshot

SETTINGS = SerializationSettings(
    project="proj", domain="dev", version="v7", image_config=ImageConfig(Image("default", "img", "1"))
)


@pytest.fixture
def in_a_pod(tmp_path: Path) -> Iterator[FlyteContext]:
    """The context that pyflyte-execute makes in a pod, as far as it can be seen from a task."""
    parameters = ExecutionParameters(
        execution_id=identifier.WorkflowExecutionIdentifier(project="proj", domain="dev", name="f123"),
        execution_date=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
        stats=MockStats(),
        logging=None,
        tmp_dir=str(tmp_path / "agent"),
        raw_output_prefix=str(tmp_path / "raw"),
        output_metadata_prefix=str(tmp_path / "meta"),
        checkpoint=SyncCheckpoint(checkpoint_dest=str(tmp_path / "cp"), checkpoint_src=str(tmp_path / "cp-before")),
        task_id=identifier.Identifier(identifier.ResourceType.TASK, "proj", "dev", "wf.train", "v7"),
        enable_deck=True,
    )
    access = FileAccessProvider(
        local_sandbox_dir=str(tmp_path / "agent-sandbox"),
        raw_output_prefix=str(tmp_path / "raw"),
        execution_metadata={"flyte-execution-name": "f123"},
    )
    ctx = FlyteContextManager.current_context()
    state = ctx.new_execution_state(working_dir=str(tmp_path / "engine")).with_params(
        mode=ExecutionState.Mode.TASK_EXECUTION, user_space_params=parameters
    )
    builder = ctx.with_file_access(access).with_serialization_settings(SETTINGS).with_execution_state(state)
    with FlyteContextManager.with_context(builder) as entered:
        yield entered


@pytest.fixture
def snapshot(in_a_pod: FlyteContext) -> FlyteSnapshot:
    return task_context.take()


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    path = tmp_path / "round-0" / "rank-3" / "flyte"
    path.mkdir(parents=True)
    return path


def test_everything_a_rank_needs_is_taken_as_text(snapshot: FlyteSnapshot, tmp_path: Path) -> None:
    assert snapshot == FlyteSnapshot(
        mode="TASK_EXECUTION",
        raw_output_prefix=f"{tmp_path}/raw/",
        users_raw_output_prefix=f"{tmp_path}/raw",
        output_metadata_prefix=str(tmp_path / "meta"),
        execution_id=("proj", "dev", "f123"),
        task_id=("proj", "dev", "wf.train", "v7"),
        execution_date="2026-01-02T03:04:05+00:00",
        checkpoint_dest=str(tmp_path / "cp"),
        checkpoint_src=str(tmp_path / "cp-before"),
        enable_deck=True,
        serialization=SETTINGS.serialized_context,
        metadata={"flyte-execution-name": "f123"},
    )
    json.dumps(dataclasses.asdict(snapshot))


def test_the_execution_is_the_same_in_the_rank(snapshot: FlyteSnapshot, sandbox: Path) -> None:
    before = FlyteContextManager.current_context()
    for _ in range(2):  # the same sandbox can be entered again
        with task_context.entered(snapshot, sandbox):
            assert task_context.take() == snapshot
            stats = flytekit.current_context().stats
            assert not isinstance(stats, MockStats), "which is of local runs: a pod's go where flytekit sends them"
            assert Path(flytekit.current_context().working_directory).is_dir()
    assert FlyteContextManager.current_context() is before


def test_working_directory_and_sandbox_are_inside_the_ranks_scratch(snapshot: FlyteSnapshot, sandbox: Path) -> None:
    with task_context.entered(snapshot, sandbox) as ctx:
        working = Path(flytekit.current_context().working_directory)
        assert working.is_dir()
        assert working.is_relative_to(sandbox)
        assert working.stat().st_mode & 0o777 == 0o700
        assert Path(ctx.file_access.local_sandbox_dir).is_relative_to(sandbox)
        assert Path(ctx.file_access.get_random_local_path()).is_relative_to(sandbox)
        assert Path(ctx.file_access.get_random_local_directory()).is_relative_to(sandbox)
        (working / "file").write_text("x")


def test_large_outputs_go_where_the_agents_would(snapshot: FlyteSnapshot, sandbox: Path, tmp_path: Path) -> None:
    with task_context.entered(snapshot, sandbox) as ctx:
        assert ctx.file_access.raw_output_prefix == f"{tmp_path}/raw/"
        assert flytekit.current_context().raw_output_prefix == f"{tmp_path}/raw", "as flytekit has it in a pod"
        source = sandbox / "model"
        source.write_text("weights")
        stored = Path(ctx.file_access.put_raw_data(str(source)))
    assert stored.is_relative_to(tmp_path / "raw")
    assert stored.read_text() == "weights"


def test_without_a_checkpoint_flytekit_says_so_itself(snapshot: FlyteSnapshot, sandbox: Path) -> None:
    with (
        task_context.entered(dataclasses.replace(snapshot, checkpoint_dest=None), sandbox),
        pytest.raises(NotImplementedError, match="Checkpointing is not available"),
    ):
        _ = flytekit.current_context().checkpoint


def test_the_rank_starts_with_no_decks_of_others(snapshot: FlyteSnapshot, sandbox: Path) -> None:
    with task_context.entered(snapshot, sandbox):
        from flytekit.deck import Deck

        assert flytekit.current_context().decks == []
        Deck("mine", "<p>")
        assert [deck.name for deck in flytekit.current_context().decks] == ["mine"]


def test_a_local_run_without_any_execution_is_taken_and_entered_too(sandbox: Path) -> None:
    taken = task_context.take()
    assert taken.mode in ExecutionState.Mode.__members__
    with task_context.entered(taken, sandbox):
        assert Path(flytekit.current_context().working_directory).is_relative_to(sandbox)
        assert isinstance(flytekit.current_context().stats, MockStats)


@pytest.mark.parametrize(
    ("name", "there"), [("outputs.pb", True), ("error.pb", True), ("futures.pb", False), ("", False)]
)
def test_an_upload_is_seen_at_the_output_prefix(tmp_path: Path, name: str, there: bool) -> None:
    (tmp_path / "meta").mkdir()
    if name:
        (tmp_path / "meta" / name).touch()
    for prefix in (str(tmp_path / "meta"), f"{tmp_path}/meta/"):
        assert task_context.uploaded_to(prefix, task_context.store()) is there
