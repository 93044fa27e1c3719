"""Node 0 is lost, at many points, in many ways: the job goes on with its replacement, and nothing is spent on it.

Real agents and ranks on loopback, as in ``test_nodes.py``. A replacement has the name and, here, also the address of
the process before it; container tests give it another.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.job import Job, succeeded
from tests.harness.procs import KILL, TERM, Ended, Gate, Running, until, uploaded_error, uploaded_output

STOP = signal.SIGSTOP


class OnePrefix(Job):
    """Pods that share one output prefix, as those of one attempt do, with one rank each."""

    nproc_per_node = 1

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.registered = {"nproc_per_node": 1}

    def start(self, node: int, more: dict[str, str] | None = None) -> Running:
        self.environment.update(more or {})
        return super().start(node, outputs=self.outputs)

    @property
    def outputs(self) -> Path:
        return self.directory / "outputs"

    @property
    def uploaded(self) -> list[str]:
        """What is a verdict: the draft that a pod was killed over is hidden."""
        return sorted(path.name for path in self.outputs.iterdir() if not path.name.startswith("."))

    def says(self, pod: Running, text: str) -> None:
        """Wait until a pod's log has a text."""
        until(lambda: text in (pod.files / "err").read_text(errors="replace"), f"a pod says {text!r}")

    def listens(self) -> None:
        """Wait until node 0's store does."""

        until(self.listening, "node 0 listens")


def end(pod: Running, how: int) -> None:
    """Lose a pod: at once, in good order, or frozen for good (and then given up by its machine)."""
    pod.signal(how)
    if how != STOP:
        pod.wait()


def output_of(job: OnePrefix, ended: Ended) -> str:
    """The job's output, read like any pod's own."""
    (ended.files / "outputs").mkdir(exist_ok=True)
    (ended.files / "outputs" / "outputs.pb").write_bytes((job.outputs / "outputs.pb").read_bytes())
    return uploaded_output(ended)


def goes_on(job: OnePrefix, *pods: Running) -> tuple[Ended, ...]:
    """Every pod leaves with 0, the attempt has one output, and none of ``max_restarts`` is spent."""
    ended = succeeded(*pods)
    assert job.uploaded == ["outputs.pb"]
    assert output_of(job, ended[0]).startswith("1 from 2 ranks in round ")
    assert not any("all ranks start again" in pod.err for pod in ended)
    return ended


@pytest.mark.end("node 0's pod is killed, evicted, preempted")
@pytest.mark.parametrize(
    ("point", "how"),
    [("ranks start", KILL), ("function returns", STOP)],
)
def test_node_0_is_lost_while(warm, tmp_path, ranks_gate: Gate, point, how):
    job = OnePrefix(warm, tmp_path, "torch_points", point, ranks_gate.environment)
    lost, other = job.start(0), job.start(1)
    ranks_gate.heard(2)
    end(lost, how)
    if how == STOP:
        job.says(other, "waiting for its replacement")
        end(lost, KILL)
    again = job.start(0)
    ranks_gate.let_go(12)  # those of the first round that took a word did not live to use it
    goes_on(job, again, other)


def test_node_0_is_lost_before_the_others_come(warm, tmp_path):
    job = OnePrefix(warm, tmp_path, "torch", "nothing")
    lost = job.start(0)
    job.listens()
    end(lost, KILL)
    other = job.start(1)
    job.says(other, "start: torch")
    goes_on(job, job.start(0), other)


@pytest.mark.horovod
def test_node_0_is_lost_twice_in_a_row(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "horovod", "gate", ranks_gate.environment)
    lost, other = job.start(0), job.start(1)
    for _ in range(2):
        ranks_gate.heard(2)
        end(lost, KILL)
        lost = job.start(0)
    rounds = {line.split(" pid")[0].rpartition(" ")[2] for line in ranks_gate.heard(2)}
    assert len(rounds) == 1
    ranks_gate.let_go(12)
    goes_on(job, lost, other)


