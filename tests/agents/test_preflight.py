"""Nodes are checked before the first rank of their job starts. Real agents, on loopback; what is not real here is the
network between them: container tests have that."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.agents.test_record import left
from tests.harness.job import Job
from tests.harness.procs import Warm, until, uploaded_error, uploaded_output


class Checked(Job):
    """Two pods."""

    module = "job_preflight"
    nproc_per_node = 1


FIGURES = r"disk, MB/s: .* to .*, matrix product, TFLOP/s: .* to .*"


def test_a_job_of_one_node_is_checked_and_goes_on(warm, tmp_path: Path) -> None:
    ended = warm.run("job_preflight:alone", tmp_path / "job")
    assert ended.value == "rank 0 of 2 in round 0, TEST_POD None"
    assert re.search(rf"\[safedist\] preflight: .* 1 node\(s\): {FIGURES}", ended.err)
    html, trace = left(ended)
    took = {event["name"]: event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert took["preflight"] > took["rendezvous"], "a process that imports torch; nobody was waited for"
    assert "p-preflight" in html


@pytest.mark.horovod
def test_nodes_measure_the_way_between_them(warm, tmp_path: Path) -> None:
    first, second = Checked(warm, tmp_path / "job", "horovod").run()
    assert uploaded_output(first) == "rank 0 of 2 in round 0, TEST_POD 0"
    for ended in (first, second):
        assert re.search(rf"preflight: .* 2 node\(s\): {FIGURES}, all-reduce with a neighbour, GB/s: ", ended.err)


class OfThree(Checked):
    nodes = "3"


def test_three_nodes_measure_the_way_to_both_neighbours(warm, tmp_path: Path) -> None:
    job = OfThree(warm, tmp_path / "job", "torch_of_three")
    *_, first = [pod.wait() for pod in [job.start(pod) for pod in (2, 1, 0)]]
    assert uploaded_output(first) == "rank 0 of 3 in round 0, TEST_POD 0"
    assert re.search(rf"preflight: .* 3 node\(s\): {FIGURES}, all-reduce with a neighbour, GB/s: ", first.err)


def asks_for_gpus(warm: Warm, directory: Path, task: str) -> Job:
    """What is registered does, and there are none."""
    job = Checked(warm, directory, task, more={"SAFEDIST_KUBERNETES_NODE": "gpu-17"})
    job.registered = {"gpus": 1}
    return job


def checks_of(pid: int) -> bool:
    """Whether they run."""
    everything = psutil.process_iter(["ppid", "cmdline"])  # without those that end meanwhile
    commands = [" ".join(each.info["cmdline"] or ()) for each in everything if each.info["ppid"] == pid]
    return any("preflight.probe" in command for command in commands)


@pytest.mark.end("unfit", "SYSTEM:PreflightGpu")
def test_a_node_that_is_not_fit_ends_the_job_before_its_first_rank(warm, tmp_path: Path) -> None:
    first, second = asks_for_gpus(warm, tmp_path / "job", "torch").run()
    assert [first.uploaded, second.uploaded] == [["error.pb"], []]
    error = uploaded_error(first)
    assert error.code == "SYSTEM:PreflightGpu"
    assert re.match(
        r"before the first rank: node 0 \(host .*, Kubernetes node gpu-17\), node 1 \(.*\): "
        "gpu: this pod has 1 GPUs, and torch sees 0",
        error.message,
    )
    assert "Fix: keep the next attempt off that machine" in error.message


def test_a_node_that_is_not_fit_is_told_and_the_job_goes_on_where_the_user_wants_that(warm, tmp_path: Path) -> None:
    first, second = asks_for_gpus(warm, tmp_path / "job", "reports").run()
    assert uploaded_output(first) == "rank 0 of 2 in round 0, TEST_POD 0"
    assert "gpu: this pod has 1 GPUs, and torch sees 0" in second.err


def test_a_pod_that_is_told_to_stop_while_its_node_is_checked_leaves_nothing(warm, tmp_path: Path) -> None:
    job = Checked(warm, tmp_path / "job", "torch")
    first, second = job.start(0), job.start(1)
    until(lambda: checks_of(second.pid), "its checks run")
    second.signal(signal.SIGTERM)
    ended = second.wait()
    assert ended.left == []
    assert ended.code == 137
    first.signal(signal.SIGTERM)
    assert first.wait().left == []
