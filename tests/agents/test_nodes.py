"""Two nodes: one writer, one root cause, restarts together, and nobody leaves before the upload.

The nodes are real agents in processes of their own that meet over loopback, with the variables that a PyTorchJob gives
its pods. What is not real here is the network between them; container tests have that.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, execution_pb2

from tests.harness import needs
from tests.harness.job import Job, succeeded
from tests.harness.procs import KILL, TERM, Ended, Gate, at_rest, until, uploaded_error, uploaded_output

NON_RECOVERABLE, RECOVERABLE = errors_pb2.ContainerError.NON_RECOVERABLE, errors_pb2.ContainerError.RECOVERABLE


@pytest.mark.end("node r > 0 is done before node 0 has uploaded")
@pytest.mark.horovod
def test_all_ranks_of_both_nodes_meet_and_node_0_alone_uploads(warm, tmp_path):
    first, second = Job(warm, tmp_path, "horovod", "nothing").run()
    assert (first.code, second.code) == (0, 0)
    assert uploaded_output(first).startswith("6 from 4 ranks in round 0;")
    assert (first.uploaded, second.uploaded) == (["outputs.pb"], [])
    assert "waiting until node 0 has uploaded" in second.err


def test_node_0_has_one_connection_for_each_other_node_however_many_ranks_and_threads_call(
    warm, tmp_path, ranks_gate: Gate
):
    job = Job(warm, tmp_path, "torch_callers", more=ranks_gate.environment)
    first, second = job.start(0), job.start(1)
    ranks_gate.heard(4)
    connections = connections_to(job.port)
    ranks_gate.let_go(4)
    assert [first.wait().code, second.wait().code] == [0, 0]
    assert connections == 1


def connections_to(port: int) -> int:
    """Established ones over TCP, as the kernel lists them at the end that has listened."""
    tables = [Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text()]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(line[1].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


@pytest.mark.end("a rank of any node fails")
def test_a_failure_on_one_node_restarts_the_ranks_of_both_and_leaves_no_error(warm, tmp_path):
    first, second = Job(warm, tmp_path, "torch", "raise once").run()
    assert (first.code, second.code) == (0, 0)
    assert "from 4 ranks in round" in uploaded_output(first)
    assert "in round 0" not in uploaded_output(first)
    assert (first.uploaded, second.uploaded) == (["outputs.pb"], [])
    assert "all ranks start again: restart 1 of 1" in first.err + second.err


def test_an_exception_on_node_1_is_the_one_error_that_node_0_uploads_when_the_budget_is_spent(warm, tmp_path):
    first, second = Job(warm, tmp_path, "torch", "raise").run()
    assert (first.code, second.code) == (0, 0)
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert uploaded_error(first).kind == NON_RECOVERABLE
    assert "rank 3 (local_rank 1) on node 1" in uploaded_error(first).message
    assert "raised ValueError: no learning rate" in uploaded_error(first).message
    assert "all 1 restart(s) of max_restarts are spent" in uploaded_error(first).message
    cause = uploaded_error(first).message.splitlines()[0]
    for node in (first, second):
        assert node.err.splitlines()[-1] == f"[safedist] the job failed: {cause}"


def test_a_rank_that_asks_for_a_place_that_no_group_has_is_told_so_at_once(warm, tmp_path):
    error = uploaded_error(Job(warm, tmp_path, "torch_by_hand", "world_size=8").run()[0])
    assert (error.code, error.kind) == ("USER:TopologyError", NON_RECOVERABLE)
    assert "init_process_group waits for ranks that will never be there: this job has 4 ranks" in error.message
    assert "this job has 4 ranks: leave rank and world_size out" in error.message


def test_two_ranks_that_ask_for_one_place_are_told_so_and_no_ranks_of_two_groups_meet(warm, tmp_path):
    error = uploaded_error(Job(warm, tmp_path, "torch_by_hand", "in groups of a node each").run()[0])
    assert (error.code, error.kind) == ("USER:TopologyError", NON_RECOVERABLE)
    assert "init_process_group is asked for a place that another rank has" in error.message


def test_ranks_may_meet_in_another_order(warm, tmp_path):
    first, _ = Job(warm, tmp_path, "torch_by_hand", "in another order").run()
    assert uploaded_output(first) == "4 ranks"


@pytest.mark.horovod
def test_a_host_without_an_address_is_an_error_and_no_crash_of_horovod(warm, tmp_path):
    needs.root("rename the host of a process")
    first, _ = Job(warm, tmp_path, "horovod_on_a_host_without_address", nproc_per_node=1).run()
    error = uploaded_error(first)
    assert (error.code, error.kind) == ("USER:TopologyError", NON_RECOVERABLE)
    assert "[host=no-such-host.invalid]" in error.message
    assert "HOROVOD_GLOO_IFACE" in error.message


@pytest.mark.horovod
def test_a_network_interface_that_is_not_there_is_an_error_and_no_crash_of_horovod(warm, tmp_path):
    made = Job(warm, tmp_path, "horovod_by_interface", more={"HOROVOD_GLOO_IFACE": "no-such0"}, nproc_per_node=1)
    error = uploaded_error(made.run()[0])
    assert (error.code, error.kind) == ("USER:TopologyError", NON_RECOVERABLE)
    assert "[HOROVOD_GLOO_IFACE=no-such0]" in error.message
    assert "lo" in error.message, "it says which there are"


@pytest.mark.horovod
def test_a_network_of_ipv6_alone_is_an_error_and_no_crash_of_horovod(warm, tmp_path):
    if not socket.has_dualstack_ipv6():
        needs.missing("there is no IPv6", bring="sysctl net.ipv6.conf.lo.disable_ipv6=0")
    at = {"MASTER_ADDR": "::1", "PET_MASTER_ADDR": "::1"}
    error = uploaded_error(Job(warm, tmp_path, "horovod_by_interface", more=at, nproc_per_node=1).run()[0])
    assert (error.code, error.kind) == ("USER:TopologyError", NON_RECOVERABLE)
    assert "Horovod's ranks meet over IPv4 only, and node 0 has none" in error.message
    assert "Fix: use SafeTorch" in error.message


def test_a_long_text_of_node_1_arrives_whole_and_a_recoverable_exception_stays_so(warm, tmp_path):
    first, _ = Job(warm, tmp_path, "torch", "recoverable").run()
    assert "a layer, " * 1_200 in uploaded_error(first).message
    assert uploaded_error(first).kind == RECOVERABLE


def test_a_full_disk_is_told_before_it_is_seen_what_fills_it(warm, tmp_path, ranks_gate: Gate):
    job = Job(warm, tmp_path, "torch", "full", ranks_gate.environment)
    other = {"TEST_MEASURE_WAITS": "1", "SAFEDIST_EPHEMERAL_STORAGE": str(2 << 30)}
    pods = job.start(0), job.start(1, other)
    log = pods[0].files / "err"
    until(lambda: "round 0 is over" in log.read_text(errors="replace"), "node 0 hears of it")
    assert "round 0 is over: rank 3 failed (OSError) on node 1" in log.read_text(errors="replace")
    assert ranks_gate.heard(1) == ["measures"]
    ranks_gate.let_go(1)
    first, _ = succeeded(*pods)
    said = r"rank 3 ran out of disk space\. Scratch is limited to 1\.8 GiB by .*: .* \(rank .*, rank .*\); .* free"
    assert re.match(said, uploaded_error(first).message), "that of its own pod: node 0's has no limit"


@pytest.mark.end("a node is slow to end its ranks, or stands still as one fails")
def test_a_node_that_stood_still_as_its_rank_failed_tells_the_cause_though_it_was_given_up(
    warm, tmp_path, ranks_gate: Gate
):
    job = Job(warm, tmp_path, "torch_no_restart", more=ranks_gate.environment)
    pods = job.start(0), job.start(1)
    ranks_gate.heard(4)
    pods[1].signal(signal.SIGSTOP)
    ranks_gate.let_go(1)
    log = pods[0].files / "err"
    until(lambda: "no sign of life" in log.read_text(errors="replace"), "node 0 gives the other up")
    pods[1].signal(signal.SIGCONT)
    first, second = succeeded(*pods)
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    error = uploaded_error(first)
    assert error.code == "USER:ValueError"
    assert "rank 3 (local_rank 1) on node 1" in error.message
    assert "Not restarted in place: max_restarts=0" in error.message
    assert b"round 1" not in ranks_gate.pending(), "one round is all that max_restarts=0 allows"


@pytest.mark.horovod
def test_a_rank_that_is_killed_again_and_again_is_the_platforms_failure_uploaded_by_node_0(warm, tmp_path):
    first, second = Job(warm, tmp_path, "horovod", "killed").run()
    assert (first.code, second.code) == (0, 0)
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert platforms(first) == "SYSTEM:SIGKILL"
    assert "rank 3 (local_rank 1) on node 1" in uploaded_error(first).message
    assert "was killed by SIGKILL" in uploaded_error(first).message


@pytest.mark.end("the same worker is lost three times, and lives less than ten minutes each time it is back")
def test_a_worker_that_is_killed_whenever_it_is_back_is_not_replaced_a_third_time(warm, tmp_path, ranks_gate: Gate):
    job = Job(warm, tmp_path, "torch", "gate", ranks_gate.environment)
    first = job.start(0)
    for _ in range(3):
        worker = job.start(1)
        ranks_gate.heard(4)
        worker.signal(KILL)
        assert worker.wait().code == -KILL
    ended = first.wait()
    assert (ended.code, ended.uploaded, ended.left) == (0, ["error.pb"], [])
    assert platforms(ended) == "SYSTEM:NodeLost"
    said = "node 1 was lost 3 times, and lived less than 600 s each time it was back: most likely it runs out of"
    assert said in uploaded_error(ended).message


def test_ranks_that_call_each_other_by_torchs_rpc_go_on_when_a_pod_is_back(warm, tmp_path, ranks_gate: Gate):
    """A call that is lost is an echo of that pod's loss; and who calls others does not work alone."""
    job = Job(warm, tmp_path, "torch_calls", more=ranks_gate.environment)
    first, lost = job.start(0), job.start(1)
    ranks_gate.heard(1)
    lost.signal(KILL)
    lost.wait()
    ended = succeeded(first, job.start(1))
    assert uploaded_output(ended[0]) == "called in round 1"
    assert "worked alone" not in ended[0].err + ended[1].err


