"""The launcher of an MPIJob: one agent in each worker, told who it is; one that exits 0 ends the job."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, execution_pb2

from flytekitplugins_safedist.container.mpi import launcher as at_work
from flytekitplugins_safedist.container.mpi import plan
from flytekitplugins_safedist.errors import JobInterruptedError, MpiLaunchError
from flytekitplugins_safedist.job.verdict import of_error
from tests.unit.container.mpi_cluster import LAUNCHER, PACKAGE, Cluster, says, script

AGENT = """
import json, os, pathlib, sys, time
rank = os.environ["SAFEDIST_MPI_NODE_RANK"]
seen = {name: value for name, value in os.environ.items() if name.startswith(("SAFEDIST_", "SECRET"))}
pathlib.Path(sys.argv[1], rank).write_text(json.dumps({"env": seen, "cwd": os.getcwd(), "argv": sys.argv[2:]}))
print("agent", rank, "is here")
while len(os.listdir(sys.argv[1])) < int(os.environ["SAFEDIST_MPI_NODES"]):
    time.sleep(0.01)  # the first that ends, ends the job
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(nodes: int = 1, over: str = "kubexec.sh", *, begun: bool = True) -> Cluster:
        made.append(Cluster(tmp_path, [f"j-worker-{rank}" for rank in range(nodes)], over=over))
        if begun:
            made[-1].begin()
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def word(tmp_path: Path) -> Path:
    """A FIFO that agents read: its end of file is the word to go on."""
    path = tmp_path / "word"
    os.mkfifo(path)
    return path


@pytest.fixture(params=["kubexec.sh", "ssh"])
def over(request: pytest.FixtureRequest) -> str:
    return request.param


def test_each_worker_gets_one_agent_that_knows_its_rank_and_where_to_meet(
    cluster: Callable[..., Cluster], over: str
) -> None:
    job = cluster(3, over)

    status, err = job.run(AGENT, str(job.out), "--flag", "two words", "$HOME")

    assert status == 0, err
    for rank in range(3):
        told = job.told(rank)
        assert told["env"]["SAFEDIST_MPI_NODE_RANK"] == str(rank)
        assert told["env"]["SAFEDIST_MPI_NODES"] == "3"
        assert told["env"]["SAFEDIST_MPI_ENDPOINT"] == "10.9.9.9:23456"
        assert told["env"]["SECRET_OF_WORKER"] == "w", "the environment is the worker's own"
        assert told["cwd"] == str(job.root)
        assert told["argv"] == ["--flag", "two words", "$HOME"]
        assert f"[node {rank}] an agent starts in this pod" in err
        assert f"agent {rank} is here\n" in job.log(job.hosts[rank])


def test_the_launcher_is_no_worker_even_if_the_hostfile_lists_it(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    text = (job.root / "hostfile").read_text()
    (job.root / "hostfile").write_text(f"j-launcher slots=1\n{text}{text}")

    assert job.run(AGENT, str(job.out))[0] == 0

    assert sorted(path.name for path in job.out.iterdir()) == ["0", "1"]


def test_the_number_of_workers_must_be_the_jobs(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2, begun=False)
    (job.root / "hostfile").write_text("j-worker-0 slots=1\n")

    status, err = job.run(AGENT)

    assert status == 1
    assert "seen: 1 workers (j-worker-0); expected: 2, one for each node" in err


def test_a_container_that_the_operator_did_not_prepare_says_so_in_one_line(tmp_path: Path) -> None:
    command = [*LAUNCHER, "--nodes", "2", "--", "safedist-execute"]

    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMPI_MCA_orte_default_hostfile": str(tmp_path / "missing")}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "put the primary container first in the pod template" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_ends_undecided_is_started_again_and_the_first_that_exits_0_ends_the_job(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, word: Path, rank: int
) -> None:
    monkeypatch.setattr(at_work, "_RETRY_SECONDS", 0.01)
    job = cluster(2)
    starts = job.out / "starts"
    # The first agent of one node is killed, its second one decides; the other node's waits until then.
    agent = (
        "import os, pathlib, signal\n"
        f"word = {str(word)!r}\n"
        f"if os.environ['SAFEDIST_MPI_NODE_RANK'] != '{rank}': open(word).read(); raise SystemExit\n"
        f"with open({str(starts)!r}, 'a') as file: file.write('x')\n"
        f"if os.path.getsize({str(starts)!r}) == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path(word).write_text('')"
    )
    said: list[str] = []

    at_work.run(job.launch(agent), say=said.append)

    assert starts.read_text() == "xx"
    assert f"node {rank}'s agent ended with status 137; it is started again in 0 s" in said


