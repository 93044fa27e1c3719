"""A pod whose memory is not enough, in a real control group: the kernel takes a rank or a DataLoader's worker, and the
agent is there to say so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2

from tests.harness.control_groups import control_group
from tests.harness.pod import Pod
from tests.harness.registered import registered

pytestmark = pytest.mark.processes

WORKFLOWS = """
from flytekit import task
from flytekitplugins_safedist import SafeTorch, current_rank


class Greedy:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        import torch
        if number >= 20 and current_rank().rank == 1:
            self.held = [*getattr(self, "held", []), bytearray(60 << 20)]
        return torch.ones(4)


def train(workers):
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    for batch in DataLoader(Greedy(), batch_size=4, num_workers=workers):
        dist.all_reduce(batch)


@task(task_config=SafeTorch(nproc_per_node=2))
def a_worker_is_greedy() -> None:
    train(2)


@task(task_config=SafeTorch(nproc_per_node=2))
def a_rank_is_greedy() -> None:
    train(0)
"""
LIMIT = 900 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of its own."""
    limit = str(LIMIT)
    with control_group("memory", {"memory.limit_in_bytes": limit}, {"memory.max": limit}) as path:
        yield path


@pytest.mark.end("out of memory", "USER:OutOfMemory")
@pytest.mark.parametrize(
    ("task", "says"),
    [("a_worker_is_greedy", "lost DataLoader worker(s) "), ("a_rank_is_greedy", "was killed by SIGKILL: the kernel's")],
)
def test_the_kernel_takes_a_rank_or_its_worker_and_the_agent_says_so(tmp_path: Path, group: Path, task: str, says: str):
    pod = Pod(tmp_path / "pod", {"workflows.py": WORKFLOWS})
    pod.environment = registered(nproc_per_node=2)
    process = pod.start(
        *pod.fast_arguments(task), preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    )
    _, err = process.communicate()
    assert (process.returncode, pod.uploaded()) == (0, ["error.pb"]), err
    error = pod.error()
    assert (error.code, error.kind) == ("USER:OutOfMemory", errors_pb2.ContainerError.RECOVERABLE), error.message
    first, *_ = error.message.splitlines()
    assert first.startswith("rank 1 (local_rank 1) on node 0")
    assert says in first
    assert "out-of-memory killer has ended" in error.message
    assert "requests=Resources(mem=" in error.message