def test_a_pod_that_meets_another_jobs_node_says_so_as_that_one_does_and_waits_for_its_own(
    warm, tmp_path, ranks_gate: Gate
):
    theirs = Job(warm, tmp_path / "theirs", "torch", "gate", ranks_gate.environment)
    mine = Job(warm, tmp_path / "mine", "torch")
    mine.port = theirs.port
    others = theirs.start(0), theirs.start(1)
    ranks_gate.heard(4)
    early = mine.start(1)
    for pod, says in (early, "another job's node answers at"), (others[0], "a node of another job came to"):
        until(lambda log=pod.files / "err", says=says: says in log.read_text(), says)
    ranks_gate.let_go(4)
    assert [pod.wait().code for pod in others] == [0, 0]
    first = mine.start(0).wait()
    assert (first.code, early.wait().code) == (0, 0)
    assert uploaded_output(first).startswith("6 from 4 ranks")


def platforms(ended: Ended) -> str:
    """The code of what was uploaded: another attempt, at the platform's cost."""
    error = uploaded_error(ended)
    assert (error.kind, error.origin) == (RECOVERABLE, execution_pb2.ExecutionError.SYSTEM)
    return str(error.code)


@pytest.mark.end("a node comes late")
@pytest.mark.end("not together", "SYSTEM:RendezvousTimeout")
def test_a_node_that_never_comes_is_named_in_the_verdict_of_node_0(warm, tmp_path, as_promised):
    job = Job(warm, tmp_path, "torch_impatient", "nothing")
    ended = job.start(0).wait()
    as_promised(ended)
    assert "node 1 of 2 did not arrive within 1 s" in uploaded_error(ended).message


