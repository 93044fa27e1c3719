"""Ranks on a machine whose disk fails, or whose shared memory is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2

from tests.harness import needs
from tests.harness.fusefs import FuseMount, require
from tests.harness.mounts import mount
from tests.harness.pod import Pod
from tests.harness.procs import uploaded_error
from tests.harness.registered import registered


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


WORKFLOWS = """
import signal

from flytekit import task
from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank


class Large:
    def __len__(self):
        return 8

    def __getitem__(self, number):
        import torch
        return torch.ones(1 << 20)


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.5, exit=0.5)))
def loads() -> None:
    from torch.utils.data import DataLoader

    if current_rank().rank == 0:
        signal.pause()
    for _ in DataLoader(Large(), num_workers=1):
        pass
"""


@pytest.mark.end("full shared memory", "USER:RuntimeError")
def test_shared_memory_that_is_too_small_for_what_workers_hand_over_is_named(tmp_path: Path, as_promised) -> None:
    needs.root("mount a small /dev/shm")
    pod = Pod(tmp_path / "pod", {"workflows.py": WORKFLOWS})
    pod.environment = registered(nproc_per_node=2, timeouts={"stop": 0.5, "exit": 0.5})
    small = ("-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm")
    ended = pod.fresh(*pod.fast_arguments("loads"), preexec_fn=lambda: mount(*small))
    as_promised(ended)
    assert "give the task more: @task(shared_memory=...)" in uploaded_error(ended).message
