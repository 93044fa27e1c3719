"""A range of nodes: who is there takes part, one node uploads, and nobody exits 0 before it has.

The nodes are real agents in processes of their own that meet over loopback, with the variables that a PyTorchJob with
an elastic policy gives its pods. What is not real here is the network between them; container tests have that.
"""

from __future__ import annotations

import signal

import pytest
from flyteidl.core import execution_pb2

from tests.harness.job import Job, succeeded
from tests.harness.procs import KILL, Ended, Gate, Running, until, uploaded_error, uploaded_output

ONE_RANK = ("torch_alone", "torch_impatient", "torch_done_early", "torch_three", "torch_patient")
"""Tasks with one rank per node."""


class Range(Job):
    """Pods of one PyTorchJob with an elastic policy of 2 to 3 workers."""

    module = "job_elastic"
    nodes = "2:3"

    @property
    def nproc_per_node(self) -> int:  # type: ignore[override]
        return 1 if self.task in ONE_RANK else 2

    def start_host(self) -> Running:
        """Start the pod that leads the job. On one machine, the first that listens does."""
        host = self.start(0)
        until(self.listening, "the first pod listens")
        return host

    def start_two(self) -> tuple[Running, Running]:
        """Node 0, where the job's coordinator is, and another pod."""
        return self.start_host(), self.start(1)


def all_output(*pods: Ended) -> str:
    return "\n".join(pod.err for pod in pods)


def goes_on(says: str, *pods: Running) -> tuple[Ended, ...]:
    """Every pod leaves with 0, one of them has uploaded the outputs, and none of ``max_restarts`` is spent."""
    ended = succeeded(*pods)
    assert sorted(name for pod in ended for name in pod.uploaded) == ["outputs.pb"]
    assert uploaded_output(next(pod for pod in ended if pod.uploaded)).startswith(says)
    assert "all ranks start again" not in all_output(*ended)
    return ended


@pytest.mark.end('in a range (`nnodes="2:4"`), a node is lost for good')
@pytest.mark.horovod
def test_when_a_node_is_killed_in_a_collective_the_others_go_on_without_it(warm, tmp_path, ranks_gate: Gate):
    job = Range(warm, tmp_path, "horovod_three", "gate", ranks_gate.environment)
    pods = [job.start_host(), job.start(1), job.start(2)]
    assert all("round 0 " in line and "of 6" in line for line in ranks_gate.heard(6))
    ranks_gate.let_go(4)  # at least one rank of another pod waits in the collective for the killed one's
    pods[2].signal(KILL)
    assert pods[2].wait().code == -KILL
    # Words that ranks of the killed pod did not take are taken by others.
    while "of 4" not in (line := ranks_gate.heard(1)[0]):
        pass
    ranks_gate.let_go(8)
    goes_on("6 from 4 of 4 ranks on 2 nodes", *pods[:2])
    assert "round 0" not in line


def test_when_a_node_is_told_to_stop_the_others_go_on_at_once(warm, tmp_path, ranks_gate: Gate):
    job = Range(warm, tmp_path, "torch_patient", "gate", ranks_gate.environment)
    pods = [job.start_host(), job.start(1), job.start(2)]
    assert all("round 0 " in line and "of 3" in line for line in ranks_gate.heard(3))
    pods[2].signal(signal.SIGTERM)
    # Within this gate's patience, which is a fraction of the time after which a node without a heartbeat counts as
    # lost.
    assert all("round 1 " in line and "of 2" in line for line in ranks_gate.heard(2))
    assert pods[2].wait().code == 137
    ranks_gate.let_go(2)
    ended = goes_on("1 from 2 of 2 ranks on 2 nodes in round 1", *pods[:2])
    assert all("has left: told to stop by SIGTERM" in pod.err for pod in ended)


def test_a_node_that_is_lost_with_rank_0s_outputs_costs_a_round_though_its_rank_had_succeeded(
    warm, tmp_path, ranks_gate: Gate
):
    job = Range(warm, tmp_path, "torch_done_early", "nothing", ranks_gate.environment)
    host, uploader = job.start_two()
    assert ranks_gate.heard(1) == ["rank 1 round 0"]
    until(job.a_node_is_done, "rank 0's node is done")
    uploader.signal(KILL)
    uploader.wait()
    again = job.start(1)
    assert ranks_gate.heard(1) == ["rank 1 round 1"]
    ranks_gate.let_go(2)
    goes_on("round 1", host, again)


def test_a_node_that_comes_late_is_taken_in_without_spending_a_restart(warm, tmp_path, ranks_gate: Gate):
    job = Range(warm, tmp_path, "torch", "gate", ranks_gate.environment)
    pods = [job.start_host(), job.start(1)]
    assert all("round 0 " in line and "of 4" in line for line in ranks_gate.heard(4))
    pods.append(job.start(2))
    heard = ranks_gate.heard(6)
    assert all("of 6" in line and "round 0 " not in line for line in heard)
    ranks_gate.let_go(10)
    goes_on("15 from 6 of 6 ranks on 3 nodes", *pods)