def test_a_node_that_is_started_by_hand_and_told_to_stop_says_that_and_not_ctrl_c(warm, tmp_path, ranks_gate: Gate):
    job = Job(warm, tmp_path, "torch_patient", "gate", ranks_gate.environment)
    by_hand = {**job.environment, "PET_NPROC_PER_NODE": "2"}
    first, second = (
        warm.start("job_nodes:torch_patient", tmp_path / str(pod), environment={**job.variables(pod), **by_hand})
        for pod in (0, 1)
    )
    ranks_gate.heard(4)
    second.signal(TERM)
    ended = second.wait()
    first.signal(KILL)
    first.wait()
    assert ended.code == 137, ended.err
    assert "this node leaves (told to stop by SIGTERM; every rank has been ended)" in ended.err
    assert "Ctrl-C" not in ended.err


def test_when_node_0_never_comes_another_uploads_the_verdict_and_a_late_node_0_finds_it(warm, tmp_path):
    job = Job(warm, tmp_path / "job", "torch_impatient", "nothing")
    ended = job.start(1).wait()
    assert (ended.code, ended.uploaded) == (0, ["error.pb"])
    assert platforms(ended) == "SYSTEM:RendezvousTimeout"
    assert "node 0" in uploaded_error(ended).message
    late = job.start(0, outputs=ended.files / "outputs").wait()
    assert (late.code, late.left, late.scratch) == (0, [], [])
    assert "its result is uploaded" in late.err


