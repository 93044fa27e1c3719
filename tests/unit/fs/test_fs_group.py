"""Which of the things that ranks have in common the helpers coordinate over."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from flytekitplugins_safedist import envvars
from flytekitplugins_safedist.errors import FsError, FsIdentityError, FsIoError, FsTimeoutError
from flytekitplugins_safedist.fs import Group, Identity, default_group, group, use_group, use_identity
from flytekitplugins_safedist.fs.coordination import MemoryCoordinationStore
from flytekitplugins_safedist.job.deciding import Coordinator
from flytekitplugins_safedist.job.messages import Go, Hello
from flytekitplugins_safedist.job.rules import Rules
from flytekitplugins_safedist.job.server import Server
from flytekitplugins_safedist.topology import Endpoint


@pytest.fixture(autouse=True)
def rank_1_of_4_on_2_nodes(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv(envvars.MEETING, raising=False)
    monkeypatch.delenv(envvars.COORDINATION_DIR, raising=False)
    monkeypatch.setattr(sys.modules[Group.__module__], "_made", {})  # each test is a process of its own
    use_identity(Identity(1, 4, 1, 2, 0, 2))
    yield
    use_identity(None)


@pytest.fixture
def met(monkeypatch) -> Iterator[str]:
    """Where the job's coordinator is, as the agent tells the ranks of round 0."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    coordinator = Coordinator(Rules("job", min_nodes=1, max_nodes=1, fixed=True), "here", time.monotonic())
    server = Server(coordinator, process="here", run="job", heartbeat=60, prepare=lambda *_: {}, expected=1)
    address = f"127.0.0.1:{server.listen(Endpoint('127.0.0.1', 0), 1)}"
    server.attach(inbox)(Hello("job", "here", 0, 1, "host"))
    while not isinstance(inbox.get(timeout=30), Go):
        pass
    monkeypatch.setenv(envvars.MEETING, address)
    monkeypatch.setenv(envvars.TORCHELASTIC_RUN_ID, "job")
    monkeypatch.setenv(envvars.ROUND, "0")
    yield address
    server.close()


