"""However a job ends, nothing of it is left: no process, no listening socket, no scratch directory.

Processes: every case has a supervisor to which the kernel hands all orphans; it waits until there is none
(tests.harness.warm).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from flytekitplugins_safedist.errors import JobInterruptedError, RankFailedError
from tests.harness.procs import Ended, Gate, Running, Warm, gate, uploaded_error

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
HOROVOD = pytest.param("waits_horovod", marks=pytest.mark.horovod)


def start(warm: Warm, files: Path, gate: Gate, task: str, **options: Any) -> tuple[Running, list[dict[str, Any]]]:
    """A job whose ranks are all in the user's function, with files in their scratch."""
    environment = {**gate.environment, **options.pop("environment", {})}
    running = warm.start(f"job_failing:{task}", files, environment=environment, **options)
    said = [json.loads(line) for line in gate.heard(2)]
    assert all(Path(each["scratch"]).is_relative_to(files / "tmp") for each in said)
    return running, said


def listening(pid: int) -> set[int]:
    """Inodes of the sockets on which a process or its descendants listen: unlike ports, never used again."""
    inodes = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        own = set()
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                own.add(os.readlink(path))
        inodes |= {inode for inode in listening_anywhere() if f"socket:[{inode}]" in own}
    return inodes


def listening_anywhere() -> set[int]:
    rows = [line.split() for path in _TABLES for line in path.read_text().splitlines()[1:]]
    return {int(row[9]) for row in rows if row[3] == "0A"}


def assert_nothing_left(ended: Ended, sockets: set[int]) -> None:
    assert ended.left == []
    assert not sockets & listening_anywhere()
    assert ended.scratch == []


@pytest.mark.parametrize("task", ["waits", HOROVOD])
def test_after_success_nothing_is_left(warm, tmp_path, ranks_gate, task):
    running, _ = start(warm, tmp_path / "job", ranks_gate, task)
    sockets = listening(running.pid)
    assert sockets or "horovod" not in task, "Horovod's key-value server listens while ranks run"
    ranks_gate.let_go(2)
    ended = running.wait()
    assert ended.value == "done"
    assert_nothing_left(ended, sockets)


@pytest.mark.parametrize("task", ["waits", HOROVOD])
def test_after_a_failure_nothing_is_left(warm, tmp_path, ranks_gate, task):
    running, _ = start(warm, tmp_path / "job", ranks_gate, task, environment={"TEST_HOW": "raise"})
    sockets = listening(running.pid)
    ranks_gate.let_go(2)
    ended = running.wait()
    assert isinstance(ended.error, RankFailedError)
    assert_nothing_left(ended, sockets)


@pytest.mark.parametrize(
    ("task", "number"),
    [("waits", signal.SIGINT), pytest.param("waits_horovod", signal.SIGTERM, marks=pytest.mark.horovod)],
    ids=["torch, SIGINT", "horovod, SIGTERM"],
)
def test_after_a_signal_to_stop_nothing_is_left(warm, tmp_path, ranks_gate, task, number):
    running, _ = start(warm, tmp_path / "job", ranks_gate, task)
    sockets = listening(running.pid)
    os.killpg(running.pid, number)  # the whole foreground group, as Ctrl-C in a terminal does
    ended = running.wait()
    if number == signal.SIGINT:
        assert ended.code == 128 + number
        assert "interrupted (Ctrl-C): every rank has been ended" in ended.err
    else:
        assert isinstance(ended.error, JobInterruptedError)
        assert number.name in str(ended.error)
    assert_nothing_left(ended, sockets)


@pytest.mark.parametrize("task", ["waits_spawned", HOROVOD])
def test_after_sigkill_of_the_agent_nothing_is_left(warm, tmp_path, ranks_gate, task):
    running, _ = start(warm, tmp_path / "job", ranks_gate, task)
    sockets = listening(running.pid)
    running.signal(signal.SIGKILL)
    ended = running.wait()
    assert ended.code == -signal.SIGKILL
    assert_nothing_left(ended, sockets)


