"""The examples of checkpoints come to one loss: unbroken, with a rank killed, and with a pod that is told to stop."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.harness.job import Job
from tests.harness.procs import TERM, Gate, Running, uploaded_output

EXAMPLES = [
    ("torch", "resume_ddp"),
    ("torch", "resume_lightning"),
    ("torch", "resume_hf"),
    pytest.param("horovod", "resume_horovod", marks=pytest.mark.horovod),
]

AS_DDP = ["resume_fsdp", "resume_fsdp1", "resume_loader"]
"""Told to stop they save as ``resume_ddp`` does, and when they are resumed they restore as they do when killed."""


@pytest.fixture(scope="session")
def warm(warm_to_train):
    return warm_to_train


def start(warm, directory: Path, task: str, module: str, how: str, environment: dict[str, str]) -> Running:
    more = {**environment, "TEST_HOW": how, "TEST_WHERE": str(directory / "saves")}
    started: Running = warm.start(f"job_resumed:{task}", directory, inputs={"module": module}, environment=more)
    return started


def trained(running: Running) -> float:
    ended = running.wait()
    assert ended.code == 0, ended.err
    value: float = ended.value
    return value


@pytest.fixture(scope="module")
def unbroken(warm, tmp_path_factory):
    """The loss of an example's unbroken run, which is made once for all tests that compare with it."""

    @functools.cache
    def loss(task: str, module: str) -> float:
        directory = tmp_path_factory.mktemp(module) / "unbroken"
        return trained(start(warm, directory, task, module, "unbroken", {}))

    return loss


def goes_on_when_killed(gate: Gate) -> None:
    assert gate.heard(1) == ["rank 0 has committed 9"]
    gate.let_go(1)
    assert sorted(gate.heard(2)) == ["rank 0 goes on with 10", "rank 1 goes on with 10"]


@pytest.mark.parametrize("module", AS_DDP)
def test_killed_in_the_middle_and_resumed_it_has_the_loss_of_the_unbroken_run(
    warm, tmp_path, ranks_gate: Gate, unbroken, module
):
    broken = start(warm, tmp_path / "broken", "torch", module, "killed", ranks_gate.environment)
    goes_on_when_killed(ranks_gate)
    assert trained(broken) == pytest.approx(unbroken("torch", module), rel=1e-5)
    assert unbroken("torch", module) < 2.0, "it has learnt something"


@pytest.mark.parametrize(("task", "module"), EXAMPLES)
def test_killed_and_then_told_to_stop_in_the_middle_it_has_that_loss_and_not_one_step_is_lost_by_the_stop(
    warm, tmp_path, ranks_gate: Gate, unbroken, task, module
):
    directory = tmp_path / "broken"
    environment = {**ranks_gate.environment, "TEST_WHERE": str(directory / "saves"), "TEST_MODULE": module}
    job = Job(warm, directory, f"job_resumed:{task}_nodes", "killed and told", environment, nproc_per_node=1)
    first, told = job.start(0), job.start(1)
    goes_on_when_killed(ranks_gate)
    assert sorted(ranks_gate.heard(2)) == ["rank 0 is there", "rank 1 is there"]
    told.signal(TERM)
    assert told.wait().code not in (0, -TERM)
    again = job.start(1)
    goes_on = {int(line.split()[-1]) for line in ranks_gate.heard(2)}
    ended = first.wait(), again.wait()
    assert [node.code for node in ended] == [0, 0], ended[0].err
    (agreed,) = re.findall(r"a node was told to stop: all ranks save at step (\d+)", ended[0].err)
    assert goes_on == {int(agreed) + 1}
    assert int(agreed) in (12, 13), "every rank had done step 11, and no save is due before step 14"
    assert float(uploaded_output(ended[0])) == pytest.approx(unbroken(task, module), rel=1e-5)
    assert unbroken(task, module) < (3.4 if module == "resume_hf" else 2.0), "it has learnt something"
    assert ended[0].err.count("start again: restart") == 1, "for the kill"
