"""What goes wrong between pods, and what becomes of it: the objects uploaded, the exit codes, the time, the words.

Every case says all four. The time is a bound that holds on a slow machine, by which a wait that only its deadline ends
would be seen; how fast things are is the benchmarks' business.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from flyteidl.core import errors_pb2

from tests.containers import losses
from tests.containers.cluster import Job, Pod, gated
from tests.containers.engine import until
from tests.containers.test_node_0_in_pods import SOON
from tests.harness.procs import Gate

Make = Callable[..., Job]


def succeeded(job: Job, ended: list) -> None:
    """One output, from all ranks, and every pod left with 0 in the end."""
    assert job.uploaded == ["outputs.pb"]
    assert job.output["size"] == 4
    assert [pod.code for pod in ended] == [0] * len(ended)


def test_with_error_aggregation_an_exception_on_the_last_node_is_the_one_error(job: Make) -> None:
    aggregating = {"_F_DES": "Earliest"}  # what propeller's enable-distributed-error-aggregation adds
    failing = job("torch_2x2", environment={"TEST_HOW": "raise", **aggregating}, steps=20)
    ended = failing.run(SOON)
    assert failing.uploaded == ["error.pb"]
    assert [pod.codes for pod in ended] == [(0,), (0,)]
    assert failing.error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
    assert "rank 3 (local_rank 1) on node 1" in failing.error.message
    assert "raised ValueError: no learning rate" in failing.error.message
    assert "all 1 restart(s) of max_restarts are spent" in failing.error.message


def test_a_rank_that_is_killed_once_costs_a_restart_and_leaves_no_error(job: Make) -> None:
    restarted = job("horovod_2x2", environment={"TEST_HOW": "kill once"}, steps=20)
    ended = restarted.run(SOON)
    succeeded(restarted, ended)
    assert restarted.output["round"] > 0
    assert any("all ranks start again: restart 1 of 1" in pod.log for pod in ended)


def test_a_pod_that_is_deleted_and_recreated_takes_its_place(job: Make, pods_gate: Gate) -> None:
    going = job("torch_2x2", **gated(pods_gate), steps=20)
    _, second = going.start()
    pods_gate.heard(4)
    second.remove()
    second.start()
    assert all("round 0" not in line for line in pods_gate.heard(4))
    pods_gate.let_go(4)
    ended = going.wait(SOON)
    succeeded(going, ended)
    assert "2 node(s) are there, 4 rank(s) start" in ended[0].log


@pytest.mark.parametrize(("task", "away"), [("horovod_2x2", Pod.paused), ("torch_2x2", Pod.partitioned)])
def test_a_node_that_is_paused_or_cut_off_for_longer_than_the_heartbeat_costs_a_round_and_not_the_job(
    job: Make, pods_gate: Gate, task: str, away: Callable[[Pod], AbstractContextManager[None]]
) -> None:
    going = job(task, **gated(pods_gate, TEST_HEARTBEAT="10"), steps=20)
    first, second = going.start()
    pods_gate.heard(4)
    with away(second):
        first.says("node 1: no sign of life for 10 s")
    assert all("round 0" not in line for line in pods_gate.heard(4))
    pods_gate.let_go(4)
    ended = [first.wait(within=SOON), second.wait(runs=2, within=SOON)]
    succeeded(going, ended)


def test_a_store_that_is_down_for_a_moment_during_staging_is_asked_again(job: Make) -> None:
    waiting = job("torch_2x2", steps=20)
    for pod in waiting.pods:
        # Each by itself: on a slow machine the other's start takes longer than all tries of this one.
        with pod.without_store():
            pod.start()
            pod.says("trying again")
    ended = waiting.wait(SOON)
    succeeded(waiting, ended)
    assert [pod.codes for pod in ended] == [(0,), (0,)]


def test_a_store_that_stays_down_during_the_upload_leaves_the_job_to_be_done_again(job: Make, pods_gate: Gate) -> None:
    failing = job("torch_2x2", **gated(pods_gate, TEST_UPLOAD="20"), steps=20)
    first, second = failing.start()
    pods_gate.heard(4)
    with failing.store_down():
        pods_gate.let_go(4)
        undecided = first.wait(within=SOON)
    assert undecided.codes[0] == 137
    assert "the store is away" in undecided.log
    assert failing.uploaded == []
    pods_gate.heard(4)
    pods_gate.let_go(8)
    until(lambda: failing.uploaded, "a later start of node 0 uploads", SOON)
    assert failing.uploaded == ["outputs.pb"]
    assert [pod.codes[-1] for pod in losses.ended([first, second], SOON)] == [0, 0]
