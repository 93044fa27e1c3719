"""A pod is told to stop: every rank of the job knows, all save at one step, and only then does the pod leave.

Real agents and ranks, two nodes over loopback, as in test_nodes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.agents import test_elastic
from tests.harness.job import Job, succeeded
from tests.harness.procs import KILL, TERM, Gate, Running, alive, until, uploaded_error, uploaded_output
from tests.harness.product import agreement

GRACE = {"SAFEDIST_GRACE_SECONDS": "300"}
"""No pod is killed here before its ranks have saved."""


class Preempted(Job):
    """Two pods whose ranks have begun to train."""

    module = "job_preempted"

    def __init__(self, warm, directory: Path, task: str, gate: Gate) -> None:
        kept = directory / "kept"
        kept.mkdir()
        super().__init__(warm, directory, task, "", {**gate.environment, **GRACE, "TEST_KEPT": str(kept)})


def one_step(lines: list[str], *, is_told: bool = True) -> int:
    """The step that all ranks have said they saved, for a pod that is told to stop, or not."""
    said = {tuple(line.split()[2:]) for line in lines}
    assert len(said) == 1, lines
    ((saved, step, *flags),) = said
    assert (saved, flags) == ("saved", ["urgent", str(is_told), "preempted", str(is_told)])
    return int(step)


@pytest.mark.end(
    "a pod is told to stop (preempted, drained), and ranks use "
    "[`Checkpoints`](checkpoints.md#a-pod-that-is-told-to-stop)"
)
@pytest.mark.horovod
def test_all_ranks_save_at_one_step_and_the_job_goes_on_from_it_when_the_pod_is_replaced(
    warm, tmp_path, ranks_gate: Gate
):
    job = Preempted(warm, tmp_path, "horovod", ranks_gate)
    first, told = job.start(0), job.start(1)
    ranks_gate.heard(4)
    told.signal(TERM)
    step = one_step(ranks_gate.heard(4))
    gone = told.wait()
    assert gone.code not in (0, -TERM)
    assert gone.uploaded == []
    assert "told to stop by SIGTERM; every rank has been ended" in gone.err
    again = job.start(1)
    heard = ranks_gate.heard(4)
    assert all(f"from {step} of 4" in line and "round 0" not in line for line in heard)
    ended = succeeded(first, again)
    assert uploaded_output(ended[0]).startswith(f"from {step} to {step + 3} in round ")
    assert "start again: restart" not in ended[0].err, "no restart of the user's is there to be spent"


@pytest.mark.parametrize("nodes", [(0,), (0, 1)])
def test_node_0_or_all_nodes_told_to_stop_the_job_goes_on_from_the_step_at_which_all_ranks_saved(
    warm, tmp_path, ranks_gate: Gate, nodes
):
    job = Preempted(warm, tmp_path, "torch", ranks_gate)
    pods: list[Running] = [job.start(0), job.start(1)]
    ranks_gate.heard(4)
    for node in nodes:
        pods[node].signal(TERM)
    step = one_step(ranks_gate.heard(4))
    assert {path.read_text() for path in (tmp_path / "kept").iterdir()} == {f"{step} True"}
    for node in nodes:
        gone = pods[node].wait()
        assert gone.code not in (0, -TERM)
        assert gone.uploaded == []
        pods[node] = job.start(node)
    assert all(f"from {step} of 4" in line for line in ranks_gate.heard(4))
    ended = succeeded(*pods)
    assert uploaded_output(ended[0]).startswith(f"from {step} to {step + 3} in round ")
    assert not any("start again: restart" in node.err for node in ended)


def test_a_single_pod_saves_before_it_leaves(warm, tmp_path, ranks_gate: Gate):
    (tmp_path / "kept").mkdir()
    environment = {**ranks_gate.environment, "TEST_KEPT": str(tmp_path / "kept")}
    pod = warm.start("job_preempted:torch_alone", tmp_path / "pod", environment=environment, kind="execute")
    ranks_gate.heard(2)
    pod.signal(TERM)
    one_step(ranks_gate.heard(2))
    ended = pod.wait()
    assert "outputs.pb" not in ended.uploaded
    assert uploaded_error(ended).code == "SYSTEM:Stopped"
    assert ended.left == []
    assert ended.scratch == []


def test_who_presses_ctrl_c_waits_for_no_save(warm, tmp_path, ranks_gate: Gate):
    (tmp_path / "kept").mkdir()
    environment = {**ranks_gate.environment, "TEST_KEPT": str(tmp_path / "kept")}
    pod = warm.start("job_preempted:torch_alone", tmp_path / "pod", environment=environment, kind="execute")
    ranks_gate.heard(2)
    pod.signal(signal.SIGINT)
    pod.wait()
    assert ranks_gate.pending() == b""
    assert list((tmp_path / "kept").iterdir()) == []


class Overlapping:
    """Two attempts of one pod: Flyte starts the second as soon as the first is being deleted."""

    def __init__(self, warm, directory: Path, gate: Gate, **environment: str) -> None:
        self.kept = directory / "kept"
        self.kept.mkdir()
        self._warm, self._directory = warm, directory
        self._environment = {**gate.environment, **GRACE, "TEST_KEPT": str(self.kept), **environment}

    def start(self, attempt: int, **more: str) -> Running:
        environment = {**self._environment, "FLYTE_ATTEMPT_NUMBER": str(attempt), **more}
        call, files = "job_preempted:alone_by_checkpoints", self._directory / f"attempt-{attempt}"
        return self._warm.start(call, files, environment=environment, kind="execute")

    @property
    def mark(self) -> Path:
        return self.kept / agreement.MARK


def test_the_next_attempt_of_a_single_pod_resumes_from_what_the_one_before_saves_as_it_leaves(
    warm, tmp_path, ranks_gate: Gate
):
    job = Overlapping(warm, tmp_path, ranks_gate)
    first = job.start(0)
    assert ranks_gate.heard(2) == ["attempt 0 begins with 0", "in a long step"]
    first.signal(TERM)
    until(job.mark.exists, "a rank is in the middle of a step")  # in the middle of the step: nothing is saved yet
    second = job.start(1)
    until(lambda: "waiting for the pod of the attempt before" in (second.files / "out").read_text(), "it waits")
    ranks_gate.let_go(1)
    assert "outputs.pb" not in first.wait().uploaded
    (said,) = ranks_gate.heard(1)
    assert int(said.removeprefix("attempt 1 begins with ")) > 1
    assert second.wait().uploaded == ["outputs.pb"]
    assert not job.mark.exists()


def test_the_next_attempt_of_two_pods_resumes_from_what_those_of_the_one_before_save_as_they_leave(
    warm, tmp_path, ranks_gate: Gate
):
    """Flyte ends all pods of an attempt whose ``timeout`` is over, and starts the next one."""
    more = {**ranks_gate.environment, **GRACE, "TEST_KEPT": str(tmp_path / "kept")}
    call = "job_preempted:two_by_checkpoints"
    of_attempt = [
        Job(warm, tmp_path / number / "job", call, "", {**more, "FLYTE_ATTEMPT_NUMBER": number}, nproc_per_node=1)
        for number in "01"
    ]
    before = [of_attempt[0].start(pod) for pod in (1, 0)]
    assert sorted(ranks_gate.heard(4)) == ["attempt 0 begins with 0"] * 2 + ["in a long step"] * 2
    for pod in before:
        pod.signal(TERM)
    until((tmp_path / "kept" / agreement.MARK).exists, "both are in the middle of a step")
    after = [of_attempt[1].start(pod) for pod in (1, 0)]
    until(lambda: "waiting for the pod of the attempt before" in (after[1].files / "out").read_text(), "it waits")
    ranks_gate.let_go(2)
    assert not any(name.endswith(".pb") for pod in before for name in pod.wait().uploaded)
    (first,) = {int(line.removeprefix("attempt 1 begins with ")) for line in ranks_gate.heard(2)}
    assert first > 1
    assert [pod.wait().uploaded for pod in after] == [[], ["outputs.pb"]]
    assert not (tmp_path / "kept" / agreement.MARK).exists()


def test_a_mark_that_another_pod_has_left_stays(warm, tmp_path, ranks_gate: Gate):
    job = Overlapping(warm, tmp_path, ranks_gate, TEST_HOW="raise")
    first = job.start(0)
    assert ranks_gate.heard(2) == ["attempt 0 begins with 0", "in a long step"]
    job.mark.write_text("another")
    ranks_gate.let_go(1)
    assert first.wait().uploaded == ["error.pb"]
    assert job.mark.exists()


def test_a_single_pod_that_is_killed_before_it_has_saved_is_waited_for_once(warm, tmp_path, ranks_gate: Gate):
    job = Overlapping(warm, tmp_path, ranks_gate)
    first = job.start(0)
    ranks_gate.heard(2)
    first.signal(TERM)
    until(job.mark.exists, "a rank is in the middle of a step")
    first.signal(signal.SIGKILL)
    first.wait()
    second = job.start(1, TEST_PREEMPTION="3")
    assert ranks_gate.heard(1) == ["attempt 1 begins with 0"]
    ended = second.wait()
    assert ended.uploaded == ["outputs.pb"], ended.err
    assert "and is not waited for any longer" in ended.out
    assert not job.mark.exists(), "the attempt after this one need not wait as well"


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_single_pod_whose_function_fails_when_told_to_stop_lets_the_next_attempt_begin_at_once(
    warm, tmp_path, ranks_gate: Gate, how
):
    job = Overlapping(warm, tmp_path, ranks_gate, TEST_HOW=how)
    pod = job.start(0)
    ranks_gate.heard(2)
    pod.signal(TERM)
    until(job.mark.exists, "a rank is in the middle of a step")
    ranks_gate.let_go(1)
    pod.wait()
    assert not job.mark.exists()


def test_ranks_that_save_in_their_own_way_are_waited_for(warm, tmp_path, ranks_gate: Gate):
    job = Preempted(warm, tmp_path, "by_hand", ranks_gate)
    first, told = job.start(0), job.start(1)
    assert all(line.endswith("preempted False") for line in ranks_gate.heard(4))
    told.signal(TERM)
    assert sorted(ranks_gate.heard(4)) == [f"rank {rank} preempted" for rank in range(4)]
    ranks_gate.let_go(4)
    # Not ended by the pod that leaves: each gets to say this, and only then that it has saved.
    assert sorted(ranks_gate.heard(4)) == [f"rank {rank} has saved" for rank in range(4)]
    assert told.wait().code not in (0, -TERM)
    again = job.start(1)
    assert all("round 0" not in line for line in ranks_gate.heard(4))
    assert [node.wait().code for node in (first, again)] == [0, 0]


def test_where_the_other_node_is_lost_while_node_0_stays_for_a_save_nobody_waits_for_its_ranks(
    warm, tmp_path, ranks_gate: Gate
):
    job = Preempted(warm, tmp_path, "by_hand", ranks_gate)
    job.registered = {"timeouts": {"heartbeat": 600}}  # whoever waited for a lost node would wait for ever
    told, lost = job.start(0), job.start(1)
    ranks_gate.heard(4)
    told.signal(TERM)
    assert sorted(ranks_gate.heard(4)) == [f"rank {rank} preempted" for rank in range(4)]
    lost.signal(KILL)
    lost.wait()
    again = job.start(1)  # and hears of the round that is over from the node 0 that leaves
    assert told.wait().code not in (0, -TERM)
    pods = job.start(0), again
    assert all("round 1" in line for line in ranks_gate.heard(4))
    assert [pod.wait().code for pod in pods] == [0, 0]


@pytest.mark.parametrize("nodes", [(1,), (0, 1)])
def test_ranks_that_all_return_meanwhile_have_done_the_job(warm, tmp_path, ranks_gate: Gate, nodes):
    job = Preempted(warm, tmp_path, "done_on_two", ranks_gate)
    pods = [job.start(0), job.start(1)]
    ranks_gate.heard(4)
    for node in nodes:
        pods[node].signal(TERM)
    ended = [pod.wait() for pod in pods]
    assert uploaded_output(ended[0]) == "done in round 0", ended[0].err
    assert ended[0].code == 0
    assert ended[1].uploaded == []


def saves_and_goes_on(job: Preempted, told: Running, other: Running, ranks_gate: Gate) -> None:
    """The ranks of node 1 save for node 0, which leaves; and its replacement ends the job with them."""
    assert sorted(ranks_gate.heard(2)) == ["rank 2 has saved", "rank 3 has saved"]
    assert told.wait().code not in (0, -TERM)
    again = job.start(0)
    assert all("round 1" in line for line in ranks_gate.heard(4))
    ended = succeeded(again, other)
    assert uploaded_output(ended[0]) == "done in round 1"


def test_where_node_0_is_told_to_stop_when_its_ranks_have_returned_the_others_save(warm, tmp_path, ranks_gate: Gate):
    job = Preempted(warm, tmp_path, "done_first_on_node_0", ranks_gate)
    first, other = job.start(0), job.start(1)
    ranks_gate.heard(4)
    until(job.a_node_is_done, "the ranks of node 0 have returned")
    first.signal(TERM)
    saves_and_goes_on(job, first, other, ranks_gate)


def test_what_an_agent_that_stood_still_has_not_seen_of_its_ranks_is_asked_for_before_a_pod_leaves(
    warm, tmp_path, ranks_gate: Gate
):
    job = Preempted(warm, tmp_path, "looks_late_on_node_1", ranks_gate)
    first, other = job.start(0), job.start(1)
    ranks_gate.heard(4)
    until(job.a_node_is_done, "the ranks of node 0 have returned")
    other.signal(signal.SIGSTOP)
    ranks_gate.let_go(2)
    assert sorted(ranks_gate.heard(2)) == ["rank 2 round 0 preempted False", "rank 3 round 0 preempted False"]
    first.signal(TERM)
    until(lambda: "this pod stays until" in (first.files / "err").read_text(), "node 0 is told to stop")
    other.signal(signal.SIGCONT)
    saves_and_goes_on(job, first, other, ranks_gate)


def test_a_single_pods_ranks_that_return_meanwhile_have_done_the_job(warm, tmp_path, ranks_gate: Gate):
    environment = {**ranks_gate.environment, **GRACE}
    pod = warm.start("job_preempted:done_alone", tmp_path / "pod", environment=environment, kind="execute")
    ranks_gate.heard(2)
    pod.signal(TERM)
    ended = pod.wait()
    assert uploaded_output(ended) == "done in round 0", ended.err
    assert ended.code == 0


ENDS_BEFORE_THE_OTHER = """
import os
from flytekitplugins_safedist import current_rank
from tests.harness.procs import say

