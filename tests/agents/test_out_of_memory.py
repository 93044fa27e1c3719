"""A pod whose memory is not enough, in a real control group: the kernel takes a rank or a process of a rank's, and the
agent is there to say so; or it takes the whole container, and the other nodes say so."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2

from tests.harness.control_groups import control_group
from tests.harness.job import Job
from tests.harness.procs import uploaded_error
from tests.harness.proxy import Proxy

LIMIT = 900 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of its own."""
    limit = str(LIMIT)
    with control_group("memory", {"memory.limit_in_bytes": limit}, {"memory.max": limit}) as path:
        yield path


def limited(group: Path) -> dict[str, str]:
    """A pod's variables: it is in the group."""
    return {"TEST_ENTERS": str(group), "TEST_LIMIT": str(LIMIT)}


@pytest.mark.end("out of memory", "USER:OutOfMemory")
@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("a_worker_is_greedy", "lost DataLoader worker(s) "),
        ("a_rank_is_greedy", "was killed by SIGKILL: the kernel's"),
        ("a_pools_process_is_greedy", "lost a process that it had started to the kernel's"),
        ("a_spawned_process_is_greedy", "lost a process that it had started to the kernel's"),
        ("a_tensors_sender_is_greedy", "lost a process that it had started to the kernel's"),
    ],
)
def test_the_kernel_takes_a_rank_or_a_process_of_its_and_the_agent_says_so(
    warm, tmp_path, group: Path, task: str, says: str
):
    ended = warm.run(f"job_memory:{task}", tmp_path / "job", kind="execute", environment=limited(group))
    assert (ended.code, ended.uploaded) == (0, ["error.pb"]), ended.err
    error = uploaded_error(ended)
    assert (error.code, error.kind) == ("USER:OutOfMemory", errors_pb2.ContainerError.RECOVERABLE), error.message
    first, *_ = error.message.splitlines()
    assert first.startswith("rank 1 (local_rank 1) on node 0")
    assert says in first
    assert "out-of-memory killer has ended" in error.message
    assert "requests=Resources(mem=" in error.message


class Relay(Proxy):
    """On node 1's way to node 0: notes that its memory is said to be full."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.heard, self.text = threading.Event(), b""

    def _seen(self, data: bytes) -> None:
        self.text = (self.text + data)[-(1 << 20) :]
        said = re.findall(rb'"memory": ?\{"used": ?(\d+), ?"limit": ?(\d+)\}', self.text)
        if any(int(used) >= 0.95 * int(limit) for used, limit in said):
            self.heard.set()


@pytest.mark.parametrize("greedy", [0, 1])
def test_a_node_that_vanishes_with_its_memory_full_is_told_as_out_of_memory(warm, tmp_path, group: Path, greedy: int):
    job = Job(warm, tmp_path, "job_memory:one_node_is_greedy", nproc_per_node=1)
    job.registered = {"timeouts": {"rendezvous": 5.0, "heartbeat": 5.0}}
    relay = Relay(job.port)
    by_relay = dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), str(relay.port))
    pods = [
        job.start(pod, {**(limited(group) if pod == greedy else {}), **(by_relay if pod == 1 else {})})
        for pod in range(2)
    ]
    assert relay.heard.wait(60), relay.text
    for pid in (group / "cgroup.procs").read_text().split():  # as the kernel does under memory.oom.group
        os.kill(int(pid), signal.SIGKILL)
    pods[greedy].wait()
    if greedy == 0:
        relay.close()
    ended = pods[1 - greedy].wait()
    error = uploaded_error(ended)
    assert (error.code, error.kind) == ("USER:OutOfMemory", errors_pb2.ContainerError.RECOVERABLE), error.message
    assert re.search(rf"node {greedy}: .*; its memory was full \([\d.]+ MiB of 900.0 MiB in use\)", error.message)
    assert error.message.splitlines()[0] in ended.err, "it is said at the first loss, too"