def test_a_failure_that_repeats_on_another_node_ends_within_a_budget(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, word: Path
) -> None:
    monkeypatch.setattr(at_work, "_RETRY_SECONDS", 0.0)
    job = cluster(2)
    starts = job.out / "starts"
    agent = (
        "import os\n"
        f"if os.environ['SAFEDIST_MPI_NODE_RANK'] == '0': open({str(word)!r}).read(); raise SystemExit\n"
        f"with open({str(starts)!r}, 'a') as file: file.write('x')\n"
        f"if os.path.getsize({str(starts)!r}) == 1 + 2 * 3: open({str(word)!r}, 'w').close()\n"
        "raise SystemExit(3)"
    )
    launch = job.launch(agent)
    assert launch.restarts == 2 * 10

    at_work.run(replace(launch, restarts=2 * 3), say=lambda _: None)

    assert len(starts.read_text()) == 1 + 2 * 3


def test_agents_that_end_undecided_again_and_again_end_the_job_as_a_lost_node(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_work, "_RETRY_SECONDS", 0.0)

    with pytest.raises(MpiLaunchError) as caught:
        at_work.run(replace(cluster().launch("raise SystemExit(7)"), restarts=2), say=lambda _: None)

    assert "node 0's agent ended with status 7: 2 restarts are used up" in str(caught.value)
    verdict = of_error(caught.value)
    assert verdict is not None
    assert verdict.code == "SYSTEM:NodeLost"


def test_a_worker_that_never_answers_is_named(tmp_path: Path) -> None:
    refuses = tmp_path / "kubexec.sh"
    script(refuses, "set -x; echo 'pods \"j-worker-0\" is forbidden' >&2; exit 1")
    hosts, reach = ("j-worker-0", "j-worker-1"), (str(refuses),)
    launch = plan.Launch(hosts=hosts, reach=reach, argv=("true",), deadline=0.0, restarts=0, grace=30.0)

    with pytest.raises(MpiLaunchError, match="every agent of this MPIJob has ended") as caught:
        at_work.run(launch, say=lambda _: None)

    assert "j-worker-0 cannot be reached by" in str(caught.value)
    assert '(pods "j-worker-0" is forbidden)' in str(caught.value)
    assert "pods/exec" in str(caught.value)
    assert "+ echo" not in str(caught.value), "the operator's script shows its commands"


STOPPED = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))\n"
    "with open({word!r}, 'w') as file: file.write('x')\n"
    "while True: signal.pause()"
)


def stopped(job: Cluster, word: Path, status: str) -> tuple[int, str]:
    """A launcher of two agents that is told to stop: its exit status, and what it said. Verdicts go to ``out``."""
    agent = STOPPED.format(status=status, word=str(word))
    launcher = job.start(agent, "pyflyte-execute", "--output-prefix", str(job.out), "--resolver")
    with word.open("r+b", buffering=0) as said:  # held, or one who reads to its end may have taken both
        assert sum(len(said.read(1) or b"") for _ in range(2)) == 2
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert "received SIGTERM: passing it to 2 agents" in err
    return launcher.returncode, err


@pytest.mark.end("the launcher's pod of an MPIJob is deleted")
def test_a_launcher_that_is_told_to_stop_uploads_that_as_the_platforms_verdict(
    cluster: Callable[..., Cluster], word: Path
) -> None:
    job = cluster(2)

    status, err = stopped(job, word, "143")

    assert status == 0, err
    error = errors_pb2.ErrorDocument.FromString((job.out / "error.pb").read_bytes()).error
    assert (error.code, error.kind) == ("SYSTEM:Stopped", errors_pb2.ContainerError.RECOVERABLE)
    assert error.origin == execution_pb2.ExecutionError.SYSTEM
    assert "the launcher of this MPIJob was told to stop by SIGTERM" in error.message
    assert [worker.poll() for worker in job.workers.values()] == [None, None], "workers leave when Kubernetes says so"


def test_a_launcher_that_is_told_to_stop_uploads_nothing_where_an_agent_still_decided(
    cluster: Callable[..., Cluster], word: Path
) -> None:
    job = cluster(2)

    status, err = stopped(job, word, "0 if os.environ['SAFEDIST_MPI_NODE_RANK'] == '0' else 1")

    assert status == 0, err
    assert list(job.out.iterdir()) == []


def test_a_launcher_that_is_told_to_stop_takes_no_outputs_back(cluster: Callable[..., Cluster], word: Path) -> None:
    job = cluster(2)
    (job.out / "outputs.pb").touch()

    status, err = stopped(job, word, "143")

    assert status == 0, err
    assert [path.name for path in job.out.iterdir()] == ["outputs.pb"]


def test_a_launcher_that_cannot_upload_its_verdict_exits_non_zero(cluster: Callable[..., Cluster], word: Path) -> None:
    job = cluster(2)
    job.out.rmdir()
    job.out.touch()

    status, err = stopped(job, word, "143")

    assert status == 137
    assert "the verdict cannot be uploaded" in err


def test_a_signal_before_the_workers_answer_is_the_verdict(cluster: Callable[..., Cluster]) -> None:
    job = cluster(begun=False)
    script(job.reach, "echo not yet >&2; exit 1")
    launcher = job.start("", "pyflyte-execute", "--output-prefix", str(job.out), "--resolver")
    says(launcher, "waiting for j-worker-0: not yet")

    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)

    assert launcher.returncode == 0, err
    assert [path.name for path in job.out.iterdir()] == ["error.pb"]