def test_what_only_node_1_cannot_do_is_no_second_error_upload(warm, tmp_path):
    job = Job(warm, tmp_path, "torch_impatient", "nothing")
    second = job.start(1, {"SAFEDIST_SCRATCH_ROOT": str(tmp_path / "nowhere")})
    ended = second.wait()
    assert ended.code != 0
    assert ended.uploaded == []
    assert "node 1 cannot do its part: ScratchError" in ended.err
    assert "nowhere" in ended.err


@pytest.mark.end("a worker pod is killed, evicted, preempted, paused or cut off")
@pytest.mark.parametrize("how", [KILL, TERM])
def test_the_place_of_a_lost_node_taken_ends_every_wait_for_it(warm, tmp_path, ranks_gate: Gate, how):
    job = Job(warm, tmp_path, "torch_patient", "gate", ranks_gate.environment)
    first, lost = job.start(0), job.start(1)
    ranks_gate.heard(4)
    ranks_gate.let_go(1)  # one rank at least is in the collective, and sees its peer go
    lost.signal(how)
    gone = lost.wait()
    assert gone.code not in (0, -TERM)
    assert gone.uploaded == []
    again = job.start(1)
    # All of them within this gate's patience, which is a fraction of what node 0 may wait for a node's last word.
    rounds = [line for line in ranks_gate.heard(4) if "round 0 " not in line]
    assert len(rounds) == 4
    ranks_gate.let_go(8)
    ended = succeeded(first, again)
    assert [node.uploaded for node in ended] == [["outputs.pb"], []]
    assert "6 from 4 ranks" in uploaded_output(ended[0])
    # Of a killed one the connection is lost as well, and either may be noticed first.
    assert how == KILL or "node 1 has left: told to stop by SIGTERM" in ended[0].err


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("over the limit", "USER:ScratchError", "wrote more than their scratch limit"),
        ("hangs", "USER:HangError", "the job does not move: rank 1 "),
    ],
)
def test_what_the_agent_of_a_replaced_node_finds_in_its_rank_ends_the_job_and_not_the_node(
    warm, tmp_path, ranks_gate: Gate, how, code, says
):
    job = Job(warm, tmp_path, "torch_found_by_the_agent", how, ranks_gate.environment)
    job.nproc_per_node = 1
    first, lost = job.start(0), job.start(1)
    ranks_gate.heard(2)
    lost.signal(KILL)
    lost.wait()
    again = job.start(1)
    ended = succeeded(first, again)
    assert [node.uploaded for node in ended] == [["error.pb"], []]
    error = uploaded_error(ended[0])
    assert error.code == code
    assert "rank 1 (local_rank 0) on node 1" in error.message
    assert says in error.message


