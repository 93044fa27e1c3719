"""Pods are told to stop, as by a preemption: all ranks save at one step, and no step is lost, nor taken twice.

A pod is told by ``docker stop`` with its own grace period, after which it would be killed: as the kubelet does it. It
is gone then, and the operator makes a new one, at another address.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from flyteidl.core import errors_pb2, execution_pb2

from tests.containers.cluster import Job, Pod, gated
from tests.containers.test_node_0_in_pods import SOON
from tests.harness.procs import Gate

Make = Callable[..., Job]


def told_to_stop(*pods: Pod) -> None:
    """All of them at once; each is gone before its grace period is over, and undecided."""
    with ThreadPoolExecutor() as all_at_once:
        assert [ended.codes for ended in all_at_once.map(Pod.stop, pods)] == [(137,)] * len(pods)


def agreed(pod: Pod) -> int:
    """The step at which all ranks saved, as a pod's log says it."""
    pod.says("a node was told to stop: all ranks save at step ")
    (step,) = re.findall(r"a node was told to stop: all ranks save at step (\d+)", pod.log)
    return int(step)


def went_on(gate: Gate, ranks: int, step: int) -> None:
    """Wait until all ranks go on after *step*."""
    assert sorted(gate.heard(ranks)) == [f"rank {rank} of {ranks} from {step + 1}" for rank in range(ranks)]


def taken(gate: Gate, rank: int) -> list[int]:
    """The steps that a rank has taken, one after the other, through all rounds and attempts."""
    return [int(step) for step in (gate.said.parent / f"steps-{rank}").read_text().split()]


def none_lost(job: Job, gate: Gate, *, ranks: int, step: int) -> None:
    """The output is there, and each rank has taken each step once: those up to *step* before, the others after."""
    assert job.uploaded == ["outputs.pb"]
    assert job.output["size"] == ranks
    everything = list(range(step + 4))
    assert job.output["steps"] == everything
    assert [taken(gate, rank) for rank in range(ranks)] == [everything] * ranks


@pytest.mark.parametrize(
    ("task", "nodes"),
    [
        pytest.param("preempted_15", (0, 1), id="15 s, all nodes"),
        pytest.param("preempted_30", (0,), id="30 s, node 0"),
    ],
)
def test_pods_that_are_told_to_stop_cost_no_step_and_no_restart(
    job: Make, pods_gate: Gate, task: str, nodes: tuple[int, ...]
) -> None:
    going = job(task, **gated(pods_gate))
    pods = going.start()
    pods_gate.heard(4)
    told_to_stop(*(pods[node] for node in nodes))
    step = agreed(pods[nodes[0]])
    assert going.uploaded == []
    for node in nodes:
        pods[node].start()
    went_on(pods_gate, 4, step)
    ended = going.wait(SOON)
    assert [pod.codes for pod in ended] == [(0,), (0,)]
    none_lost(going, pods_gate, ranks=4, step=step)
    assert not any("start again: restart" in pod.log for pod in ended)


def test_a_single_pod_ends_with_the_platforms_verdict_and_its_next_attempt_goes_on(job: Make, pods_gate: Gate) -> None:
    first = job("preempted_alone", **gated(pods_gate))
    (pod,) = first.start()
    pods_gate.heard(2)
    assert pod.stop().codes == (0,)
    step = agreed(pod)
    assert first.uploaded == ["error.pb"]
    assert first.error.code == "SYSTEM:Stopped"
    assert first.error.kind == errors_pb2.ContainerError.RECOVERABLE
    assert first.error.origin == execution_pb2.ExecutionError.SYSTEM
    again = job("preempted_alone", after=first, **gated(pods_gate))
    again.run(SOON)
    none_lost(again, pods_gate, ranks=2, step=step)