@pytest.mark.timeout(60)
def test_a_signal_that_does_not_wake_the_launcher_is_heard_all_the_same(cluster: Callable[..., Cluster]) -> None:
    """As one that comes just before it waits: here another thread of the process gets it."""
    job = cluster(begun=False)
    script(job.reach, "echo not yet >&2; exit 1")
    before = signal.getsignal(signal.SIGUSR1)

    def say(text: str) -> None:
        if text.startswith("waiting for j-worker-0"):
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    try:
        with pytest.raises(JobInterruptedError, match="told to stop by SIGUSR1"):
            at_work.run(job.launch(""), say=say, signals=(signal.SIGUSR1,))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_worker_that_may_not_be_signalled_any_more_is_named_with_the_reason(
    cluster: Callable[..., Cluster], word: Path
) -> None:
    job = cluster()
    launcher = job.start(f"open({str(word)!r}).read(); raise SystemExit(1)")
    says(launcher, "an agent starts in this pod")

    script(job.root / "refuses", "set -x; echo 'Error from server (Forbidden): no' >&2; echo more >&2; exit 1")
    (job.root / "refuses").replace(job.reach)
    launcher.send_signal(signal.SIGTERM)
    says(launcher, "SIGTERM did not reach node 0 (Error from server (Forbidden): no; more)")
    word.write_text("")
    _, err = launcher.communicate(timeout=60)

    assert launcher.returncode == 137, "these agents have no place for a verdict"
    assert "was told to stop by SIGTERM" in err


@pytest.mark.end("the launcher's container of an MPIJob is killed")
def test_a_launcher_that_starts_anew_finds_the_agent_that_runs(
    cluster: Callable[..., Cluster], word: Path, over: str
) -> None:
    job = cluster(1, over)
    agent = f"open({str(word)!r}).read()"
    first = job.start(agent)
    says(first, "an agent starts in this pod")

    first.kill()
    second = job.start(agent)
    says(second, "an agent runs in this pod already")
    word.write_text("")
    _, err = second.communicate(timeout=60)

    assert second.returncode == 0, err
    assert "an agent starts" not in err


def test_a_broken_connection_costs_neither_the_agent_nor_its_status(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, word: Path
) -> None:
    monkeypatch.setattr(at_work, "_RETRY_SECONDS", 0.01)
    job = cluster()
    started = subprocess.Popen.__init__
    connections: list[subprocess.Popen[str]] = []

    def seen(self: subprocess.Popen[str], *args: object, **how: object) -> None:
        started(self, *args, **how)  # type: ignore[call-overload]
        connections.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", seen)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "starts" in text:
            connections[-1].kill()
        if "already" in text:
            word.write_text("")

    # Without a budget: a connection is no agent.
    at_work.run(replace(job.launch(f"open({str(word)!r}).read()"), restarts=0), say=say)

    assert "[node 0] an agent runs in this pod already" in said


def test_a_worker_that_comes_back_gets_an_agent_though_no_restart_is_left(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, word: Path
) -> None:
    monkeypatch.setattr(at_work, "_RETRY_SECONDS", 0.01)
    job = cluster()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text == "[node 0] an agent starts in this pod" and said.count(text) == 1:
            job.workers["j-worker-0"].terminate()
            job.workers["j-worker-0"].wait(timeout=60)
            job.begin()
        elif "starts" in text:
            threading.Thread(target=word.write_text, args=("",)).start()

    at_work.run(replace(job.launch(f"open({str(word)!r}).read()"), restarts=0), say=say)

    assert said.count("[node 0] an agent starts in this pod") == 2


def test_the_others_are_told_where_node_0_is_when_it_comes_back_elsewhere(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    monkeypatch.setattr(at_work, "_RETRY_SECONDS", 0.01)
    job = cluster(2, over)
    there = job.root / "there"
    os.mkfifo(there)
    # Node 0's first agent waits until the other is there, and dies; the other says where it is told that node 0 is.
    agent = (
        "import os, pathlib, time\n"
        f"out, there = pathlib.Path({str(job.out)!r}), {str(there)!r}\n"
        "if os.environ['SAFEDIST_MPI_NODE_RANK'] == '0':\n"
        "    open(there).read()\n"
        "    if not (out / 'moved').exists(): (out / 'moved').touch(); raise SystemExit(1)\n"
        "    raise SystemExit\n"
        "node_0 = pathlib.Path(os.environ['SAFEDIST_MPI_NODE_0'])\n"
        "before = node_0.read_text()\n"
        "open(there, 'w').close()\n"
        "while node_0.read_text() == before: time.sleep(0.01)\n"
        "(out / 'told').write_text(node_0.read_text())\n"
        "open(there, 'w').close()"
    )
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "ended with status 1" in text:
            job.moves_node_0_to("10.9.9.10")

    at_work.run(job.launch(agent), say=say)

    assert (job.out / "told").read_text() == "10.9.9.10\n"
    assert "node 0 is j-worker-0 at 10.9.9.10 now: the others are told" in said
    assert said.count("[node 1] an agent starts in this pod") == 1