def kill_whole(running: Running) -> None:
    """As a container is killed: every process at once, the one that guards scratch too."""
    first = psutil.Process(running.pid)
    processes = [first, *first.children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in reversed(processes):  # the agent last, whose end would wake its server
            process.send_signal(number)


def test_the_next_run_removes_the_scratch_of_one_that_was_killed_whole(warm, tmp_path, ranks_gate):
    running, _ = start(warm, tmp_path / "killed", ranks_gate, "waits")
    kill_whole(running)
    [left] = running.wait().scratch
    root = tmp_path / "killed" / "tmp"
    environment = {**ranks_gate.environment, "SAFEDIST_SCRATCH_ROOT": str(root)}
    again = warm.start("job_failing:waits", tmp_path / "again", environment=environment)
    ranks_gate.heard(2)
    assert not (root / left).exists()
    ranks_gate.let_go(2)
    ended = again.wait()
    assert ended.value == "done"
    assert f"removed the scratch of an earlier run here, which was killed: {root / left}" in ended.err


def test_a_run_leaves_the_scratch_of_a_living_one_and_what_is_to_be_kept(warm, tmp_path, ranks_gate):
    root = tmp_path / "first" / "tmp"
    shared = {"SAFEDIST_SCRATCH_ROOT": str(root), **ranks_gate.environment}
    first, _ = start(warm, tmp_path / "first", ranks_gate, "waits")
    kept = warm.start("job_failing:keeps_on_failure", tmp_path / "kept", environment=shared)
    ranks_gate.heard(2)
    kill_whole(kept)
    kept.wait()
    second = warm.start("job_failing:waits", tmp_path / "second", environment=shared)
    ranks_gate.heard(2)
    assert len(list(root.glob("safedist-*"))) == 3
    assert len(list(root.glob("safedist-*/orders"))) == 2, "those of the living: they may hold secrets"
    ranks_gate.let_go(4)
    assert [running.wait().value for running in (first, second)] == ["done", "done"]


@pytest.mark.end("stopped", "SYSTEM:Stopped")
def test_sigterm_in_a_pod_that_nobody_replaces_uploads_that_it_was_stopped_and_exits_0(
    warm, tmp_path, ranks_gate, as_promised
):
    running, _ = start(warm, tmp_path / "job", ranks_gate, "waits", kind="execute")
    running.signal(signal.SIGTERM)
    ended = running.wait()
    as_promised(ended)
    assert "told to stop by SIGTERM" in uploaded_error(ended).message
    assert_nothing_left(ended, set())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_frozen_rank_server_keeps_nothing_alive_nor_the_agent_from_its_verdict(warm, tmp_path, ranks_gate, number):
    environment = {**ranks_gate.environment, "TEST_OWN_SESSION": "1"}
    task = "job_failing:waits_with_a_child"
    running = warm.start(task, tmp_path / "job", environment=environment, kind="execute")
    said = [json.loads(line) for line in ranks_gate.heard(2)]
    os.kill(said[0]["server"], signal.SIGSTOP)
    running.signal(number)
    ended = running.wait()
    if number == signal.SIGTERM:
        assert (ended.code, ended.uploaded) == (0, ["error.pb"])
        assert uploaded_error(ended).code == "SYSTEM:Stopped"
    assert_nothing_left(ended, set())


def test_a_frozen_rank_server_does_not_hide_that_a_rank_has_died(warm, tmp_path, ranks_gate):
    running = warm.start("job_failing:waits_with_a_child", tmp_path / "job", environment=ranks_gate.environment)
    said = [json.loads(line) for line in ranks_gate.heard(2)]
    os.kill(said[0]["server"], signal.SIGSTOP)
    os.kill(said[0]["pid"], signal.SIGKILL)
    ended = running.wait()
    assert "was killed by SIGKILL" in str(ended.error)
    assert_nothing_left(ended, set())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_agent_that_ends_while_the_rank_server_imports_leaves_nothing(warm, tmp_path, ranks_gate, number):
    running = warm.start("job_slow_import:never_started", tmp_path / "job", environment=ranks_gate.environment)
    [agent] = ranks_gate.heard(1)
    assert agent == f"importing in {running.pid}"
    ranks_gate.let_go(1)
    [server] = ranks_gate.heard(1)
    assert server != agent
    assert any(name.startswith("safedist") for name in os.listdir(tmp_path / "job" / "tmp"))
    running.signal(number)
    assert_nothing_left(running.wait(), set())


@pytest.mark.parametrize(
    ("task", "how", "kept"),
    [("keeps_on_failure", "", False), ("keeps_on_failure", "raise", True), ("keeps_always", "", True)],
)
def test_scratch_is_kept_as_the_config_says(warm, tmp_path, ranks_gate, task, how, kept):
    running, said = start(warm, tmp_path / "job", ranks_gate, task, environment={"TEST_HOW": how})
    ranks_gate.let_go(2)
    ended = running.wait()
    assert ended.left == []
    assert bool(ended.scratch) == kept
    assert ("scratch is kept in" in ended.err) == kept
    if kept:
        assert all((Path(each["scratch"]) / "work").read_text() == "half done" for each in said)
        job = Path(said[0]["scratch"]).parents[1]
        assert job.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in (job / "logs").iterdir()) == ["round-0-rank-0.log", "round-0-rank-1.log"]
        assert not (job / "orders").exists(), "they hold the environment, and so secrets"


def test_scratch_that_is_to_be_kept_stays_when_the_agent_is_killed(warm, tmp_path, ranks_gate):
    running, said = start(warm, tmp_path / "job", ranks_gate, "keeps_on_failure")
    running.signal(signal.SIGKILL)
    ended = running.wait()
    assert ended.left == []
    assert all((Path(each["scratch"]) / "work").read_text() == "half done" for each in said)
    assert not (Path(said[0]["scratch"]).parents[1] / "orders").exists(), "they hold the environment, and so secrets"


def test_shared_memory_of_a_rank_that_was_killed_is_gone_in_the_next_round_and_after_the_job(warm, tmp_path):
    """Helpers of Python, joblib and torch remove it, having seen the end of their last client: torch's looks every
    two seconds."""
    ended = warm.run("job_workers:shares_memory", tmp_path / "job")
    names = ended.value["python's"], *ended.value["others'"]
    assert len(names) == 5, ended.out
    assert "restart 1 of 1" in ended.err
    assert ended.value["left in round 1"] == []
    assert [name for name in names if Path("/dev/shm", name).exists()] == []


def test_two_jobs_at_once_do_not_disturb_each_other(warm, tmp_path):
    """One fails and is torn down while the other's ranks are in their functions; the other never notices."""
    with gate(tmp_path / "gate a") as gate_a, gate(tmp_path / "gate b") as gate_b:
        a, said_a = start(warm, tmp_path / "a", gate_a, "waits", environment={"TEST_NAME": "a"})
        b, said_b = start(warm, tmp_path / "b", gate_b, "waits", environment={"TEST_NAME": "b", "TEST_HOW": "raise"})
        assert not {each["scratch"] for each in said_a} & {each["scratch"] for each in said_b}
        gate_b.let_go(2)
        ended = b.wait()
        assert isinstance(ended.error, RankFailedError)
        assert_nothing_left(ended, set())
        assert all(Path(each["scratch"]).exists() for each in said_a)
        gate_a.let_go(2)
        assert a.wait().value == "a"