def test_the_other_node_is_lost_while_it_looks_for_node_0(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch", "gate", ranks_gate.environment)
    lost, other = job.start(0), job.start(1)
    ranks_gate.heard(2)
    end(lost, KILL)
    job.says(other, "waiting for its replacement")
    end(other, TERM)
    pods = job.start(0), job.start(1)
    ranks_gate.let_go(12)
    goes_on(job, *pods)


def test_a_sign_in_the_store_that_is_damaged_is_told_and_keeps_no_new_leader_waiting(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch", "gate", ranks_gate.environment)
    lost, other = job.start(0), job.start(1)
    ranks_gate.heard(2)
    end(lost, KILL)
    sign = job.outputs / ".safedist-leader.json"
    sign.write_bytes(b'{"leader": {"te')
    again = job.start(0)
    ranks_gate.let_go(12)
    said = goes_on(job, again, other)[0].err
    assert f"""{sign} is not a sign of who leads this job: b'{{"leader": {{"te'""" in said


def test_both_nodes_are_lost_at_once(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch", "gate", ranks_gate.environment)
    pods = job.start(0), job.start(1)
    ranks_gate.heard(2)
    for pod in pods:
        pod.signal(KILL)
    pods = job.start(1), job.start(0)
    ranks_gate.let_go(12)
    goes_on(job, *pods)


@pytest.mark.parametrize("how", [KILL, TERM])
def test_node_0_is_lost_when_all_ranks_are_done(warm, tmp_path, how):
    """Before, in, or after the upload: whichever it is, the attempt has its output in the end."""
    job = OnePrefix(warm, tmp_path, "torch", "nothing")
    lost, other = job.start(0), job.start(1)
    job.says(other, "waiting until node 0 has uploaded")
    with contextlib.suppress(ProcessLookupError):  # after the upload it may have ended by itself
        end(lost, how)
    goes_on(job, job.start(0), other)


@pytest.mark.end("node 0 freezes, or is cut off")
def test_node_0_wakes_from_a_pause_that_lasted_longer_than_the_heartbeat(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch", "gate", ranks_gate.environment)
    paused, other = job.start(0), job.start(1)
    ranks_gate.heard(2)
    paused.signal(STOP)
    job.says(other, "waiting for its replacement")
    paused.signal(signal.SIGCONT)
    ranks_gate.let_go(12)
    goes_on(job, paused, other)


WHO = [pytest.param("horovod", 0, marks=pytest.mark.horovod), ("torch", 1)]


@pytest.mark.end("no new node 0 comes within `Timeouts.rendezvous`")
@pytest.mark.end("node lost", "SYSTEM:NodeLost")
@pytest.mark.parametrize(("task", "node"), WHO)
def test_when_nobody_replaces_a_node_the_other_uploads_that_and_a_late_one_finds_it(
    warm, tmp_path, task, node, ranks_gate: Gate, as_promised
):
    """The others' ranks lose their connections to those of that node, each with an error of its own."""
    job = OnePrefix(warm, tmp_path, f"{task}_trains", "", ranks_gate.environment)
    pods = [job.start(0), job.start(1)]
    ranks_gate.heard(2)
    end(pods[node], KILL)
    ended = pods[1 - node].wait()
    assert (ended.code, job.uploaded) == (0, ["error.pb"]), ended.err
    (ended.files / "outputs").mkdir(exist_ok=True)
    (ended.files / "outputs" / "error.pb").write_bytes((job.outputs / "error.pb").read_bytes())
    as_promised(ended)
    assert uploaded_error(ended).message.startswith(f"node {node}")
    late = job.start(node).wait()
    assert (late.code, job.uploaded) == (0, ["error.pb"])
    assert "its result is uploaded" in late.err


def test_a_pod_that_finds_how_others_have_ended_the_attempt_takes_it_for_no_success(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch_kept", "in the function", ranks_gate.environment)
    lost, other = job.start(0), job.start(1)
    ranks_gate.heard(2)
    end(lost, KILL)
    job.says(other, "waiting for its replacement")
    (job.outputs / "error.pb").write_bytes(b"of a node that gave up first")
    ended = other.wait()
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "[safedist] end: the attempt has ended, as its result says, after 1 round(s)" in ended.err
    assert len(ended.scratch) == 1, "nobody has said that the job has succeeded"


class Three(OnePrefix):
    """Three pods with one rank each, whose survivors both take themselves for the lowest."""

    module = "job_survivors"
    nodes = "3"


def test_two_survivors_that_both_take_themselves_for_the_lowest_upload_one_verdict(warm, tmp_path, ranks_gate: Gate):
    job = Three(warm, tmp_path, "not_replaced", "gate", {**ranks_gate.environment, "TEST_PUTS_WAIT": "1"})
    lost, *others = [job.start(node) for node in range(3)]
    ranks_gate.heard(3)
    end(lost, KILL)
    assert ranks_gate.heard(2) == ["puts error.pb"] * 2  # both have looked, and found none
    assert job.uploaded == []
    ranks_gate.let_go(2)
    ended = [pod.wait() for pod in others]
    assert [(pod.code, pod.left) for pod in ended] == [(0, [])] * 2
    assert job.uploaded == ["error.pb"]
    assert sorted("nothing replaces it" in pod.err for pod in ended) == [False, True]
