"""A pod whose memory is not enough, in a real control group: the kernel takes a rank or a DataLoader's worker, and the
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
from tests.harness.job import operators_variables
from tests.harness.pod import Pod
from tests.harness.product import ReservedPort
from tests.harness.proxy import Proxy
from tests.harness.registered import registered

pytestmark = pytest.mark.processes

WORKFLOWS = """
import os
from pathlib import Path

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


def in_use(group):
    usage = next(file for name in ("memory.current", "memory.usage_in_bytes") if (file := group / name).exists())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_active_file" in stat else ""
    return int(usage.read_text()) - sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))


@task(task_config=SafeTorch(nnodes=2, nproc_per_node=1))
def one_node_is_greedy() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    held = []
    while True:
        is_greedy = "TEST_GREEDY" in os.environ
        if is_greedy and in_use(Path(os.environ["TEST_GROUP"])) < 0.97 * int(os.environ["TEST_LIMIT"]):
            held.append(bytearray(4 << 20))
        dist.all_reduce(torch.ones(1))
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
def test_a_node_that_vanishes_with_its_memory_full_is_told_as_out_of_memory(tmp_path: Path, group: Path, greedy: int):
    reserved = ReservedPort()
    relay = Relay(reserved.port)
    limits = {"TEST_GROUP": str(group), "TEST_LIMIT": str(LIMIT), "FLYTE_INTERNAL_EXECUTION_ID": tmp_path.name}
    pods = [Pod(tmp_path / f"pod-{number}", {"workflows.py": WORKFLOWS}) for number in range(2)]
    for number, (pod, port) in enumerate(zip(pods, (reserved.port, relay.port), strict=True)):
        pod.prefix = str(pods[0].outputs)
        pod.environment = {
            **registered(nodes="2", nproc_per_node=1, timeouts={"rendezvous": 5.0, "heartbeat": 5.0}),
            **operators_variables(number, nodes="2", nproc_per_node=1, port=port),
            **limits,
            **({"TEST_GREEDY": "yes"} if number == greedy else {}),
        }

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    running = [
        pod.start(*pod.fast_arguments("one_node_is_greedy"), preexec_fn=enter if number == greedy else None)
        for number, pod in enumerate(pods)
    ]
    assert relay.heard.wait(60), relay.text
    for pid in (group / "cgroup.procs").read_text().split():  # as the kernel does under memory.oom.group
        os.kill(int(pid), signal.SIGKILL)
    running[greedy].communicate()
    if greedy == 0:
        relay.close()
    _, err = running[1 - greedy].communicate()
    error = pods[0].error()
    assert (error.code, error.kind) == ("USER:OutOfMemory", errors_pb2.ContainerError.RECOVERABLE), error.message
    assert re.search(rf"node {greedy}: .*; its memory was full \([\d.]+ MiB of 900.0 MiB in use\)", error.message)
    assert error.message.splitlines()[0] in err, "it is said at the first loss, too"
