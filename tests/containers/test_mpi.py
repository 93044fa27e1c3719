"""An MPIJob: the launcher keeps one agent in each worker, and exits 0 when the attempt has its verdict."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.types import Mount
from flyteidl.core import errors_pb2, execution_pb2

from tests.containers.cluster import Job, Pod, gated
from tests.containers.engine import Docker, Options, until
from tests.containers.kube import Api, operated, operator_files, processes
from tests.harness.procs import Gate

BACKENDS = ["horovod", "torch"]


class MpiJob:
    """The pods of an MPIJob by their role, and the API through which the launcher reaches the workers."""

    def __init__(self, job: Job, api: Api | None) -> None:
        self.job = job
        self.api = api
        self.launcher, *self.workers = job.pods

    def start(self) -> None:
        for pod in reversed(self.job.pods):
            pod.start()

    def starts(self) -> list[int]:
        """How many agents each worker has seen start."""
        log = self.launcher.log
        return [log.count(f"[node {rank}] an agent starts") for rank in range(len(self.workers))]


@pytest.fixture
def mpi_job(job: Callable[..., Job]) -> Iterator[Callable[..., MpiJob]]:
    open_apis = []

    def make(backend: str, **how: Any) -> MpiJob:
        made = job(f"{backend}_mpi", steps=20, **how)
        context = operated(made)
        open_apis.append(context)
        return MpiJob(made, context.__enter__())

    yield make
    for context in open_apis:
        context.__exit__(None, None, None)


def idle(pod: Pod) -> bool:
    """Whether only the first process runs in a worker."""
    (*_, first) = running = processes(pod)
    return len(running) == 1 and first.endswith("safedist-mpi-launch --wait")


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_result_is_the_other_operators(
    job: Callable[..., Job], mpi_job: Callable[..., MpiJob], backend: str
) -> None:
    other = job(f"{backend}_2x2", steps=20)
    assert [pod.code for pod in other.run()] == [0, 0]

    running = mpi_job(backend)
    running.start()
    ended = running.launcher.wait()

    assert ended.code == 0
    assert running.job.uploaded == ["outputs.pb"]
    assert running.job.output == other.output
    assert running.starts() == [1, 1]
    # Nothing is left in its workers but what waits there, and that goes when the operator removes them.
    until(lambda: all(idle(pod) for pod in running.workers), "the agents have left")
    assert [pod.stop(grace=100).code for pod in running.workers] == [0, 0]


def test_a_user_exception_on_the_last_rank_is_the_one_error(mpi_job: Callable[..., MpiJob]) -> None:
    running = mpi_job("torch", environment={"TEST_HOW": "raise"})
    running.start()
    ended = running.launcher.wait()

    assert ended.code == 0
    assert running.job.uploaded == ["error.pb"]
    error = running.job.error
    assert error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
    assert "rank 3" in error.message
    assert "no learning rate" in error.message


def test_the_platforms_failure_is_uploaded_as_such_and_the_launcher_succeeds(mpi_job: Callable[..., MpiJob]) -> None:
    running = mpi_job("torch", environment={"TEST_HOW": "kill"})
    running.start()
    ended = running.launcher.wait()

    assert ended.code == 0
    assert running.job.uploaded == ["error.pb"]
    assert running.job.error.code == "SYSTEM:SIGKILL"


def test_sigterm_to_the_launcher_ends_every_agent_and_is_the_platforms_verdict(
    mpi_job: Callable[..., MpiJob], pods_gate: Gate
) -> None:
    running = mpi_job("torch", **gated(pods_gate))
    running.start()
    pods_gate.heard(4)

    running.launcher.signal(signal.SIGTERM)
    ended = running.launcher.wait()

    assert ended.codes == (0,), "the operator replaces no launcher, and reads no error.pb of one that failed"
    assert "received SIGTERM: passing it to 2 agents" in ended.log
    assert running.job.uploaded == ["error.pb"]
    error = running.job.error
    assert (error.code, error.kind) == ("SYSTEM:Stopped", errors_pb2.ContainerError.RECOVERABLE)
    assert error.origin == execution_pb2.ExecutionError.SYSTEM
    until(lambda: all(idle(pod) for pod in running.workers), "the agents have left")


def test_a_launcher_that_is_killed_is_started_in_place_and_finds_its_agents(
    mpi_job: Callable[..., MpiJob], pods_gate: Gate
) -> None:
    running = mpi_job("torch", **gated(pods_gate))
    running.start()
    pods_gate.heard(4)

    running.launcher.signal(signal.SIGKILL)
    running.launcher.says("an agent runs in this pod already")
    pods_gate.let_go(4)
    ended = running.launcher.wait(runs=2)

    assert ended.codes == (137, 0)
    assert running.job.uploaded == ["outputs.pb"]
    assert running.job.output["round"] == 0


def test_an_aborted_job_ends_its_ranks_though_the_launcher_may_not_reach_them_any_more(
    mpi_job: Callable[..., MpiJob], pods_gate: Gate
) -> None:
    running = mpi_job("torch", **gated(pods_gate))
    running.start()
    pods_gate.heard(4)

    running.api.allowed.clear()  # the role goes with the job
    running.launcher.signal(signal.SIGTERM)
    running.launcher.says("SIGTERM did not reach node 0 (")
    assert "is forbidden" in running.launcher.log
    assert [pod.stop(grace=100).code for pod in reversed(running.workers)] == [0, 0]
    assert all("SIGTERM: 1 agent(s) of this pod have ended" in pod.log for pod in running.workers)
    assert running.launcher.wait().code == 0
    assert running.job.uploaded == ["error.pb"]


def test_a_broken_connection_into_node_0_does_not_end_the_job(mpi_job: Callable[..., MpiJob], pods_gate: Gate) -> None:
    running = mpi_job("torch", **gated(pods_gate))
    running.start()
    pods_gate.heard(4)

    running.api.cut(running.workers[0].name)
    running.launcher.says("an agent runs in this pod already")
    pods_gate.let_go(4)
    ended = running.launcher.wait()

    assert ended.code == 0
    assert running.job.uploaded == ["outputs.pb"]
    assert running.job.output["round"] == 0
    assert running.starts() == [1, 1]


def test_a_worker_whose_container_is_killed_joins_again(mpi_job: Callable[..., MpiJob], pods_gate: Gate) -> None:
    running = mpi_job("torch", **gated(pods_gate))
    running.start()
    pods_gate.heard(4)

    running.workers[1].signal(signal.SIGKILL)
    heard = pods_gate.heard(4)
    assert {line.split(" of ")[0] for line in heard} == {f"rank {rank}" for rank in range(4)}
    pods_gate.let_go(8)  # what is left of the first round takes no harm from a word
    ended = running.launcher.wait()

    assert ended.code == 0
    assert running.job.uploaded == ["outputs.pb"]
    assert running.job.output["round"] > 0
    assert running.starts() == [1, 2]


def test_a_node_0_whose_pod_is_deleted_comes_back_at_another_address_and_the_others_find_it(
    mpi_job: Callable[..., MpiJob], pods_gate: Gate
) -> None:
    running = mpi_job("horovod", **gated(pods_gate))
    running.start()
    pods_gate.heard(4)
    lost, before = running.workers[0], running.workers[0].address

    assert lost.stop(grace=100).code == 0, "as Failed it would fail the job"
    assert lost.start().address != before
    heard = pods_gate.heard(4)
    assert not any("round 0" in line for line in heard)
    pods_gate.let_go(8)
    ended = running.launcher.wait()

    assert ended.code == 0
    assert running.job.uploaded == ["outputs.pb"]
    assert running.starts() == [2, 1], "the other's agent is the same, all the time"
    assert "now: the others are told" in ended.log


@pytest.fixture
def ssh_job(job: Callable[..., Job], mpi_image: str, tmp_path: Path) -> MpiJob:
    """A job whose workers are reached over ssh, set up as mpi-operator does it: an sshd in each, and one key for all.

    Not as Flyte does it: there the operator has workers sleep, whatever they are asked for, and brings kubectl.
    """
    made = job("horovod_mpi", steps=20)
    launcher, *workers = made.pods
    keys = tmp_path / "ssh"
    keys.mkdir()
    keys.chmod(0o777)
    generate = "ssh-keygen -q -t ed25519 -N '' -f /keys/id_rsa && cp /keys/id_rsa.pub /keys/authorized_keys"
    there = Options(mounts=(Mount("/keys", str(keys), type="bind"),), more={"network_mode": "none"})
    made_keys = launcher.docker.once(mpi_image, ("sh", "-c", generate), there)
    assert made_keys.returncode == 0, made_keys.stderr
    launcher.files, _ = operator_files(launcher.name, [pod.name for pod in workers])
    for pod in made.pods:
        pod.main["image"] = mpi_image
        mounted = (Mount("/home/flyte/.ssh", str(keys), type="bind", read_only=True),)
        pod.options += Options({"OMPI_MCA_plm_rsh_agent": ""}, mounted)
    for pod in workers:
        serve = "/usr/sbin/sshd -De -f /etc/ssh/safedist_sshd_config & exec safedist-mpi-launch --wait"
        pod.main["command"], pod.main["args"] = ["sh", "-c", serve], []
    return MpiJob(made, None)


def test_the_same_over_ssh_without_root(job: Callable[..., Job], ssh_job: MpiJob) -> None:
    other = job("horovod_2x2", steps=20)
    assert [pod.code for pod in other.run()] == [0, 0]

    ssh_job.start()
    ended = ssh_job.launcher.wait()

    assert ended.code == 0
    assert ssh_job.job.uploaded == ["outputs.pb"]
    assert ssh_job.job.output == other.output
    assert ssh_job.starts() == [1, 1]
    (user,) = {pod.container.exec_run(["id", "-u"]).output for pod in ssh_job.workers}
    assert user == b"1000\n"
    until(lambda: all(len(processes(pod)) == 2 for pod in ssh_job.workers), "the agents have left")


def test_no_key_is_in_the_image(docker: Docker, mpi_image: str) -> None:
    find = (
        "id -u; find / -xdev '(' -name 'ssh_host_*' -o -name 'id_*' -path '*ssh*' -o -name authorized_keys ')' -type f"
    )
    done = docker.once(mpi_image, ("sh", "-c", f"{find} 2>/dev/null"), Options(more={"network_mode": "none"}))
    assert done.stdout.split() == ["1000"]
