"""Failures of ranks whose GPU reports a fault: who pays follows from that. Real agents and ranks, the real
nvidia-ml-py, and a stand-in for the driver: no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2

from tests.harness.job import Job
from tests.harness.nvml import Gpus
from tests.harness.procs import Ended, Running, Warm, until, uploaded_error, uploaded_output

UUID = "GPU-10000000-aaaa-bbbb-cccc-000000000000"


@pytest.fixture
def environment(nvml_driver: Path, tmp_path: Path) -> dict[str, str]:
    """Of a job on a node with two GPUs."""
    Gpus(tmp_path / "gpus", 2)
    driver = {"TEST_NVML": str(tmp_path / "gpus"), "TEST_NVML_LIBRARY": str(nvml_driver)}
    return {**driver, "SAFEDIST_KUBERNETES_NODE": "gpu-17"}


def failed(warm: Warm, files: Path, how: str, environment: dict[str, str], task: str = "one_fails") -> Ended:
    return warm.run(f"job_gpus:{task}", files, environment={"TEST_HOW": how, **environment}, kind="execute")


REPORTED = {
    "xid 79": "Xid 79: GPU has fallen off the bus",
    "lost": "Xid 79: GPU has fallen off the bus",
    "xid 48": "Xid 48: double-bit ECC error",
    "xid 74": "Xid 74: NVLink error",
    "xid 119, aborts": "Xid 119: GSP RPC timeout",
    "xid 31": "Xid 31: GPU memory page fault (an illegal address)",
}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("xid 79", marks=pytest.mark.end("GPU fault", "SYSTEM:GpuFallenOffBus", imitated=True)),
        pytest.param("lost", marks=pytest.mark.end("GPU fault", "SYSTEM:GpuFallenOffBus", imitated=True)),
        pytest.param("xid 48", marks=pytest.mark.end("GPU fault", "SYSTEM:GpuEccError", imitated=True)),
        pytest.param("xid 74", marks=pytest.mark.end("GPU fault", "SYSTEM:GpuNvlinkError", imitated=True)),
        pytest.param("xid 119, aborts", marks=pytest.mark.end("GPU fault", "SYSTEM:GpuXidError", imitated=True)),
        pytest.param("xid 31", marks=pytest.mark.end("GPU program", "USER:GpuXidError", imitated=True)),
    ],
)
def test_the_error_names_the_gpu_and_what_it_has_reported(
    warm, tmp_path: Path, how: str, environment, as_promised
) -> None:
    what = REPORTED[how]
    ended = failed(warm, tmp_path / "job", how, environment)
    as_promised(ended)
    message = uploaded_error(ended).message
    assert message.startswith(f"{what}, reported by GPU 1 ({UUID}): rank 1 (local_rank 1) on node 0 (")
    assert ("raised RuntimeError: CUDA error: unspecified launch failure" in message) == ("aborts" not in how)
    step = "compute-sanitizer" if "Xid 31" in what else "drain that node"
    assert re.search(f"Fix: .*{step}", message)
    assert f"GPU 1 ({UUID}) reported {what}" in ended.err, "told at once, as a warning"


@pytest.mark.parametrize("how", ["xid 79, for another reason", "xid 8"])
def test_what_does_not_come_of_a_gpu_is_what_it_is(warm, tmp_path: Path, how: str, environment) -> None:
    """An error of the program's own beside a fault; one of CUDA's beside an Xid that says nothing of it."""
    error = uploaded_error(failed(warm, tmp_path / "job", how, environment))
    assert error.code == ("USER:ValueError" if "reason" in how else "USER:RuntimeError")
    assert error.message.startswith("rank 1 (local_rank 1) on node 0 (")


def test_whose_gpu_has_failed_is_no_echo(warm, tmp_path: Path, environment) -> None:
    environment = {**environment, "CUDA_VISIBLE_DEVICES": "1,0"}
    error = uploaded_error(failed(warm, tmp_path / "job", "", environment, "both_lose_each_other"))
    assert (error.code, error.kind) == ("SYSTEM:GpuFallenOffBus", errors_pb2.ContainerError.RECOVERABLE)
    assert f"GPU 1 ({UUID}): rank 0 (" in error.message, "the first of those that CUDA shows it"


def test_ranks_start_again_where_that_may_help(warm, tmp_path: Path, environment) -> None:
    environment = {"TEST_HOW": "xid 94", **environment}
    ended = warm.run("job_gpus:one_fails_at_first", tmp_path / "job", environment=environment)
    assert ended.value == 1
    assert "rank 1 failed (Xid 94: " in ended.err


def test_ranks_are_not_started_again_on_a_gpu_that_needs_a_reset(warm, tmp_path: Path, environment) -> None:
    error = uploaded_error(failed(warm, tmp_path / "job", "xid 95", environment, "one_fails_at_first"))
    assert error.code == "SYSTEM:GpuEccError"
    assert "Not restarted in place: the same Xid 95: uncontained memory error would come again" in error.message


def test_a_hang_is_the_gpus_that_has_failed_whatever_its_rank_does(warm, tmp_path: Path, environment) -> None:
    error = uploaded_error(failed(warm, tmp_path / "job", "", environment, "one_waits_for_its_gpu"))
    assert error.code == "SYSTEM:GpuXidError"
    assert error.message.startswith(f"Xid 119: GSP RPC timeout, reported by GPU 1 ({UUID}): rank 1 ")
    assert "): the job does not move: rank 1 has a GPU that has failed" in error.message
    assert "[kind=gpu]" in error.message
    assert re.search(r"rank 0 \(1 of 2\) stands .*\n(    .*\n)*    GPU: 100% busy\n", error.message)
    [address] = re.findall(r"All stacks and connections of all ranks: (\S+)", error.message)
    evidence = Path(address).read_text()
    assert f"rank 1: GPU 1 ({UUID}) reported Xid 119: GSP RPC timeout" in evidence
    assert f"rank 1: GPU 1 ({UUID}): 0% busy" in evidence


class Range(Job):
    """Three pods of a range, each on a machine of its own with one GPU."""

    module = "job_gpus"
    nodes = "2:3"
    nproc_per_node = 1

    def start_on_a_machine(self, pod: int, directory: Path, driver: Path) -> Running:
        Gpus(directory / f"gpus-{pod}", 1)
        driver_of = {"TEST_NVML": str(directory / f"gpus-{pod}"), "TEST_NVML_LIBRARY": str(driver)}
        return self.start(pod, {**driver_of, "SAFEDIST_KUBERNETES_NODE": f"machine-{pod}"})


@pytest.mark.end('in a range (`nnodes="2:4"`), one machine is most likely at fault')
def test_a_range_goes_on_without_the_machine_whose_gpu_needs_a_reset(warm, tmp_path: Path, nvml_driver: Path) -> None:
    job = Range(warm, tmp_path, "a_range")
    host = job.start_on_a_machine(0, tmp_path, nvml_driver)
    until(job.listening, "the first pod listens")
    others = [job.start_on_a_machine(pod, tmp_path, nvml_driver) for pod in (1, 2)]
    first, second, sick = (pod.wait() for pod in (host, *others))
    assert uploaded_output(first) == "2 ranks in round 1, pod 0 is rank 0"
    assert (first.code, second.code, sick.code) == (0, 0, 0), sick.err
    assert re.search(
        r"restart 1 of 1, without the node on .*, Kubernetes node machine-2\), whose machine is most", first.err
    )
    assert "waiting until node 0 has uploaded" in sick.err, "nobody exits 0 before"
    assert "start again" in sick.err