@pytest.mark.horovod
def test_the_others_outlive_the_stores_host_and_go_on_with_the_one_that_takes_its_place(
    warm, tmp_path, ranks_gate: Gate
):
    job = Range(warm, tmp_path, "horovod", "gate", ranks_gate.environment)
    host, other = job.start_two()
    assert all("round 0 " in line for line in ranks_gate.heard(4))
    host.signal(signal.SIGTERM)
    assert host.wait().code not in (0, -signal.SIGTERM)
    again = job.start_host()
    assert all("round 0 " not in line and "of 4" in line for line in ranks_gate.heard(4))
    ranks_gate.let_go(8)
    goes_on("6 from 4 of 4 ranks on 2 nodes", again, other)


def test_three_pods_lose_the_stores_host_and_meet_again_at_its_replacement(warm, tmp_path, ranks_gate: Gate):
    job = Range(warm, tmp_path, "torch_three", "gate", ranks_gate.environment)
    pods = [job.start_host(), job.start(1), job.start(2)]
    assert all("round 0 " in line and "of 3" in line for line in ranks_gate.heard(3))
    pods[0].signal(KILL)
    pods[0].wait()
    pods[0] = job.start_host()
    while "of 3" not in (line := ranks_gate.heard(1)[0]):
        ranks_gate.let_go(1)  # two may have gone on before the third was there
    ranks_gate.let_go(6)
    goes_on("3 from 3 of 3 ranks on 3 nodes", *pods)
    assert "round 0 " not in line


@pytest.mark.end("a pod cannot reach the pod that leads the job, and that one lives")
def test_a_pod_that_cannot_reach_the_one_that_leads_the_job_ends_nothing_while_that_lives(
    warm, tmp_path, ranks_gate: Gate
):
    job = Range(warm, tmp_path, "torch_alone", more=ranks_gate.environment)
    job.nodes, outputs = "1:2", tmp_path / "outputs"
    leads = job.start(0, outputs=outputs)
    assert "of 1" in ranks_gate.heard(1)[0]
    cut_off = job.start(1, {"PET_RDZV_ENDPOINT": f"192.0.2.1:{job.port}"}, outputs=outputs).wait()  # nobody's address
    assert cut_off.code == 137, cut_off.err
    assert "cannot reach the pod that leads the job" in cut_off.err
    assert "its sign in the store is renewed" in cut_off.err
    ranks_gate.let_go(1)
    ended = leads.wait()
    assert (ended.code, (outputs / "error.pb").exists()) == (0, False), ended.err
    assert (outputs / "outputs.pb").exists()


def test_a_node_that_cannot_start_the_next_round_uploads_nothing_and_another_takes_its_place(warm, tmp_path):
    job = Range(warm, tmp_path, "torch", "block the next round")
    host, other = job.start_two()
    cannot = other.wait()
    assert (cannot.code, cannot.uploaded) == (137, []), cannot.err
    assert "this node cannot do its part: ScratchError" in cannot.err
    again = job.start(2)
    ended = host.wait(), again.wait()
    assert [pod.code for pod in ended] == [0, 0], all_output(*ended)
    assert uploaded_output(ended[0]) == "6 from 4 of 4 ranks on 2 nodes in round 2"


def test_too_few_nodes_are_an_error_that_says_how_many_came(warm, tmp_path):
    ended = Range(warm, tmp_path, "torch_impatient", "nothing").start(0).wait()
    assert (ended.code, ended.uploaded) == (0, ["error.pb"])
    error = uploaded_error(ended)
    assert (error.code, error.origin) == ("SYSTEM:RendezvousTimeout", execution_pb2.ExecutionError.SYSTEM)
    assert "fewer than 2 nodes came together within 1 s" in ended.err
    assert "1 process(es) have joined" in ended.err


def test_a_pod_with_less_gpus_than_the_one_that_leads_stays_idle_and_the_others_go_on(warm, tmp_path):
    """Its container would begin anew again and again, and the operator ends a job for so many starts."""
    job = Range(warm, tmp_path, "torch", "nothing")
    job.registered = {"gpus": 2, "nproc_is_open": True, "nproc_per_node": 2}
    host = job.start_host()
    short = job.start(1, {"NVIDIA_VISIBLE_DEVICES": "GPU-a"})
    said = "takes no part: it has 1 rank(s), and node 0 has 2"
    until(lambda: said in (short.files / "err").read_text(), "it is told so")
    other = job.start(2)
    ended = succeeded(host, other, short)
    assert [pod.uploaded for pod in ended] == [["outputs.pb"], [], []]
    assert uploaded_output(ended[0]) == "6 from 4 of 4 ranks on 2 nodes in round 0"
    assert "waiting until node 0 has uploaded" in ended[1].err
