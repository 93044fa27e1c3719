"""A machine whose disk fails, whose shared memory is full, or that has no room for a further thread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2

from tests.harness import needs
from tests.harness.control_groups import control_group
from tests.harness.fusefs import FuseMount, require
from tests.harness.procs import uploaded_error


@pytest.mark.end("node's disk", "SYSTEM:NodeDisk")
def test_a_disk_that_fails_to_be_read_is_the_machines(warm, tmp_path: Path, as_promised) -> None:
    require()
    with FuseMount(tmp_path / "backing", tmp_path / "mount", faults=[{"op": "read", "errno": "EIO"}]) as disk:
        (disk.backing / "shard").write_bytes(b"x")
        environment = {"TEST_HOW": "reads", "TEST_FILE": str(disk.path / "shard")}
        ended = warm.run("job_failing:one_fails", tmp_path / "job", kind="execute", environment=environment)
    as_promised(ended)


def test_a_scratch_that_takes_no_sockets_is_an_error_that_names_it(warm, tmp_path: Path) -> None:
    """As mounts of object stores do not."""
    require()
    with FuseMount(tmp_path / "backing", tmp_path / "mount", faults=[{"op": "mknod", "errno": "EPERM"}]) as disk:
        environment = {"SAFEDIST_SCRATCH_ROOT": str(disk.path)}
        ended = warm.run("job_private:nothing", tmp_path / "job", kind="execute", environment=environment)
    error = uploaded_error(ended)
    assert (error.code, error.kind) == ("USER:ScratchError", errors_pb2.ContainerError.NON_RECOVERABLE)
    assert f"the scratch directory cannot be made [path={disk.path}] (seen: EPERM: " in error.message
    assert "which takes sockets" in error.message
    assert list(disk.backing.iterdir()) == []


def test_a_scratch_that_does_not_answer_at_the_end_keeps_no_outputs(warm, tmp_path: Path) -> None:
    require()
    slow = {"op": "rmdir", "match": "*/logs", "seconds": 8}
    timeouts = {"TEST_REGISTERED": json.dumps({"timeouts": {"upload": 6}})}
    with FuseMount(tmp_path / "backing", tmp_path / "mount", faults=[slow]) as disk:
        environment = {"SAFEDIST_SCRATCH_ROOT": str(disk.path), **timeouts}
        ended = warm.run("job_private:nothing", tmp_path / "job", kind="execute", environment=environment)
    assert (ended.code, ended.uploaded) == (0, ["outputs.pb"])
    assert "is not gone after 1 s, and the job does not wait for that" in ended.err


@pytest.mark.end("full shared memory", "USER:RuntimeError")
def test_shared_memory_that_is_too_small_for_what_workers_hand_over_is_named(warm, tmp_path: Path, as_promised) -> None:
    needs.root("mount a small /dev/shm")
    small = {"TEST_MOUNTS": json.dumps([("-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm")])}
    ended = warm.run("job_workers:hands_over_too_much", tmp_path / "job", kind="execute", environment=small)
    as_promised(ended)
    assert "give the task more: @task(shared_memory=...)" in uploaded_error(ended).message


def test_a_container_that_may_have_no_further_thread_ends_and_says_so(warm, tmp_path: Path) -> None:
    """Two processes: the agent and the rank server. Nothing is fetched or uploaded without a thread of flytekit's."""
    with control_group("pids", {"pids.max": "2"}, {"pids.max": "2"}) as group:
        environment = {"TEST_ENTERS": str(group)}
        ended = warm.run("job_private:nothing", tmp_path / "job", kind="execute", environment=environment)
    assert (ended.code, ended.uploaded, ended.left) == (137, [], [])
    assert "the verdict cannot be uploaded: RuntimeError: can't start new thread" in ended.err
    last = ended.err.splitlines()[-1]
    assert "the limit of this container that is named" in last
    assert last.partition("failed: ")[2] in (ended.files / "termination-log").read_text()
