"""Nodes are checked before the first rank of their job starts. Real agents, on loopback; what is not real here is the
network between them: container tests have that."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.agents.test_record import left
from tests.harness import needs
from tests.harness.control_groups import control_group
from tests.harness.fusefs import FuseMount, require
from tests.harness.job import Job
from tests.harness.mounts import no_shared_memory
from tests.harness.procs import Running, until, uploaded_error, uploaded_output


class Checked(Job):
    """Two pods."""

    module = "job_preflight"
    nproc_per_node = 1


FIGURES = r"disk, MB/s: .* to .*, matrix product, TFLOP/s: .* to .*"
BETWEEN = "all-reduce with a neighbour, GB/s: "


def test_a_job_of_one_node_is_checked_and_goes_on(warm, tmp_path: Path) -> None:
    ended = warm.run("job_preflight:alone", tmp_path / "job")
    assert ended.value == "rank 0 of 2 in round 0, TEST_POD None"
    assert re.search(rf"\[safedist\] preflight: .* 1 node\(s\): {FIGURES}", ended.err)
    text, trace = left(ended)
    took = {event["name"]: event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert took["preflight"] > took["rendezvous"], "a process that imports torch; nobody was waited for"
    assert re.search(r"preflight[\d.]+ s", text), "where the time went"


class OfThree(Checked):
    nodes = "3"


UNFIT = "gpu: this pod has 1 GPUs, and torch sees 0"


@pytest.mark.horovod
def test_three_nodes_measure_the_way_to_their_neighbours_and_where_the_user_wants_that_only_tell_who_is_not_fit(
    warm, tmp_path: Path
) -> None:
    job = OfThree(warm, tmp_path / "job", "horovod_of_three")
    job.registered = {"gpus": 1}
    ended = [pod.wait() for pod in [job.start(pod) for pod in (2, 1, 0)]]
    assert uploaded_output(ended[-1]) == "rank 0 of 3 in round 0, TEST_POD 0"
    for each in ended:
        assert re.search(rf"preflight: .*{UNFIT}.* 3 node\(s\): {FIGURES}, {BETWEEN}", each.err)


def checks_of(pod: Running) -> psutil.Process | None:
    """The process that makes them."""
    everything = psutil.process_iter(["ppid", "cmdline"])  # without those that end meanwhile
    of_pod = [each for each in everything if each.info["ppid"] == pod.pid]
    return next((each for each in of_pod if "preflight.probe" in " ".join(each.info["cmdline"] or ())), None)


def checking(pod: Running) -> psutil.Process:
    """The same, when it is there."""
    found: list[psutil.Process] = []

    def runs() -> bool:
        found.extend(filter(None, [checks_of(pod)]))
        return bool(found)

    until(runs, "its checks run")
    return found[0]


@pytest.mark.end("unfit", "SYSTEM:PreflightGpu")
def test_a_node_that_is_not_fit_ends_the_job_before_its_first_rank(warm, tmp_path: Path, as_promised) -> None:
    asks = {"TEST_REGISTERED": json.dumps({"gpus": 1}), "SAFEDIST_KUBERNETES_NODE": "gpu-17"}
    ended = warm.run("job_preflight:alone", tmp_path / "job", kind="execute", environment=asks)
    as_promised(ended)
    message = uploaded_error(ended).message
    assert re.match(rf"before the first rank: node 0 \(host .*, Kubernetes node gpu-17\): {UNFIT}", message)
    assert "Fix: keep the next attempt off that machine" in message


def test_a_pod_that_is_told_to_stop_while_its_node_is_checked_leaves_nothing(warm, tmp_path: Path) -> None:
    job = Checked(warm, tmp_path / "job", "torch")
    first, second = job.start(0), job.start(1)
    checking(second).suspend()  # else they may be over before it is told
    second.signal(signal.SIGTERM)
    ended = second.wait()
    assert ended.left == []
    assert ended.code == 137
    assert "this pod stays" not in ended.err, "there is no rank yet that could save"
    assert "told to stop by SIGTERM; every rank has been ended" in ended.err
    first.signal(signal.SIGTERM)
    assert first.wait().left == []


# --- machines that lack something -------------------------------------------------------------------------------------
@pytest.mark.end("unfit", "SYSTEM:PreflightChecks")
def test_checks_that_are_killed_have_found_nothing_and_their_node_is_named(warm, tmp_path: Path, as_promised) -> None:
    running = warm.start("job_preflight:alone", tmp_path / "job", kind="execute")
    checking(running).kill()
    ended = running.wait()
    as_promised(ended)
    assert "its checks have ended with status -9" in uploaded_error(ended).message


@pytest.mark.end("unfit", "SYSTEM:PreflightDisk")
def test_a_scratch_that_does_not_rename_over_files_is_named(warm, tmp_path: Path, as_promised) -> None:
    """As mounts of object stores do not."""
    require()
    with FuseMount(tmp_path / "backing", tmp_path / "mount", replaces=False) as disk:
        environment = {"SAFEDIST_SCRATCH_ROOT": str(disk.path)}
        ended = warm.run("job_preflight:alone", tmp_path / "job", kind="execute", environment=environment)
    as_promised(ended)
    assert f"{disk.path}/" in uploaded_error(ended).message
    assert "does not rename over existing files" in uploaded_error(ended).message


@pytest.mark.end("unfit", "SYSTEM:PreflightSharedMemory")
def test_a_pod_without_shared_memory_is_named(warm, tmp_path: Path, as_promised) -> None:
    needs.root("mount a directory of devices")
    lacks = {"TEST_MOUNTS": json.dumps(no_shared_memory(tmp_path / "dev"))}
    ended = warm.run("job_preflight:alone", tmp_path / "job", kind="execute", environment=lacks)
    as_promised(ended)
    assert "/dev/shm: No such file or directory" in uploaded_error(ended).message


@pytest.fixture
def slow_machine() -> Iterator[Path]:
    """A control group that may use a twentieth of a core."""
    v1 = {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "1000"}
    with control_group("cpu", v1, {"cpu.max": "1000 20000"}) as path:
        yield path


def measures(checks: psutil.Process) -> bool:
    """Whether it has opened the file that it measures the disk with: torch is imported, and nothing is computed yet."""
    for number in os.listdir(f"/proc/{checks.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/{checks.pid}/fd/{number}").endswith(" (deleted)"):
                return True
    return False


@pytest.mark.end("unfit", "SYSTEM:PreflightSpeed")
def test_a_machine_that_is_far_slower_than_the_others_is_named(
    warm, tmp_path: Path, slow_machine: Path, as_promised
) -> None:
    job = Checked(warm, tmp_path / "job", "torch_compared")
    first, second = job.start(0), job.start(1)
    checks = checking(second)
    until(lambda: measures(checks), "it measures")
    (slow_machine / "cgroup.procs").write_text(str(checks.pid))
    (ended, other) = first.wait(), second.wait()
    assert (other.code, other.uploaded, other.left) == (0, [], [])
    as_promised(ended)
    text = uploaded_error(ended).message
    assert re.match(r"before the first rank: node 1 \(host .*\): matrix product, TFLOP/s: .*, where most have", text)