def test_a_node_that_fails_by_itself_tells_the_others_why_it_leaves(warm, tmp_path, ranks_gate: Gate):
    """One that starts no ranks again and again ends the job by that, and not by its lost connections."""
    job = Job(warm, tmp_path, "torch_no_replacement", "gate", ranks_gate.environment)
    first, failing = job.start(0), job.start(1)
    of_node_1 = next(line for line in ranks_gate.heard(4) if line.startswith("rank 3 "))
    os.kill(parent(int(of_node_1.split()[-1])), KILL)
    assert failing.wait().uploaded == []
    ended = first.wait()
    assert (ended.code, ended.uploaded) == (0, ["error.pb"])
    assert platforms(ended) == "SYSTEM:NodeLost"
    why = "node 1: LaunchError: the process that starts and watches this node's ranks is gone, and its ranks with it"
    assert why in uploaded_error(ended).message


def parent(pid: int) -> int:
    """The process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_node_0_that_is_told_to_stop_tells_the_others_first(warm, tmp_path, ranks_gate: Gate):
    job = Job(warm, tmp_path, "torch_patient", "gate", ranks_gate.environment)
    first, second = job.start(0), job.start(1)
    ranks_gate.heard(4)
    first.signal(TERM)
    ended = first.wait()
    assert (ended.code, ended.uploaded) == (137, [])
    again = job.start(0)
    # Within this gate's patience, which is a fraction of what node 1 may wait for node 0's last word.
    assert all("round 0 " not in line for line in ranks_gate.heard(4))
    ranks_gate.let_go(8)
    ended = succeeded(again, second)
    assert "node 0 has left: told to stop by SIGTERM" in ended[1].err


def test_where_all_pods_are_lost_at_once_the_next_ones_go_on_from_what_this_attempt_has_saved(
    warm, tmp_path, ranks_gate: Gate
):
    """Nobody knows of the round before, but that somebody has led the job is in the store."""
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "_dst_cp").write_bytes(b"10")
    saves = ["--checkpoint-path", str(tmp_path / "now"), "--prev-checkpoint", str(tmp_path / "before")]
    job, outputs = Job(warm, tmp_path / "job", "torch_saves", more=ranks_gate.environment), tmp_path / "uploads"
    outputs.mkdir()
    for count in (11, 12):
        pods = [job.start(pod, arguments=saves, outputs=outputs) for pod in range(2)]
        assert set(ranks_gate.heard(4)) == {f"rank {rank} round 0 count {count}" for rank in range(4)}
        for pod in pods if count == 11 else ():
            pod.signal(KILL)
            pod.wait()
    ranks_gate.let_go(8)
    assert [pod.wait().code for pod in pods] == [0, 0]


@pytest.mark.end("a worker pod is lost after its ranks have succeeded")
def test_a_node_that_is_lost_after_its_ranks_have_succeeded_restarts_nobody(warm, tmp_path, ranks_gate: Gate):
    job = Job(warm, tmp_path, "torch_done_early", "nothing", ranks_gate.environment)
    job.nproc_per_node = 1
    first, lost = job.start(0), job.start(1)
    assert ranks_gate.heard(1) == ["rank 0 round 0"]
    until(job.a_node_is_done, "node 1 is done")
    until(lambda: at_rest(lost.pid), "node 1 has told node 0 so")
    lost.signal(KILL)
    lost.wait()
    until(lambda: "lost after its ranks had succeeded" in (first.files / "err").read_text(), "node 0 misses node 1")
    again = job.start(1)
    until(lambda: "this node may take part in the next one" in (again.files / "err").read_text(), "node 1 is back")
    ranks_gate.let_go(1)
    ended = succeeded(first, again)
    assert uploaded_output(ended[0]) == "round 0"
    assert ended[1].uploaded == []


@pytest.mark.end("a pod comes back when the attempt's outputs or error are uploaded")
@pytest.mark.parametrize("node", [0, 1])
def test_a_pod_that_comes_back_when_the_attempt_has_ended_leaves_at_once(warm, tmp_path, node):
    job = Job(warm, tmp_path / "job", "torch", "nothing")
    first, _ = job.run()
    assert first.uploaded == ["outputs.pb"]
    outputs = first.files / "outputs"
    before = (outputs / "outputs.pb").stat().st_mtime_ns
    again = job.start(node, outputs=outputs).wait()
    assert (again.code, again.left, again.scratch) == (0, [], [])
    assert "its result is uploaded: nothing is left to do here" in again.err
    assert "start: torch" not in again.err
    assert (outputs / "outputs.pb").stat().st_mtime_ns == before
    assert not (outputs / "error.pb").exists()
