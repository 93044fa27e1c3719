"""What the default restart policies make of workers that fail: they come back, or their failing comes to an end.

docker plays the kubelet; the operator's part, to remove the other pods of a job that has failed, is the test's.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.container.cluster import Job, gated, until
from tests.procs import Gate


def test_a_worker_restarted_in_place_clears_up_after_itself_and_costs_no_restart_of_the_users(
    job: Callable[..., Job], pods_gate: Gate
) -> None:
    running = job("torch_2x2", steps=20, **gated(pods_gate))
    master, worker = running.pods
    for pod in (worker, master):
        pod.start()
    pods_gate.heard(4)
    (left,) = [path for volume in worker.directories for path in volume.glob("safedist-*")]

    worker.signal(signal.SIGKILL)
    pods_gate.heard(4)
    pods_gate.let_go(8)
    ended = [pod.wait() for pod in (master, worker)]
    until(lambda: worker.codes == (137, 0), "the worker's second run ends well")

    assert ended[0].codes == (0,)
    assert running.uploaded == ["outputs.pb"]
    assert running.output["round"] > 0
    assert "all ranks start again" not in master.log + worker.log, "that spends max_restarts"
    assert f"earlier run here that was killed: /var/run/safedist/scratch/{left.name}\n" in worker.log
    assert [path for volume in worker.directories for path in volume.glob("safedist-*")] == []


def test_what_fails_again_and_again_on_one_worker_ends_and_uploads_nothing(job: Callable[..., Job]) -> None:
    running = job("torch_2x2", steps=20)
    master, worker = running.pods
    worker.options += ("--env", "SAFEDIST_SCRATCH_ROOT=/nowhere")
    for pod in (worker, master):
        pod.start()

    until(lambda: not worker.runs, "the restarts that are allowed are used up")
    # backoff_limit: now the operator fails the job, and removes the pods that run.
    assert master.runs
    master.signal(signal.SIGTERM)
    ended = master.wait()

    assert worker.codes == (1,) * 7
    assert "the directory for scratch cannot be used" in worker.log
    assert "/nowhere" in worker.log
    assert ended.codes == (1,)
    assert running.uploaded == []


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_an_elastic_job_that_loses_its_stores_host_starts_anew_in_place(
    job: Callable[..., Job], pods_gate: Gate, backend: str
) -> None:
    running = job(f"{backend}_range", steps=20, **gated(pods_gate))
    for pod in running.pods:
        pod.start()
    pods_gate.heard(3)

    running.pods[0].signal(signal.SIGKILL)
    heard = pods_gate.heard(3)
    pods_gate.let_go(6)
    until(lambda: all(pod.codes[-1:] == (0,) for pod in running.pods), "every pod's last run ends well")

    assert {line.split(" round ")[0] for line in heard} == {"rank 0", "rank 1", "rank 2"}
    assert running.uploaded == ["outputs.pb"]
    assert running.output["size"] == 3
    assert running.pods[0].codes == (137, 0)
    assert all(len(pod.codes) == 2 and pod.codes[0] not in (0, 137) for pod in running.pods[1:])
