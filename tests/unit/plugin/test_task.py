"""What a task is to its user: inputs with their types, rank 0's outputs, Flyte's context, every way of calling it."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core import literals_pb2
from flytekit.models.literals import Literal, LiteralMap, Scalar, Union
from flytekit.models.types import Error, LiteralType, SimpleType, TypeStructure

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.errors import ConfigError
from tests.harness.procs import ROOT, Ended
from tests.harness.registered import registered


@pytest.fixture
def call(warm, tmp_path, ranks_gate):
    def run(name: str, **options: Any):
        environment = {**ranks_gate.environment, **options.pop("environment", {})}
        return warm.run(f"job_shapes:{name}", tmp_path / "job", environment=environment, **options)

    return run


def facts(ended: Ended, said: dict[str, Any], number: int) -> None:
    """Assert that a rank of two on one node knows who it is; takes what it said of that."""
    scratch, shared = Path(said.pop("scratch")), Path(said.pop("node_dir"))
    assert said.pop("job").startswith("local-")
    assert shared == scratch.parents[1] / "node"
    assert scratch.is_relative_to(ended.files / "tmp")
    assert said == {
        "rank": str(number),
        "local_rank": str(number),
        "node_rank": "0",
        "world_size": "2",
        "local_world_size": "2",
        "nnodes": "1",
        "round": "0",
        "attempt": "4",
        "cwd": str(ended.files),
    }


def test_inputs_arrive_in_every_rank_with_their_types_each_knows_who_it_is_and_rank_0_returns(call, ranks_gate):
    ended = call("call_everything", environment={"FLYTE_ATTEMPT_NUMBER": "4"})
    said = sorted((json.loads(line) for line in ranks_gate.heard(2)), key=lambda each: each["who"]["rank"])
    for number, each in enumerate(said):
        facts(ended, each["who"], number)
    for each in said:
        assert each["values"] == (
            "{'number': 3, 'text': 'grüße', 'numbers': [1, 2], 'mapping': {'a': 0.5}, "
            "'settings': Settings(rate=0.25, layers=[8, 4]), "
            "'when': datetime.datetime(2020, 2, 3, 0, 0, tzinfo=datetime.timezone.utc), 'maybe': None, "
            "'array': [0, 1, 2]}"
        )
        assert each["file text"] == "some data"
        assert each["folder names"] == ["part-0"]
    value = ended.value
    assert value["who"] == 0
    assert value["file"] == "made by rank 0", "the file outlives the scratch it was written in"
    assert value["settings"] == {"rate": 0.25, "layers": [8, 4]}
    assert value["array"] == [0, 1, 2]
    assert value["types"][2:] == ["Settings", "ndarray"]
    assert ended.scratch == []


@pytest.mark.horovod
def test_current_rank_says_the_same_with_horovod(call, ranks_gate):
    ended = call("who_horovod", environment={"FLYTE_ATTEMPT_NUMBER": "4"})
    said = sorted((json.loads(line) for line in ranks_gate.heard(2)), key=lambda each: each["rank"])
    assert ended.value == "0 of 2"
    for number, each in enumerate(said):
        facts(ended, each, number)


def test_a_pods_gpus_and_scratch_are_what_it_really_has_and_that_is_told(call, ranks_gate):
    told = {**registered(gpus=1, nproc_is_open=True), "SAFEDIST_SCRATCH_ROOT": "/var/run/safedist/scratch"}
    ended = call("who_alone", environment={**told, "NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"})

    assert ended.value == "0 of 2"
    assert len(ranks_gate.heard(2)) == 2
    assert (
        "warning: 2 ranks on each node, one for each GPU of this pod; the task was registered for 1 GPU," in ended.err
    )
    assert "warning: this pod has no scratch volume at /var/run/safedist/scratch" in ended.err


def test_a_directory_for_temporary_files_that_is_not_there_is_named_with_what_is_used_instead(call):
    ended = call("who_alone", environment={"TMPDIR": "/no/such/place"})
    assert ended.value == "0 of 1"
    assert "warning: TMPDIR=/no/such/place is not used (there is no such directory): scratch is in /" in ended.err


def test_the_deck_of_rank_0_is_uploaded_and_no_other(call):
    ended = call("with_deck", kind="execute")
    assert ended.code == 0
    page = (ended.files / "outputs" / "deck.html").read_text()
    assert "written by rank 0" in page
    assert "written by rank 1" not in page


def test_the_deck_of_a_failed_task_is_uploaded(call):
    ended = call("with_deck_and_failing", kind="execute")
    assert ended.uploaded == ["deck.html", "error.pb"], ended.err
    page = (ended.files / "outputs" / "deck.html").read_text()
    assert "later" in page


def test_tasks_work_in_every_shape(call, ranks_gate):
    """Twice in a workflow, mapped with one argument fixed, and below a decorator of the user's; with a secret and the
    execution, which ranks know; and cached, where it does not run again."""
    environment = {"_FSEC_VAULT_TOKEN": "hidden", "_UNION_VAULT_TOKEN": "hidden"}
    environment |= {"FLYTE_LOCAL_CACHE_ENABLED": "true", "TEST_UNIQUE": uuid.uuid4().hex}
    ended = call("every_shape", environment=environment)
    *shapes, secret, cached = ended.value
    assert shapes == [12, [11, 12], 2]
    assert ranks_gate.heard(4) == ["calling decorated"] * 2 + ["ran"] * 2
    assert (cached, ranks_gate.pending()) == ([2, 2], b"")
    assert secret.startswith("hidden")
    assert "hidden" not in ended.out + ended.err


def test_a_task_handles_the_failure_of_its_workflow(call, ranks_gate):
    """In a pod, where the error is read from a protobuf, as Flyte hands it over."""
    failed = Literal(scalar=Scalar(error=Error(failed_node_id="n7", message="not today")))
    declared = LiteralType(simple=SimpleType.ERROR, structure=TypeStructure(tag="FlyteError"))
    given = LiteralMap({"err": Literal(scalar=Scalar(union=Union(failed, declared)))}).to_flyte_idl()
    inputs = ranks_gate.said.with_name("inputs.pb")
    inputs.write_bytes(given.SerializeToString())
    ended = call("cleanup", kind="execute", arguments=["--inputs", str(inputs)])
    assert ended.uploaded == ["outputs.pb"], ended.err
    assert sorted(ranks_gate.heard(2)) == [f"rank {rank} cleans up after not today" for rank in (0, 1)]
    made = literals_pb2.LiteralMap.FromString((ended.files / "outputs" / "outputs.pb").read_bytes()).literals
    assert made["o0"].scalar.primitive.string_value == "n7"
    assert made["o1"].scalar.union.value.scalar.error.message == "not today"


def test_what_a_call_raises_is_told_and_caught_by_its_own_class_and_a_workflow_handles_it(call, ranks_gate):
    lock, result, workflow, own = call("every_failure").value
    assert "lock" in lock[1], "what cannot be pickled is an error, not a hang"
    assert result[0] == "RankFailedError"
    assert "rank 0" in result[1]
    assert "seven" in result[1]
    assert "ValueError: not today" in workflow[1]
    assert len(ranks_gate.heard(2)) == 2, "the workflow's task that cleans up ran"
    assert own[0] == "RankFailedError"


def test_a_task_of_the_main_module_works_unless_what_it_holds_cannot_be_pickled(warm, tmp_path):
    ended = warm.run(f"{ROOT / 'tests' / 'jobs' / 'job_shapes.py'}:__main__", tmp_path / "job", kind="main")
    assert "main says 8" in ended.out, ended.err
    assert "PayloadError: the task function can neither be imported by its ranks nor pickled for them" in ended.err
    assert ".guarded" in ended.err
    assert "cannot pickle '_thread.lock' object" in ended.err
    assert "to module level" in ended.err
    assert ended.scratch == []


def test_objects_of_a_script_reach_the_processes_that_its_rank_spawns(warm, tmp_path):
    ended = warm.run(f"{ROOT / 'tests' / 'jobs' / 'job_script.py'}:__main__", tmp_path / "job", kind="main")
    assert "total 800" in ended.out, ended.err


def test_a_dynamic_workflow_is_refused():
    from flytekit import dynamic

    with pytest.raises(ConfigError, match="dynamic"):

        @dynamic(task_config=SafeTorch(nproc_per_node=2))
        def no_ranks_here() -> None: ...


def test_no_deck_fields_may_be_said_by_none_as_of_any_task():
    from flytekit import task

    @task(task_config=SafeTorch(), enable_deck=True, deck_fields=None)
    def train() -> None:
        return

    assert train.plan.decks == ()
