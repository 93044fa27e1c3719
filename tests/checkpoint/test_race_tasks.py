"""Checkpoints in real tasks: after a restart in place, in later attempts, in another execution."""

from __future__ import annotations

import ast

import pytest

from tests.harness.job import Job
from tests.harness.procs import uploaded_output
from tests.harness.product import saves


@pytest.fixture(scope="session")
def warm(warm_to_train):
    return warm_to_train


class Execution:
    """An execution's attempts, with the prefixes that Flyte gives them."""

    def __init__(self, warm, root, name="f123"):
        self._warm, self._root, self._name = warm, root, name

    def place(self, attempt):
        return self._root / "raw" / f"{self._name}-{attempt}" / "_flytecheckpoints"

    def attempt(self, number, task, *, recovers=None, **environment):
        files = self._root / f"{self._name}-job-{number}"
        arguments = ["--checkpoint-path", str(self.place(number))]
        if number or recovers:
            arguments += ["--prev-checkpoint", str(self.place(number - 1) if number else recovers)]
            environment["TEST_RECOVERS"] = ""
        outputs = self._root / "meta" / f"proj-dev-{self._name}" / "n0" / "data" / str(number)
        outputs.mkdir(parents=True)
        files.mkdir()
        (files / "outputs").symlink_to(outputs)
        return self._warm.run(
            f"job_checkpoints:{task}",
            files,
            kind="execute",
            arguments=[*arguments, "--output-prefix", str(outputs)],
            environment={
                "FLYTE_ATTEMPT_NUMBER": str(number),
                "FLYTE_INTERNAL_EXECUTION_ID": self._name,
                "FLYTE_INTERNAL_EXECUTION_PROJECT": "proj",
                "FLYTE_INTERNAL_EXECUTION_DOMAIN": "dev",
                **environment,
            },
        )


@pytest.mark.parametrize("task", ["by_torch", pytest.param("by_horovod", marks=pytest.mark.horovod)])
def test_ranks_that_start_again_go_on_from_the_last_save(warm, tmp_path, task):
    ended = Execution(warm, tmp_path).attempt(0, task, TEST_FAILING_ROUNDS="2")
    assert uploaded_output(ended) == "0.0:0 0.1:3 0.2:6", ended.err


def test_an_attempt_that_saved_nothing_hides_nothing_and_no_more_saves_are_kept_over_all_than_over_one(warm, tmp_path):
    execution = Execution(warm, tmp_path)
    assert uploaded_output(execution.attempt(0, "by_torch")) == "0.0:0"
    assert "error.pb" in execution.attempt(1, "dies_at_once").uploaded
    ended = execution.attempt(2, "by_torch")
    assert uploaded_output(ended) == "0.0:0 2.0:3", ended.err
    place = execution.place(0)
    assert sorted(saves.step_of(path.name) for path in tmp_path.rglob("step-*")) == [3, 4, 5]
    assert {path.parent for path in tmp_path.rglob("step-*")} == {place.with_name(f"{place.name}-safedist")}


def test_another_execution_is_resumed_by_its_name_and_by_one_that_recovers_it_without(warm, tmp_path):
    """Flyte tells who recovers it the checkpoint prefix of the other's last attempt, and nothing else. What an
    execution has saved itself comes before."""
    old, new, newest, named = (Execution(warm, tmp_path, name) for name in ("old", "new", "newest", "named"))
    assert uploaded_output(old.attempt(0, "by_torch")) == "0.0:0"
    assert uploaded_output(old.attempt(1, "by_torch")) == "0.0:0 1.0:3"  # saves where attempt 0 did
    assert uploaded_output(new.attempt(0, "by_torch", recovers=old.place(1))) == "0.0:0 1.0:3 0.0:6"
    assert uploaded_output(newest.attempt(0, "by_torch", recovers=new.place(0))) == "0.0:0 1.0:3 0.0:6 0.0:9"
    ended = named.attempt(0, "by_torch", TEST_RESUME_FROM="old", TEST_FAILING_ROUNDS="1")
    assert uploaded_output(ended) == "0.0:0 1.0:3 0.0:6 0.1:9", ended.err
    assert {path.parent.parent.name for path in tmp_path.rglob("step-*")} == {"old-0", "new-0", "newest-0", "named-0"}


def test_the_save_in_flight_is_committed_before_outputs_are_uploaded(warm, tmp_path):
    execution = Execution(warm, tmp_path)
    ended = execution.attempt(0, "ends_while_saving")
    assert uploaded_output(ended) == "returned", ended.err
    place = execution.place(0)
    (save,) = (path for path in place.with_name(f"{place.name}-safedist").iterdir() if path.is_dir())
    assert (save / saves.MANIFEST).exists()


def test_a_save_in_flight_is_committed_where_a_rank_raises(warm, tmp_path):
    ended = Execution(warm, tmp_path).attempt(0, "fails_while_saving")
    assert uploaded_output(ended) == "goes on with 8", ended.err


def test_a_job_that_goes_back_goes_on_from_there_when_its_ranks_start_again(warm, tmp_path):
    """``restore(step=6)``, where 7 was saved; two saves are kept."""
    execution, place = Execution(warm, tmp_path), str(tmp_path / "place")
    assert uploaded_output(execution.attempt(0, "goes_back", TEST_CHECKPOINTS=place)) == "saved"
    ended = execution.attempt(1, "goes_back", TEST_CHECKPOINTS=place, TEST_FAILING_ROUNDS="2")
    assert uploaded_output(ended) == "[7, 9, 11]", ended.err


def test_by_time_all_ranks_save_at_the_steps_that_their_agents_agree_on(warm, tmp_path):
    place = {"TEST_CHECKPOINTS": str(tmp_path / "place")}
    first, second = Job(warm, tmp_path / "job", "job_checkpoints:by_time", "", place, nproc_per_node=1).run()
    assert (first.code, second.code) == (0, 0), first.err
    one, other = ast.literal_eval(uploaded_output(first))
    assert one == other
    assert len(one) == 3
    kept = {saves.step_of(path.name) for path in (tmp_path / "place").glob("step-*")}
    assert kept == {*one}


def test_a_task_that_ends_before_a_save_was_due_says_that_none_was_made(warm, tmp_path):
    ended = Execution(warm, tmp_path).attempt(
        0, "ends_before_a_save_is_due", TEST_CHECKPOINTS=str(tmp_path / "checkpoints")
    )
    assert ended.code == 0
    assert (
        "no step was saved, up to step 0: the first save is due after 10 steps; save(step, state, force=True)"
        in ended.out
    )