@pytest.fixture
def store() -> dist.TCPStore:
    """What torchrun's agent holds."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def test_the_jobs_coordinator_is_there_before_any_backend_and_outlives_every_rank(met):
    coordination = default_group().coordination
    assert coordination.where == f"the job's coordinator at {met}"
    assert not coordination.held_by_rank_0
    coordination.put("key", "note")
    assert coordination.get("key") == "note"


def test_ranks_that_a_rank_started_find_no_notes_of_the_job_that_they_are_not_in(met):
    default_group().coordination.put("key", "of the job")
    use_identity(Identity(0, 2, 0, 2, 0, 1))
    assert default_group().coordination.get("key") is None


def test_ranks_of_another_run_are_turned_away(met, monkeypatch):
    monkeypatch.setenv(envvars.TORCHELASTIC_RUN_ID, "started by a rank")
    with pytest.raises(FsIoError, match="the place where ranks meet is gone"):
        default_group().coordination.get("key")


def test_a_rank_of_a_round_that_is_over_is_told_so(met, monkeypatch):
    monkeypatch.setenv(envvars.ROUND, "7")
    with pytest.raises(FsIoError, match="round 7 is over: the job is in round 0"):
        default_group().coordination.get("key")


def test_a_rank_on_its_own_needs_no_store(met):
    use_identity(Identity(0, 1, 0, 1, 0, 1))
    assert default_group().coordination.where == "this process's memory"


def test_a_forked_child_makes_a_connection_of_its_own(met, monkeypatch):
    parents = default_group()
    assert default_group() is parents
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert default_group() is not parents


def test_what_the_user_gives_counts_before_everything_else_until_it_is_taken_back(met):
    given = Group(MemoryCoordinationStore(), Identity(1, 4, 1, 2, 0, 2))
    use_group(given)
    assert default_group() is given
    use_group(None)
    assert default_group() is not given


def test_an_earlier_failure_that_is_told_late_takes_no_try_back():
    group = Group(MemoryCoordinationStore(), Identity())
    for attempt in (0, 2, 1):
        group.failed("load", attempt)
    assert group.failures("load") == 3
    assert group.failures("other") == 0


def test_an_agent_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setenv(envvars.MEETING, "127.0.0.1:not-a-port")
    monkeypatch.setenv(envvars.TORCHELASTIC_RUN_ID, "job")
    monkeypatch.setenv(envvars.ROUND, "0")
    with pytest.raises(FsError, match=r"the place where ranks meet is gone.*127\.0\.0\.1:not-a-port"):
        default_group().coordination.get("key")


def test_ranks_of_several_nodes_with_nothing_in_common_are_told_what_to_set():
    with pytest.raises(FsError, match=r"4 ranks have nothing to coordinate over.*SAFEDIST_COORDINATION_DIR"):
        default_group()


def test_the_names_that_launchers_give_are_not_names_of_one_run(monkeypatch, tmp_path):
    # Two torchruns may share an --rdzv-id, all tasks of a workflow share an execution id; their notes are not answers.
    monkeypatch.setenv(envvars.COORDINATION_DIR, str(tmp_path))
    monkeypatch.setenv(envvars.FLYTE_EXECUTION_ID, "f1")
    monkeypatch.setenv(envvars.TORCHELASTIC_RUN_ID, "nightly3")
    with pytest.raises(FsError, match="SAFEDIST_JOB_ID"):
        default_group()


def test_files_coordinate_where_the_user_names_directory_and_run(monkeypatch, tmp_path):
    monkeypatch.setenv(envvars.COORDINATION_DIR, str(tmp_path))
    monkeypatch.setenv(envvars.JOB_ID, "run/7")
    assert default_group().coordination.where == f"files in {tmp_path}/run-7-0-0"


def test_files_of_each_attempt_and_each_round_are_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv(envvars.COORDINATION_DIR, str(tmp_path))
    monkeypatch.setenv(envvars.JOB_ID, "run")
    places = set()
    for attempt, round_ in ((0, 0), (0, 1), (1, 0), (1, 1)):
        use_identity(Identity(1, 4, 1, 2, 0, 2, round=round_, attempt=attempt))
        places.add(default_group().coordination.where)
    assert places == {f"files in {tmp_path}/run-{launch}" for launch in ("0-0", "0-1", "1-0", "1-1")}


def test_a_torchrun_keeps_its_store_over_restarts_and_each_round_finds_its_own_notes(store, monkeypatch):
    monkeypatch.setenv(envvars.TORCHELASTIC_USE_AGENT_STORE, "True")
    monkeypatch.setenv(envvars.MASTER_ADDR, "127.0.0.1")
    monkeypatch.setenv(envvars.MASTER_PORT, str(store.port))
    assert not default_group().coordination.held_by_rank_0
    default_group().coordination.put("key", "of round 0")
    use_identity(Identity(1, 4, 1, 2, 0, 2, round=1))
    assert default_group().coordination.get("key") is None


def test_a_torchrun_started_by_a_rank_has_its_own_launchers_store(met, monkeypatch):
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    default_group().coordination.put("key", "of the job")
    monkeypatch.setenv(envvars.TORCHELASTIC_USE_AGENT_STORE, "True")
    monkeypatch.setenv(envvars.MASTER_ADDR, "127.0.0.1")
    monkeypatch.setenv(envvars.MASTER_PORT, str(theirs.port))
    assert default_group().coordination.where == f"the agent's store at 127.0.0.1:{theirs.port}"
    assert default_group().coordination.get("key") is None


def test_a_process_group_that_was_destroyed_and_made_again_is_another_group(monkeypatch):
    # Python gives a new store the id of one that is gone: an id is not a name.
    for life in range(50):
        dist.init_process_group("gloo", store=(made := dist.HashStore()), rank=0, world_size=1)
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        coordination = default_group().coordination
        assert coordination.get("key") is None, f"in life {life}"
        coordination.put("key", "note")
        monkeypatch.undo()
        del made, coordination
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (2, 4)], ids=["another size", "another rank"])
def test_a_process_group_that_counts_other_ranks_than_the_environment_is_not_believed(monkeypatch, rank, size):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    try:
        with pytest.raises(FsIdentityError, match=f"rank {rank} of {size} by torch.distributed, rank 1 of 4"):
            default_group()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_a_collective_that_not_every_rank_calls_is_given_up_and_told_what_to_do():
    never = threading.Event()
    with pytest.raises(FsTimeoutError) as caught:
        group._bounded(never.wait, 0.01, "Horovod's other 3 ranks")
    never.set()
    assert str(caught.value) == (
        "waited 0.0 s for Horovod's other 3 ranks to form a group. Next step: every rank must call horovod_group, or "
        "its first fs helper, at the same point of the program"
    )


def test_a_collective_that_fails_is_told_with_its_error():
    with pytest.raises(FsError) as caught:
        group._bounded(lambda: int("x"), 60, "Horovod's other 3 ranks")
    assert str(caught.value).startswith("the ranks could not form a group (seen: ValueError: invalid literal")
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_older_name_of_the_coordination_store_is_still_read_with_a_warning():
    group = Group(MemoryCoordinationStore(), Identity())
    with pytest.warns(DeprecationWarning, match=r"read \.coordination"):
        assert group.board is group.coordination
