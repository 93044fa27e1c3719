"""Jobs of several pods that stop moving: each ends by itself; its one error names who holds up whom, or the network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flyteidl.core import errors_pb2

from tests.containers.cluster import Job, Pod, gated
from tests.containers.engine import DEADLINE
from tests.harness.procs import Gate

Make = Callable[..., Job]


def hung(job: Job) -> str:
    """Wait until it has ended for a hang; its error."""
    assert {pod.codes for pod in job.wait(DEADLINE)} == {(0,)}
    assert job.uploaded == ["error.pb"]
    assert (job.error.code, job.error.kind) == ("USER:HangError", errors_pb2.ContainerError.RECOVERABLE)
    message: str = job.error.message
    return message


def test_a_rank_of_another_node_that_is_stopped_is_named(job: Make) -> None:
    stopped = job("torch_watched", environment={"TEST_HOW": "stop"}, steps=20)
    stopped.start()
    message = hung(stopped)
    assert message.startswith("rank 3 (local_rank 1) on node 1")
    assert "the job does not move: rank 3 is stopped (SIGSTOP); " in message
    assert "[kind=frozen]" in message


def all_but_the_agents(pod: Pod) -> tuple[str, ...]:
    """Rules for a pod's network that let through only what its agent and node 0's say to each other."""
    port = next(each["value"] for each in pod.main["env"] if each["name"] == "MASTER_PORT")
    agents = (f"INPUT -p tcp --sport {port} -j ACCEPT", f"OUTPUT -p tcp --dport {port} -j ACCEPT")
    return ("INPUT ! -i lo -j DROP", "OUTPUT ! -o lo -j DROP", *agents)  # each is put before those that are there


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_where_ranks_of_two_nodes_do_not_hear_each_other_it_is_the_network(
    job: Make, backend: str, pods_gate: Gate
) -> None:
    """One of their own that fails, say: the agents, on another one, still talk."""
    cut = job(f"{backend}_watched", **gated(pods_gate), steps=20)
    _, second = cut.start()
    pods_gate.heard(4)
    with second.under(*all_but_the_agents(second)):
        pods_gate.let_go(4)
        message = hung(cut)
    assert "the job does not move: all ranks wait in " in message
    assert "the network between them, or a library, stands still" in message
    assert "[kind=symmetric]" in message