me = current_rank()
say(f"{os.getpid()} {me.preempted}")
if me.rank == 1:
    os._exit(0)
while not me.preempted:
    pass
say("rank 0 has saved")
me.saved()
while True:
    pass
"""


def test_a_rank_whose_script_has_ended_at_once_keeps_no_pod_that_is_told_to_stop(warm, tmp_path, ranks_gate: Gate):
    script = tmp_path / "script.py"
    script.write_text(ENDS_BEFORE_THE_OTHER)
    environment = {**ranks_gate.environment, "SAFEDIST_GRACE_SECONDS": "30000", "TEST_SCRIPT": str(script)}
    pod = warm.start("job_preempted:by_script", tmp_path / "pod", environment=environment, kind="execute")
    pids = [int(line.split()[0]) for line in ranks_gate.heard(2)]
    until(lambda: not all(map(alive, pids)), "rank 1 has ended")
    pod.signal(TERM)
    assert ranks_gate.heard(1) == ["rank 0 has saved"]
    assert pod.wait().left == []


class PreemptedRange(test_elastic.Range):
    """Three pods of a range of two to three."""

    module = "job_preempted"


def test_checkpoints_save_before_a_node_joins_though_no_save_is_due(warm, tmp_path, ranks_gate: Gate):
    more = {**ranks_gate.environment, "TEST_KEPT": str(tmp_path / "kept")}
    job = PreemptedRange(warm, tmp_path, "range_by_checkpoints", "", more)
    pods = [job.start_host(), job.start(1)]
    assert all("from 0 of 4" in line for line in ranks_gate.heard(4))
    pods.append(job.start(2))
    lines = [line.split() for line in ranks_gate.heard(6)]
    assert {(step, size) for _, _, _, step, _, size in lines} == {(lines[0][3], "6")}
    assert int(lines[0][3]) > 0
    assert [pod.wait().code for pod in pods] == [0, 0, 0]


def test_a_range_goes_on_larger_and_smaller_from_the_step_at_which_all_ranks_saved(warm, tmp_path, ranks_gate: Gate):
    kept = tmp_path / "kept"
    kept.mkdir()
    job = PreemptedRange(warm, tmp_path, "torch_range", "", {**ranks_gate.environment, "TEST_KEPT": str(kept)})
    pods = [job.start_host(), job.start(1)]
    assert all("from 0 of 4" in line for line in ranks_gate.heard(4))
    pods.append(job.start(2))
    step = one_step(ranks_gate.heard(4), is_told=False)
    assert all(f"from {step} of 6" in line for line in ranks_gate.heard(6))
    pods[2].signal(TERM)
    step = one_step(ranks_gate.heard(6))
    assert "outputs.pb" not in pods[2].wait().uploaded
    assert all(f"from {step} of 4" in line for line in ranks_gate.heard(4))
    succeeded(*pods[:2])
