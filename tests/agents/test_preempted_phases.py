"""A pod is told to stop while ranks take no steps: they compile, hold the interpreter, or evaluate.

Real agents and ranks, two nodes over loopback, as in test_nodes, and real saves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.job import Job
from tests.harness.procs import TERM, Ended, Gate, Running, until, uploaded_output

SAVED, LAST = 1, 3
"""Of the first round, as in job_phases: the step that is saved as usual, and the last one that is done."""
AGREED = "a node was told to stop: all ranks save at step "


@pytest.fixture(scope="session")
def warm(warm_to_train):
    return warm_to_train


class InPhase(Job):
    """Two pods with one rank each, which are in the midst of something."""

    module = "job_phases"
    nproc_per_node = 1

    def __init__(self, warm, directory: Path, task: str, phase: str, gate: Gate) -> None:
        environment = {**gate.environment, "TEST_PHASE": phase, "TEST_WHERE": str(directory / "saves")}
        super().__init__(warm, directory, task, "", environment)
        self.gate = gate
        self.first, self.told = self.start(0), self.start(1)
        assert sorted(gate.heard(2)) == ["rank 0 is there", "rank 1 is there"]
        self.told.signal(TERM)

    def goes_on_with(self, step: int) -> Ended:
        """The pod is replaced, and the job comes to its end from there; how it was with the one that was told."""
        gone = self.told.wait()
        assert gone.code not in (0, -TERM)
        assert gone.uploaded == []
        again: Running = self.start(1)
        heard = self.gate.heard(2)
        assert sorted(heard) == [f"rank {rank} goes on with {step}" for rank in range(2)]
        ended = self.first.wait(), again.wait()
        assert [node.code for node in ended] == [0, 0], ended[0].err
        assert uploaded_output(ended[0]) == repr(list(range(step + 2)))
        assert "start again: restart" not in ended[0].err
        return gone


def test_before_the_first_step_there_is_nothing_to_save_and_the_pod_leaves_at_once(warm, tmp_path, ranks_gate):
    job = InPhase(warm, tmp_path, "before_the_first_step", "compiles", ranks_gate)
    gone = job.goes_on_with(0)
    assert "a node was told to stop" not in gone.err, "its ranks were not asked for anything"


def test_what_takes_longer_than_the_pod_may_wait_costs_the_steps_since_the_last_save(warm, tmp_path, ranks_gate):
    job = InPhase(warm, tmp_path, "impatient", "holds the interpreter", ranks_gate)
    job.goes_on_with(SAVED + 1)


def test_what_is_long_is_waited_for_and_the_step_after_it_is_saved(warm, tmp_path, ranks_gate):
    job = InPhase(warm, tmp_path, "patient", "evaluates on rank 0", ranks_gate)
    until(lambda: AGREED in (job.first.files / "err").read_text(), "the ranks know at which step they save")
    ranks_gate.let_go(1)
    gone = job.goes_on_with(LAST + 2)
    assert f"{AGREED}{LAST + 1}\n" in gone.err
