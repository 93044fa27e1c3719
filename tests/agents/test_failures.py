"""How jobs fail: one rank fails in each possible way, with real ranks, and the user sees one error that says so."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import flytekit
import pytest
from flyteidl.core import errors_pb2

import flytekitplugins_safedist
from flytekitplugins_safedist.errors import LaunchError
from tests.harness.job import Job
from tests.harness.procs import ROOT, TERM, Ended, Gate, Running, Warm, alive, until, uploaded_error, uploaded_output


def failed(warm: Warm, files: Path, how: str, task: str = "one_fails", **options: object) -> Ended:
    return warm.run(f"job_failing:{task}", files, environment={"TEST_HOW": how}, **options)


BEFORE_A_SIGNAL, *_ = (ROOT / "tests" / "jobs" / "job_failing.py").read_text().split("signal.raise_signal(")
LINE_OF_A_SIGNAL = 1 + BEFORE_A_SIGNAL.count("\n")


@pytest.mark.parametrize(
    ("how", "begins", "ends"),
    [
        ("long", "FileNotFoundError: no caf\\udce9.txt語語", "is the reason"),
        (
            *("sys.exit", "SystemExit: the task function called sys.exit(7) instead of returning a value"),
            ", at job_failing.py:",
        ),
    ],
)
def test_the_users_error_is_uploaded_whatever_its_class_length_and_letters(warm, tmp_path, how, begins, ends):
    ended = failed(warm, tmp_path / "job", how, kind="execute")
    assert ended.uploaded == ["error.pb"]
    error = uploaded_error(ended)
    assert f"raised {begins}" in error.message
    assert ends in error.message
    for text in (ended.out, error.message):
        assert ("... [cut] ..." in text) == (how == "long"), "the log is cut as the verdict is"
    assert error.kind == errors_pb2.ContainerError.NON_RECOVERABLE


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param(
            *("SIGKILL", "was killed by SIGKILL: most often the kernel's out-of-memory killer"),
            marks=pytest.mark.end("killed", "SYSTEM:SIGKILL"),
        ),
        pytest.param(
            *("SIGSEGV", f"was killed by SIGSEGV at job_failing.py:{LINE_OF_A_SIGNAL} in fail: invalid memory access"),
            marks=pytest.mark.end("crashed", "USER:SIGSEGV"),
        ),
        pytest.param(
            *("os._exit", "ended with exit code 3 and no result"), marks=pytest.mark.end("left", "USER:Exit3")
        ),
    ],
)
def test_a_rank_that_vanishes_is_reported_with_how_and_why(warm, tmp_path, how, said, as_promised):
    ended = failed(warm, tmp_path / "job", how, kind="execute")
    as_promised(ended)
    text = uploaded_error(ended).message
    assert f"rank 1 (local_rank 1) on node 0 ({os.uname().nodename}) {said}" in text
    assert "[rank 1] the last thing it said" in ended.out
    # A crash in native code leaves Python's stack as the last words; there, three lines were not enough for more.
    assert "the last thing it said" in text, "however long the stacks are that come after it"
    # Real ranks with torch imported: hundreds of MiB, kept by the kernel also for the one that is gone.
    high_water = r"Memory high-water of each rank of this node: rank 0 \d\d\d\.\d MiB, rank 1 \d\d\d\.\d MiB"
    assert bool(re.search(high_water, text)) == (how == "SIGKILL")


def test_a_call_in_this_process_raises_what_a_rank_has_raised(warm, tmp_path):
    kinds = {"alone": "ValueError", "EIO": "OSError", "own class": "StepFailedError", "SIGKILL": "RankKilledError"}
    caught = warm.run("job_failing:is_called", tmp_path / "job").value
    assert {how: each["as"] for how, each in caught.items()} == kinds
    assert [how for how, each in caught.items() if not each["is ours"]] == []
    assert {how: each["errno"] for how, each in caught.items()} == {**dict.fromkeys(kinds), "EIO": errno.EIO}
    for how, each in caught.items():
        assert each["text"].startswith(f"task job_failing.{'the_one_fails' if how == 'alone' else 'one_fails'}: rank ")
        assert "Flyte " not in each["text"], "nobody tries it again here"


def test_a_rank_that_is_told_to_stop_as_it_says_why_it_failed_has_failed_for_that(warm, tmp_path):
    ended = warm.run("job_failing:one_is_stopped_as_it_says_why_it_failed", tmp_path / "job", kind="execute")
    error = uploaded_error(ended)
    assert (error.code, ended.left) == ("USER:LateWordsError", [])
    assert "rank 1 (local_rank 1)" in error.message.splitlines()[0]
    assert "raised job_failing.LateWordsError: the reason" in error.message


@pytest.mark.end("peer lost", "USER:PeersLost")
def test_a_rank_that_returned_early_is_named_where_the_others_only_lost_it(warm, tmp_path, as_promised):
    ended = warm.run("job_failing:one_returns_early", tmp_path / "job", kind="execute")
    as_promised(ended)
    error = uploaded_error(ended)
    assert "The first of them is: rank 0 (local_rank 0) on node 0" in error.message.splitlines()[0]


@pytest.mark.end("aborted", "USER:SIGABRT")
def test_an_abort_of_a_rank_that_never_met_the_others_is_its_own_though_they_have_returned(warm, tmp_path, as_promised):
    os.mkfifo(pipe := tmp_path / "pipe")
    task = "job_failing:one_aborts_as_the_other_has_returned"
    as_promised(warm.run(task, tmp_path / "job", kind="execute", environment={"TEST_PIPE": str(pipe)}))


@pytest.mark.end("timed out", "USER:CollectiveTimeout")
def test_a_collective_that_a_rank_skips_is_said_to_be_that_with_where_the_rank_was(warm, tmp_path, as_promised):
    ended = warm.run("job_failing:one_skips_a_monitored_barrier", tmp_path / "job", kind="execute")
    as_promised(ended)
    error = uploaded_error(ended)
    assert "a collective timed out: most likely ranks called different collectives" in error.message.splitlines()[0]
    assert "rank 0 (local_rank 0) on node 0" in error.message.splitlines()[0]
    [where] = re.findall(r"Where rank (\d) was then:\n(.*)", error.message)
    assert where[0] == "1"
    assert where[1].endswith("in evaluates_alone")
    assert re.search(r"\[rank 1\] .* in evaluates_alone", ended.out), "and in the log"


def test_a_collective_that_times_out_as_a_rank_is_stopped_says_that_of_the_rank(warm, tmp_path):
    ended = warm.run("job_failing:one_is_stopped_beside_a_collective", tmp_path / "job", kind="execute")
    error = uploaded_error(ended)
    assert error.code == "USER:CollectiveTimeout"
    assert "Where rank 1 was then:\nstopped (SIGSTOP); it has not answered" in error.message


def test_the_node_of_a_rank_that_skips_a_collective_has_in_its_log_where_that_was(warm, tmp_path):
    waited, skipped = Job(warm, tmp_path / "job", "job_failing:one_node_skips_a_collective", nproc_per_node=1).run()
    error = uploaded_error(waited)
    assert error.code == "USER:CollectiveTimeout"
    assert "rank 0 (local_rank 0) on node 0" in error.message.splitlines()[0]
    assert re.search(r"\[rank 1\] .* in evaluates_alone", skipped.out)


def test_the_same_failure_of_the_same_rank_at_the_same_step_is_not_restarted_a_second_time(warm, tmp_path):
    place = {"TEST_CHECKPOINTS": str(tmp_path / "checkpoints")}
    ended = warm.run("job_checkpoints:fails_in_one_place", tmp_path / "job", kind="execute", environment=place)
    message = uploaded_error(ended).message
    assert "raised ValueError: no such label" in message.splitlines()[0]
    assert "Not restarted in place: rank 1 with ValueError at step 5 has failed before" in message
    assert "This was round 1" in message, "the first restart could have helped"


def test_restarts_that_bring_no_progress_end_the_job_and_name_the_node_of_all_failures(warm, tmp_path):
    variables = {"TEST_CHECKPOINTS": str(tmp_path / "checkpoints")}
    job = Job(warm, tmp_path / "job", "job_checkpoints:comes_no_further", "", variables, nproc_per_node=1)
    ended, _ = job.run()
    message = uploaded_error(ended).message
    assert "raised IndexError: no such label" in message.splitlines()[0]
    assert "Not restarted in place: 3 rounds in a row have failed at or before step 5: restarts bring no" in message
    assert "Every failure so far was on node 1 (host " in message
    assert "with different errors (ValueError, KeyError, IndexError)" in message


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("recoverable", marks=pytest.mark.end("recoverable", "USER:FlyteRecoverableException")),
        pytest.param("SIGABRT", marks=pytest.mark.end("aborted", "USER:SIGABRT")),
        pytest.param("import", marks=pytest.mark.end("comes again", "USER:ModuleNotFoundError")),
        pytest.param("syntax", marks=pytest.mark.end("comes again", "USER:SyntaxError")),
        pytest.param("a worker's SIGKILL", marks=pytest.mark.end("worker killed", "USER:RuntimeError")),
    ],
)
def test_pyflyte_execute_uploads_the_users_one_error_as_the_readme_says(warm, tmp_path, how, as_promised):
    as_promised(failed(warm, tmp_path / "job", how, kind="execute"))


@pytest.mark.end("own", "USER:ValueError")
def test_an_exception_is_one_error_with_its_cause_the_users_frames_alone_and_the_last_lines(
    warm, tmp_path, as_promised
):
    ended = failed(warm, tmp_path / "job", "raise", kind="execute")
    as_promised(ended)
    text = uploaded_error(ended).message
    first, blank, second, third = text.splitlines()[:4]
    assert first == f"rank 1 (local_rank 1) on node 0 ({os.uname().nodename}) raised ValueError: no learning rate"
    assert (blank, second) == ("", "Traceback (most recent call last):")
    assert "job_failing.py" in third
    assert "KeyError: 'learning_rate'" in text  # the cause, too
    assert "direct cause" in text
    assert 'raise ValueError("no learning rate") from error' in text
    for package in (flytekit, flytekitplugins_safedist):
        assert os.path.join(os.path.dirname(package.__file__), "") not in text
    assert "    line 3\n    line 4\n    the last thing it said" in text
    assert "line 2\n" not in text, "three lines were asked for"
    assert text.count("raised ValueError") == 1
    assert "rank 0" not in text
    assert "innermost call first" not in ended.out, "where the others stand says nothing of this"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("SIGTERM", marks=pytest.mark.end("killed", "SYSTEM:SIGTERM")),
        pytest.param("system", marks=pytest.mark.end("storage", "SYSTEM:Storage")),
        pytest.param("ECC", marks=pytest.mark.end("GPU hardware", "SYSTEM:GpuHardware", imitated=True)),
    ],
)
def test_pyflyte_execute_uploads_the_platforms_failure_as_such_and_exits_0(warm, tmp_path, how, as_promised):
    ended = failed(warm, tmp_path / "job", how, kind="execute")
    as_promised(ended)
    error = uploaded_error(ended)
    assert error.timestamp.seconds
    assert f"infrastructure failure, uploaded as {error.code}" in ended.err


def test_failing_ranks_restart_together_with_fresh_scratch_and_a_new_round(warm, tmp_path, ranks_gate):
    said, ended = restarted(warm, tmp_path, ranks_gate, rounds=3, good_round=2, how="raise", kind="execute")
    assert sorted((each["round"], each["rank"]) for each in said) == [(r, k) for r in range(3) for k in range(2)]
    assert all(each["fresh"] for each in said)
    assert len({each["scratch"] for each in said}) == 6
    assert all(each["scratch"].startswith(str(ended.files / "tmp")) for each in said)
    assert ended.scratch == []
    assert ended.code == 0
    assert "outputs.pb" in ended.uploaded
    assert "error.pb" not in ended.uploaded, "a restart that recovered leaves no error behind"
    assert "restart 2 of 2" in ended.err
    assert "end: succeeded after 3 round(s)" in ended.err


def test_each_round_finds_what_the_one_before_it_saved_and_the_first_what_the_last_attempt_did(warm, tmp_path):
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "_dst_cp").write_bytes(b"10")
    arguments = ["--checkpoint-path", str(tmp_path / "now"), "--prev-checkpoint", str(tmp_path / "before")]
    ended = warm.run("job_failing:saves_and_fails", tmp_path / "job", kind="execute", arguments=arguments)
    assert uploaded_output(ended) == "12"


def test_restarts_end_with_the_budget_and_the_error_says_so(warm, tmp_path, ranks_gate):
    said, ended = restarted(warm, tmp_path, ranks_gate, rounds=3, good_round=9, how="SIGKILL")
    assert [each["round"] for each in said] == [0, 0, 1, 1, 2, 2]
    assert "SIGKILL" in str(ended.error)
    assert "all 2 restart(s) of max_restarts are spent, and it was SIGKILL each time" in str(ended.error)
    assert "This was round 2" in str(ended.error)
    for number in (0, 1):
        assert f"\nBefore that, round {number} ended: rank 1 failed (SIGKILL) on node 0 (" in str(ended.error)


@pytest.mark.horovod
def test_horovod_meets_again_after_a_restart(warm, tmp_path):
    ended = failed(warm, tmp_path / "job", "", "restarted_horovod")
    assert ended.value == 3.0
    assert "after 2 round(s)" in ended.err


def restarted(
    warm: Warm, tmp_path: Path, gate: Gate, *, rounds: int, good_round: int, how: str, kind: str = "call"
) -> tuple[list[dict[str, Any]], Ended]:
    """Run the job that fails before ``good_round``; in each of ``rounds``, both ranks are there before one fails."""
    environment = {**gate.environment, "TEST_GOOD_ROUND": str(good_round), "TEST_HOW": how}
    running = warm.start("job_failing:restarted", tmp_path / "job", environment=environment, kind=kind)
    said = []
    for _ in range(rounds):
        said += [json.loads(line) for line in gate.heard(2)]
        gate.let_go(1)
    ended = running.wait()
    assert ended.left == []
    return said, ended


def test_a_rank_that_ignores_sigterm_is_killed_after_its_time(warm, tmp_path, ranks_gate):
    running = warm.start("job_failing:stubborn", tmp_path / "job", environment=ranks_gate.environment)
    ranks_gate.heard(1)
    ranks_gate.let_go(1)
    ended = running.wait()
    assert ended.left == []
    assert "rank 1" in str(ended.error)
    assert "no learning rate" in str(ended.error)


def told_to_stop(warm: Warm, files: Path, gate: Gate, preemption: str) -> Running:
    environment = {**gate.environment, "TEST_PREEMPTION": preemption, "SAFEDIST_GRACE_SECONDS": "300"}
    running = warm.start("job_failing:saves_in_its_handler", files, environment=environment, kind="execute")
    assert gate.heard(1) == ["listens"]
    running.signal(TERM)
    assert gate.heard(1) == ["saves"]
    return running


def test_a_handler_of_the_ranks_own_has_the_time_of_a_preemption_to_save(warm, tmp_path, ranks_gate):
    running = told_to_stop(warm, tmp_path / "job", ranks_gate, "120")
    time.sleep(1)  # ten times Timeouts.stop
    ranks_gate.let_go(1)
    ended = running.wait()
    assert "[rank 0] all is saved" in ended.out
    assert "did not end within" not in ended.err


def test_a_rank_that_is_killed_in_its_handler_is_named(warm, tmp_path, ranks_gate):
    ended = told_to_stop(warm, tmp_path / "job", ranks_gate, "0.2").wait()
    assert re.search(r"rank\(s\) 0 did not end within 0\.\d+ s of SIGTERM, and are killed", ended.err), ended.err


def test_a_rank_that_reports_success_but_does_not_end_is_ended_and_the_job_succeeds(warm, tmp_path):
    ended = warm.run("job_failing:lingering", tmp_path / "job")
    assert ended.value == 7
    assert re.search(r"rank\(s\) (0, )?1 reported success but did not end within 0\.5 s", ended.err), ended.err


@pytest.mark.parametrize("how", ["SIGKILL", "nothing"])
def test_processes_that_a_rank_started_end_with_it(warm, tmp_path, ranks_gate, how):
    environment = {**ranks_gate.environment, "TEST_HOW": how}
    running = warm.start("job_failing:with_grandchildren", tmp_path / "job", environment=environment)
    grandchildren = [int(line) for line in ranks_gate.heard(2)]
    ranks_gate.let_go(1)
    ended = running.wait()
    assert ended.left == []
    assert not any(alive(pid) for pid in grandchildren)


def test_a_rank_server_that_cannot_be_started_is_told_on_a_laptop(warm, tmp_path):
    ended = warm.run("job_no_server:never", tmp_path, libraries=False)
    assert isinstance(ended.error, LaunchError)
    assert "the rank server cannot be started" in str(ended.error)


@pytest.mark.end("not started", "SYSTEM:RanksNotStarted")
def test_a_killed_rank_server_takes_its_ranks_and_all_they_have_started_with_it_and_is_infrastructure(
    warm, tmp_path, ranks_gate, as_promised
):
    environment = ranks_gate.environment
    running = warm.start("job_failing:waits_with_a_child", tmp_path / "job", environment=environment, kind="execute")
    said = [json.loads(line) for line in ranks_gate.heard(2)]
    os.kill(said[0]["server"], signal.SIGKILL)
    ended = running.wait()
    as_promised(ended)
    assert "SIGKILL" in uploaded_error(ended).message
    assert (ended.left, ended.scratch) == ([], [])
    until(lambda: not any(alive(each[name]) for each in said for name in ("pid", "child")), "all end with the server")


WAITS = ["barrier", "wait_for", "rank_zero_first", "the block of rank_zero_first"]


def waiting_in_vain(warm: Warm, files: Path, gate: Gate, how: str) -> Running:
    """A job of which rank 1 has given up waiting for rank 0, and is gone."""
    environment = {**gate.environment, "TEST_HOW": how}
    running = warm.start("job_failing:one_waits_in_vain", files, environment=environment, kind="execute")
    [pid] = gate.heard(1)
    until(lambda: not alive(int(pid)), "rank 1 gives up")
    return running


@pytest.mark.parametrize("how", WAITS)
def test_who_has_waited_in_vain_for_a_rank_is_not_the_cause_where_that_one_then_fails(warm, tmp_path, ranks_gate, how):
    running = waiting_in_vain(warm, tmp_path / "job", ranks_gate, how)
    ranks_gate.let_go(1)
    error = uploaded_error(running.wait())
    assert error.code == "USER:ValueError", error.message
    assert error.message.startswith("rank 0 (local_rank 0) on node 0")


def test_a_rank_that_does_not_come_to_a_barrier_is_told_with_where_it_was(warm, tmp_path, ranks_gate):
    error = uploaded_error(waiting_in_vain(warm, tmp_path / "job", ranks_gate, "barrier").wait())
    assert error.code == "USER:FsTimeoutError"
    assert "ranks did not come to the meeting point: 0 [" in error.message.splitlines()[0]
    [stood] = re.findall(r"Where rank 0 was then:\n((?:  .*\n)+)", error.message)
    assert "in one_waits_in_vain" in stood


@pytest.mark.parametrize("who", [0, 1], ids=["rank 0", "rank 1"])
def test_a_save_that_a_rank_calls_alone_ends_when_the_other_has_ended(warm, tmp_path, who):
    environment = {"TEST_HOW": str(who), "TEST_CHECKPOINTS": str(tmp_path / "saves")}
    error = uploaded_error(
        warm.run("job_failing:one_saves_alone", tmp_path / "job", environment=environment, kind="execute")
    )
    assert error.code == "USER:CheckpointError", error.message
    assert re.match(rf"rank {who} .* raised CheckpointError: a rank did not come to Checkpoints.save", error.message)
    assert f"rank {who} has waited for rank {1 - who}, which has ended" in error.message
    assert "not under `if rank == 0:`" in error.message


def test_a_killed_rank_is_the_cause_though_the_others_wrap_their_loss(warm, tmp_path):
    ended = failed(warm, tmp_path / "job", "", task="losses_are_wrapped", kind="execute")
    error = uploaded_error(ended)
    assert (error.code, error.kind) == ("SYSTEM:SIGKILL", errors_pb2.ContainerError.RECOVERABLE)
    assert error.message.startswith("rank 1 (local_rank 1) on node 0")


@pytest.mark.parametrize(
    ("task", "code", "says"),
    [
        pytest.param(
            *("has_a_wrong_interface", "USER:RuntimeError", "GLOO_SOCKET_IFNAME"),
            marks=pytest.mark.end("mistake", "USER:RuntimeError"),
        ),
        pytest.param(
            *("takes_a_port_twice", "USER:DistNetworkError", "bind to port 0"),
            marks=pytest.mark.end("mistake", "USER:DistNetworkError"),
        ),
    ],
)
def test_a_mistake_of_a_rank_is_no_lost_peer_and_one_node_has_no_network(warm, tmp_path, task, code, says):
    error = uploaded_error(failed(warm, tmp_path / "job", "", task=task, kind="execute"))
    assert error.code == code, error.message
    assert says in error.message
    assert "between the nodes" not in error.message
    assert "different collectives" not in error.message
    assert error.kind == errors_pb2.ContainerError.NON_RECOVERABLE


@pytest.mark.end("not met", "USER:RanksNotMet")
def test_ranks_that_wait_for_more_than_there_are_have_not_met_and_no_collective_failed(warm, tmp_path, as_promised):
    ended = failed(warm, tmp_path / "job", "", task="expects_more_ranks", kind="execute")
    as_promised(ended)
    message = uploaded_error(ended).message
    assert re.search(r"The first to give up: rank \d \(.*\) on node 0 .* raised ", message.splitlines()[0])
    assert "call init_process_group() without world_size" in message
    assert "between the nodes" not in message
    assert "different collectives" not in message


def test_a_rank_and_what_it_starts_go_first_when_memory_is_out(warm, tmp_path):
    servers, own, started = warm.run("job_failing:shows_who_goes_first_when_memory_is_out", tmp_path / "job").value
    assert own == started == min(1000, servers + 500)
