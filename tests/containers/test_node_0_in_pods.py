"""Node 0 is lost at a named point, in one of the ways in which pods are lost, and comes back at another address.

Whatever it was, the attempt has its one right output, and nothing of the user's is spent on it: no attempt (no error is
uploaded), none of ``max_restarts``. In a range it is the pod that holds the job's store.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from flyteidl.core import errors_pb2

from tests.containers.cluster import Job, Pod, gated
from tests.containers.engine import DEADLINE, freeze, until
from tests.containers.losses import CutOff, Deleted, Frozen, Loss, OutOfMemory, Told, ended
from tests.harness.procs import Gate

SOON = DEADLINE
"""Seconds for a job to start, lose its node 0 and end, on a slow machine with much else to do: far below the 900 s of
the next deadline of the job's own that could end a hang."""

RANKS = {"2x2": 4, "range": 3}
Make = Callable[..., Job]


@dataclass(frozen=True)
class Case:
    """One loss.

    Attributes:
        point: where the job is then.
        loss: how node 0 is lost.
        task: of ``project/jobs.py``.
        times: how often in a row.
    """

    point: str
    loss: type[Loss]
    task: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.point}, {self.loss.__name__} x {self.times}, {self.task}".replace(" ", "-")

    @property
    def ranks(self) -> int:
        return RANKS[self.task.partition("_")[2]]


STANDING = [
    Case("ranks start", Told, "horovod_range"),
    Case("in the function", Deleted, "horovod_2x2", times=2),
    Case("in the function", CutOff, "torch_range"),
    Case("in the function", Frozen, "torch_2x2"),
    Case("in the function", OutOfMemory, "torch_2x2"),
    Case("function returns", Deleted, "torch_range"),
]
"""Each way of loss, point, backend and shape; the products are played with processes (``tests/agents``)."""


def made(job: Make, case: Case, gate: Gate) -> Job:
    place = case.point if case in STANDING else "in the function"
    return job(case.task, **gated(gate, place, TEST_HEARTBEAT="10"), steps=20)


def standing(gate: Gate, ranks: int, after: int) -> int:
    """Wait until *ranks* ranks stand at the gate in one round later than *after*, and give its number."""
    there: dict[int, int] = {}
    while True:
        _, _, _, size, _, number, *_ = gate.heard(1)[0].split()
        if int(size) == ranks and int(number) > after:
            there[int(number)] = there.get(int(number), 0) + 1
            if there[int(number)] == ranks:
                return int(number)


def goes_on(job: Job, case: Case) -> None:
    """Every pod leaves with 0, and the attempt has one output of all ranks."""
    left = ended(job.pods, SOON)
    assert [pod.code for pod in left] == [0] * len(left)
    assert job.uploaded == ["outputs.pb"]
    assert job.output["size"] == case.ranks
    assert not any("all ranks start again" in pod.log for pod in left)


def saying(pods: list[Pod], text: str = "waiting for its replacement") -> Callable[[], None]:
    """Waits until each of *pods* says that it looks for node 0, or *text*."""

    def wait() -> None:
        for pod in pods:
            pod.says(text)

    return wait


@pytest.mark.parametrize("case", STANDING, ids=str)
def test_node_0_is_lost_while_ranks_stand_at_a_point(job: Make, case: Case, pods_gate: Gate) -> None:
    going = made(job, case, pods_gate)
    first, *others = going.start()
    now = standing(pods_gate, case.ranks, after=-1)
    for _ in range(case.times):
        # Before they have given the round up, a node 0 that comes back loses nothing.
        loss = case.loss(first, saying(others, "node 0 is lost, and with it the round"))
        loss.happen()
        loss.come_back()
        now = standing(pods_gate, case.ranks, after=now)
    if isinstance(loss, Frozen):
        loss.wake()
        loss.settle()  # two of one name: the older one ends itself, while the job goes on
    pods_gate.let_go(case.ranks)
    goes_on(going, case)
    assert all(pod.codes == (0,) for pod in others), "the same processes, all the time"


def test_node_0_is_lost_before_the_nodes_have_met(job: Make, pods_gate: Gate) -> None:
    case = Case("before rendezvous", Told, "torch_range")
    going = made(job, case, pods_gate)
    first, *others = going.pods

    loss = case.loss(first, lambda: None)
    first.start().says("start: ")
    loss.happen()
    for pod in others:
        pod.start()
    for pod in others:
        pod.says("start: ")
    loss.come_back()
    standing(pods_gate, case.ranks, after=-1)
    pods_gate.let_go(case.ranks)
    goes_on(going, case)


def test_node_0_is_lost_while_it_uploads_the_outputs(job: Make, pods_gate: Gate) -> None:
    case = Case("rank 0 uploads", Frozen, "torch_2x2")
    going = made(job, case, pods_gate)
    first, *others = going.start()
    now = standing(pods_gate, case.ranks, after=-1)
    loss = Frozen(first, saying(others))
    with going.store_down():
        pods_gate.let_go(case.ranks)
        first.says("cannot be put into the store")
        loss.happen()
    loss.come_back()
    standing(pods_gate, case.ranks, after=now)
    loss.wake()
    loss.settle()
    pods_gate.let_go(case.ranks)
    goes_on(going, case)


@pytest.mark.end("storage is down for a moment, while code, inputs or outputs move")
def test_a_store_that_is_down_for_a_moment_and_sigterm_in_the_upload_lose_nothing(job: Make, pods_gate: Gate) -> None:
    case = Case("rank 0 uploads", Told, "horovod_2x2")
    going = made(job, case, pods_gate)
    first, _ = going.start()
    standing(pods_gate, case.ranks, after=-1)
    with going.store_down():
        pods_gate.let_go(case.ranks)
        first.says("cannot be put into the store")
        first.signal(signal.SIGTERM)
        first.says("the upload is finished first")
    goes_on(going, case)
    assert first.codes == (0,)


def test_a_node_0_that_comes_back_after_the_upload_changes_nothing(job: Make, pods_gate: Gate) -> None:
    case = Case("between upload and exit", Deleted, "torch_2x2")
    going = made(job, case, pods_gate)
    first, other = going.start()
    standing(pods_gate, case.ranks, after=-1)
    with going.store_down():
        pods_gate.let_go(case.ranks)
        first.says("cannot be put into the store")
        other.says("waiting until node 0 has uploaded")
        freeze(other.container)
    # Node 0 now stays for the other to read the end, which it cannot.
    until(lambda: going.uploaded, "node 0 uploads")
    loss = case.loss(first, lambda: None)
    loss.happen()
    other.container.unpause()
    loss.come_back()
    goes_on(going, case)
    assert going.output["round"] == 0
    assert "its result is uploaded" in first.log


def test_node_0_is_lost_while_it_uploads_the_users_error(job: Make, pods_gate: Gate) -> None:
    failing = job("torch_3x1", **gated(pods_gate, TEST_HOW="raise", TEST_HEARTBEAT="10"), steps=20)
    first, *others = failing.start()
    standing(pods_gate, 3, after=-1)
    loss = Deleted(first, saying(others))
    with failing.store_down():
        pods_gate.let_go(3)
        first.says("cannot be put into the store")
        loss.happen()
        loss.noticed()
    loss.come_back()
    assert [pod.code for pod in ended(failing.pods, SOON)] == [0, 0, 0]
    assert failing.uploaded == ["error.pb"]
    assert failing.error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
    assert "raised ValueError: no learning rate" in failing.error.message
