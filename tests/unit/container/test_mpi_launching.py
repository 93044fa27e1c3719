"""The launcher of an MPIJob: one agent in each worker, told who it is; one that exits 0 ends the job.

The way into the workers is a stand-in, as there is no cluster here: a script with the interface of the operator's
``kubexec.sh`` (``kubectl exec``) or of ``ssh``, which runs the command on this machine, in an environment like the
worker's. Everything else is real: the launcher and the agents are processes.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from flyteidl.core import errors_pb2, execution_pb2

from flytekitplugins_safedist.container.mpi import launching, supervisor, worker_agent
from flytekitplugins_safedist.errors import MpiLaunchError
from flytekitplugins_safedist.job.verdict import of_error

PACKAGE = Path(__file__).parents[3]
AGENT = """
import json, os, pathlib, sys
rank = os.environ["SAFEDIST_MPI_NODE_RANK"]
seen = {name: value for name, value in os.environ.items() if name.startswith(("SAFEDIST_", "SECRET", "OMPI", "NVIDIA"))}
pathlib.Path(sys.argv[1], rank).write_text(json.dumps({"env": seen, "cwd": os.getcwd(), "argv": sys.argv[2:]}))
print("agent", rank, "is here")
"""


class Cluster:
    """A launcher pod and its workers, on this machine."""

    name: str

    def __init__(self, root: Path, hosts: list[str], *, over: str) -> None:
        self.hosts = [f"{self.name}-{host}" for host in hosts]
        self.root = root
        self.out = root / "out"
        self.out.mkdir()
        binaries = root / "bin"
        binaries.mkdir()
        self._script(binaries / "hostname", "echo 127.0.0.1 10.9.9.9")
        program = "import sys; from flytekitplugins_safedist.tools.cli import mpi_launch; sys.exit(mpi_launch())"
        self.launcher = [sys.executable, "-c", program]
        self._script(binaries / "safedist-mpi-launch", f'exec {shlex.join(self.launcher)} "$@"')
        worker = (
            f"PATH={binaries}:$PATH PYTHONPATH={PACKAGE} SECRET_OF_WORKER=w"
            if over == "kubexec.sh"
            else f"-i PATH={binaries}:/usr/bin:/bin"
        )
        body = f'echo "$@" >> {root}/commands; host=$1; shift; exec env {worker} /bin/sh -c "$*"'
        self._script(root / over, body)
        self.hostfile = root / "hostfile"
        self.hostfile.write_text("".join(f"{host} slots=1\n" for host in self.hosts))
        self.env = {
            **os.environ,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(PACKAGE),
            "OMPI_MCA_plm_rsh_agent": str(root / over),
            "OMPI_MCA_orte_default_hostfile": str(self.hostfile),
            "NVIDIA_VISIBLE_DEVICES": "",
            "SECRET_TOKEN": "hunter2",
        }

    @staticmethod
    def _script(path: Path, body: str) -> None:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def start(self, nodes: int, agent: str, *args: str) -> subprocess.Popen[str]:
        command = ["--nodes", str(nodes), "--", sys.executable, "-c", agent, *args]
        return subprocess.Popen(
            [*self.launcher, *command],
            env=self.env,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, nodes: int, agent: str, *args: str) -> tuple[int, str, str]:
        launcher = self.start(nodes, agent, *args)
        out, err = launcher.communicate(timeout=120)
        return launcher.returncode, out, err

    def launch(self, agent: str) -> launching.Launch:
        """For a launcher in this very process."""
        return launching.plan(
            [sys.executable, "-c", agent],
            nodes=len(self.hosts),
            hostfile=self.hostfile.read_text(),
            me="",
            environment=self.env,
            cwd=str(self.root),
        )

    def told(self, rank: int) -> dict[str, dict[str, str]]:
        return json.loads((self.out / str(rank)).read_text())


@pytest.fixture(autouse=True)
def own_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hosts that no other test has: in a pod /tmp, where an agent leaves its mark, is the pod's own; here it is not."""
    monkeypatch.setattr(Cluster, "name", uuid.uuid4().hex, raising=False)
    yield
    for mark in Path("/tmp").glob(f"safedist-agent-{Cluster.name}-*"):
        mark.unlink()


@pytest.fixture(params=["kubexec.sh", "ssh"])
def over(request: pytest.FixtureRequest) -> str:
    return request.param


def test_each_worker_gets_one_agent_that_knows_its_rank_and_where_to_meet(tmp_path: Path, over: str) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1", "j-worker-2"], over=over)

    status, out, err = cluster.run(3, AGENT, str(cluster.out), "--flag", "two words", "$HOME")

    assert status == 0, err
    for rank in range(3):
        told = cluster.told(rank)
        assert told["env"]["SAFEDIST_MPI_NODE_RANK"] == str(rank)
        assert told["env"]["SAFEDIST_MPI_NODES"] == "3"
        assert told["env"]["SAFEDIST_MPI_ENDPOINT"] == "10.9.9.9:23456"
        assert told["cwd"] == str(tmp_path)
        assert told["argv"] == ["--flag", "two words", "$HOME"]
        assert f"[node {rank}] agent {rank} is here\n" in out


def test_a_session_of_ssh_gets_the_environment_without_showing_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over="ssh")

    assert cluster.run(1, AGENT, str(cluster.out))[0] == 0

    told = cluster.told(0)["env"]
    assert told["SECRET_TOKEN"] == "hunter2"
    # The operator blanks the GPUs of the launcher: that is no word about the worker's.
    assert not any(name.startswith(("NVIDIA", "OMPI")) for name in told)
    assert "hunter2" not in (tmp_path / "commands").read_text()


def test_kubectl_exec_keeps_the_workers_own_environment(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")

    assert cluster.run(1, AGENT, str(cluster.out))[0] == 0

    assert cluster.told(0)["env"]["SECRET_OF_WORKER"] == "w"


def test_the_launcher_is_no_worker_even_if_the_hostfile_lists_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-launcher", "j-worker-0", "j-worker-1", "j-worker-1"], over="kubexec.sh")

    assert cluster.run(2, AGENT, str(cluster.out))[0] == 0

    assert sorted(path.name for path in cluster.out.iterdir()) == ["0", "1"]


def test_the_number_of_workers_must_be_the_jobs(tmp_path: Path) -> None:
    status, _, err = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh").run(2, AGENT)

    assert status == 1
    assert "seen: 1 workers (" in err
    assert "j-worker-0); expected: 2, one for each node" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_ends_undecided_is_started_again_and_the_first_that_exits_0_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.0)
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")
    word, starts = tmp_path / "word", cluster.out / "starts"
    os.mkfifo(word)
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

    supervisor.run(cluster.launch(agent), say=said.append)

    assert starts.read_text() == "xx"
    assert f"node {rank}'s agent ended with status 137; it is started again in 0 s" in said


STOPPED = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))\n"
    "print('ready', flush=True)\n"
    "while True: signal.pause()"
)


def stopped(cluster: Cluster, agent: str) -> tuple[int, str]:
    """A launcher of two agents that is told to stop: its exit status, and what it said. Verdicts go to ``out``."""
    launcher = cluster.start(2, agent, "pyflyte-execute", "--output-prefix", str(cluster.out), "--resolver")
    assert launcher.stdout is not None
    assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[node 0] ready\n", "[node 1] ready\n"}
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert "received SIGTERM: passing it to 2 agents" in err
    return launcher.returncode, err


@pytest.mark.end("the launcher's pod of an MPIJob is deleted")
def test_a_launcher_that_is_told_to_stop_uploads_that_as_the_platforms_verdict(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")

    status, err = stopped(cluster, STOPPED.format(status=143))

    assert status == 0, err
    error = errors_pb2.ErrorDocument.FromString((cluster.out / "error.pb").read_bytes()).error
    assert (error.code, error.kind) == ("SYSTEM:Stopped", errors_pb2.ContainerError.RECOVERABLE)
    assert error.origin == execution_pb2.ExecutionError.SYSTEM
    assert "the launcher of this MPIJob was told to stop by SIGTERM" in error.message


def test_a_launcher_that_is_told_to_stop_uploads_nothing_where_an_agent_still_decided(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")

    status, err = stopped(cluster, STOPPED.format(status="0 if os.environ['SAFEDIST_MPI_NODE_RANK'] == '0' else 1"))

    assert status == 0, err
    assert list(cluster.out.iterdir()) == []


def test_a_launcher_that_is_told_to_stop_takes_no_outputs_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")
    (cluster.out / "outputs.pb").touch()

    status, err = stopped(cluster, STOPPED.format(status=143))

    assert status == 0, err
    assert [path.name for path in cluster.out.iterdir()] == ["outputs.pb"]


def test_a_launcher_that_cannot_upload_its_verdict_exits_non_zero(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")
    cluster.out.rmdir()
    cluster.out.touch()

    status, err = stopped(cluster, STOPPED.format(status=143))

    assert status == 137
    assert "the verdict cannot be uploaded" in err


FIRST_PROCESS = (
    # blocked before it says that it waits: a signal in between would end it, as it ends no first process of a container
    "import signal, sys; from flytekitplugins_safedist import log; log.install(); "
    "from flytekitplugins_safedist.container.mpi.worker_pod import wait; "
    "signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}}); print('waits', flush=True); sys.exit(wait({!r}))"
)


def first_process(cluster: Cluster) -> subprocess.Popen[str]:
    """What every worker pod starts with. In a pod it sees the pod's processes; here, those of this test's workers."""
    program = FIRST_PROCESS.format(f"{launching.RECORD}{cluster.name}")
    started = subprocess.Popen(
        [sys.executable, "-c", program], env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "waits\n"
    return started


LEAVES_IN_ORDER = (
    "import pathlib, signal, sys\n"
    "def leave(*_):\n"
    "    pathlib.Path(sys.argv[1], 'left').touch()\n"
    "    sys.exit(41)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('ready', flush=True)\n"
    "while True: signal.pause()"
)


def test_a_worker_that_is_told_to_stop_ends_its_agent_and_then_itself(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")
    pod = first_process(cluster)
    launcher = cluster.start(1, LEAVES_IN_ORDER, str(cluster.out))
    ready(launcher)

    pod.send_signal(signal.SIGTERM)
    _, err = pod.communicate(timeout=60)

    assert pod.returncode == 0, "a worker that is Failed fails the job, one that is gone is made anew"
    assert (cluster.out / "left").exists()
    assert "SIGTERM: passing it to the agent" in err
    assert "SIGTERM: 1 agent(s) of this pod have ended" in err
    launcher.kill()  # it would start the agent again, for which the pod is made anew
    launcher.communicate(timeout=60)


def test_a_worker_without_an_agent_leaves_at_once(tmp_path: Path) -> None:
    pod = first_process(Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh"))
    pod.send_signal(signal.SIGTERM)
    _, err = pod.communicate(timeout=60)
    assert pod.returncode == 0
    assert "0 agent(s)" in err


def test_a_worker_that_may_not_be_signalled_any_more_is_named_with_the_reason(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")
    reach = Path(cluster.env["OMPI_MCA_plm_rsh_agent"])
    pod = first_process(cluster)
    launcher = cluster.start(1, LEAVES_IN_ORDER, str(cluster.out))
    ready(launcher)

    cluster._script(reach, "set -x; echo 'Error from server (Forbidden): no' >&2; echo more >&2; exit 1")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.stderr is not None
    assert any(
        "SIGTERM did not reach node 0 (Error from server (Forbidden): no; more)" in line for line in launcher.stderr
    )
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=60)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 137, "these agents have no place for a verdict"
    assert "was told to stop by SIGTERM" in err


@pytest.fixture
def word(tmp_path: Path) -> Path:
    """A FIFO that agents read: its end of file is the word to go on."""
    path = tmp_path / "word"
    os.mkfifo(path)
    return path


def ready(launcher: subprocess.Popen[str]) -> None:
    """Wait for an agent to be there."""
    assert launcher.stdout is not None
    assert any(" ready" in line for line in launcher.stdout), "no agent came"


@pytest.mark.end("the launcher's container of an MPIJob is killed")
def test_a_launcher_that_starts_anew_finds_the_agent_that_runs(tmp_path: Path, word: Path, over: str) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over=over)
    agent = f"print('ready', flush=True); open({str(word)!r}).read()"
    first = cluster.start(1, agent)
    ready(first)

    first.kill()
    second = cluster.start(1, agent)
    assert second.stdout is not None
    assert "an agent runs in this pod already" in second.stdout.readline()
    word.write_text("")
    out, err = second.communicate(timeout=60)

    assert second.returncode == 0, err
    assert "ready" not in out
    first.communicate(timeout=60)


def test_an_agent_that_outlives_its_keeper_is_still_the_only_one(
    tmp_path: Path, word: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.0)
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")
    starts = cluster.out / "starts"
    # The first agent kills its keeper, and lives on until the second one is asked for.
    agent = (
        "import os, signal\n"
        f"with open({str(starts)!r}, 'a') as file: file.write('x')\n"
        f"if os.path.getsize({str(starts)!r}) > 1: raise SystemExit\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        f"open({str(word)!r}).read()\n"
    )
    said: list[str] = []

    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            if "an agent runs in this pod already" in text:
                assert starts.read_text() == "x"
                word.write_text("")
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Shown())

    supervisor.run(cluster.launch(agent), say=said.append)

    assert starts.read_text() == "xx", "nobody knows how the first ended: another one finds out"
    assert "node 0's agent ended with status 1; it is started again in 0 s" in said


def test_a_broken_connection_costs_neither_the_agent_nor_its_status(tmp_path: Path, word: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")
    # More than a pipe holds: an agent must not hang because nobody reads.
    many = "sys.stdout.write('x' * (1 << 20))"
    agent = f"import sys; print('ready', flush=True); open({str(word)!r}).read(); {many}"
    # As with kubectl, what the worker writes comes through a process that can be killed without it.
    reach = cluster.root / "kubexec.sh"
    reach.write_text(reach.read_text().replace("exec env", "env").rstrip() + " 2>&1 | cat\n")
    launcher = cluster.start(1, agent)
    ready(launcher)
    (script,) = psutil.Process(launcher.pid).children()
    for process in [script, *(one for one in script.children() if one.name() == "cat")]:
        process.kill()

    assert launcher.stdout is not None
    assert any("an agent runs in this pod already" in line for line in launcher.stdout)
    word.write_text("")
    _, err = launcher.communicate(timeout=60)

    assert launcher.returncode == 0
    assert "node 0's agent ended with no message of its own" in err


def test_a_worker_that_never_answers_is_named(tmp_path: Path) -> None:
    script = tmp_path / "kubexec.sh"
    script.write_text("#!/bin/sh\necho 'pods \"j-worker-0\" is forbidden' >&2\nexit 1\n")
    script.chmod(0o755)
    launch = launching.Launch(
        hosts=("j-worker-0", "j-worker-1"),
        reach=(str(script),),
        argv=("true",),
        port=1,
        keeps_environment=True,
        environment={},
        cwd="/",
        deadline=0.0,
    )

    with pytest.raises(MpiLaunchError, match="every agent of this MPIJob has ended") as caught:
        supervisor.run(launch, say=lambda _: None)

    assert "a worker cannot be reached [host=j-worker-0" in str(caught.value)
    assert 'pods "j-worker-0" is forbidden' in str(caught.value)
    assert "pods/exec" in str(caught.value)


def test_a_failure_that_repeats_on_another_node_ends_within_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.0)
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")
    word, starts = tmp_path / "word", cluster.out / "starts"
    os.mkfifo(word)
    agent = (
        "import os\n"
        f"if os.environ['SAFEDIST_MPI_NODE_RANK'] == '0': open({str(word)!r}).read(); raise SystemExit\n"
        f"with open({str(starts)!r}, 'a') as file: file.write('x')\n"
        "raise SystemExit(3)"
    )

    def say(text: str) -> None:
        if "are used up" in text:
            word.write_text("")  # node 0's own deadline, in the test's hands

    launch = cluster.launch(agent)
    assert launch.restarts == 2 * 10
    supervisor.run(replace(launch, restarts=2 * 3), say=say)
    assert len(starts.read_text()) == 1 + 2 * 3


def test_agents_that_end_undecided_again_and_again_end_the_job_as_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.0)
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")

    with pytest.raises(MpiLaunchError) as caught:
        supervisor.run(replace(cluster.launch("raise SystemExit(7)"), restarts=2), say=lambda _: None)

    assert "2 restarts are used up" in str(caught.value)
    verdict = of_error(caught.value)
    assert verdict is not None
    assert verdict.code == "SYSTEM:NodeLost"


def test_the_others_are_told_where_node_0_is_when_it_comes_back_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.0)
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over=over)
    hostname = tmp_path / "bin" / "hostname"
    there = tmp_path / "there"
    os.mkfifo(there)
    # Node 0's first agent waits for the other, moves away, and dies; the other says where it is told that node 0 is.
    agent = (
        "import os, pathlib, time\n"
        f"out, there = pathlib.Path({str(cluster.out)!r}), {str(there)!r}\n"
        "if os.environ['SAFEDIST_MPI_NODE_RANK'] == '0':\n"
        "    if (out / 'moved').exists(): open(there).read(); raise SystemExit\n"
        "    (out / 'moved').touch()\n"
        f"    pathlib.Path(open(there).read()).write_text('#!/bin/sh\\necho 10.9.9.10\\n')\n"
        "    raise SystemExit(1)\n"
        f"open(there, 'w').write({str(hostname)!r})\n"
        "while not os.path.exists(os.environ['SAFEDIST_MPI_NODE_0']): time.sleep(0.01)\n"
        "(out / 'told').write_text(open(os.environ['SAFEDIST_MPI_NODE_0']).read())\n"
        "open(there, 'w').close()"
    )
    said: list[str] = []

    supervisor.run(cluster.launch(agent), say=said.append)

    assert (cluster.out / "told").read_text() == "10.9.9.10\n"
    assert f"node 0 is {cluster.hosts[0]} at 10.9.9.10:23456 now: the others are told" in said


def test_a_signal_before_the_workers_answer_is_the_verdict(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0"], over="kubexec.sh")
    (cluster.root / "kubexec.sh").write_text("#!/bin/sh\necho not yet >&2\nexit 1\n")
    launcher = cluster.start(1, "", "pyflyte-execute", "--output-prefix", str(cluster.out), "--resolver")
    assert launcher.stderr is not None
    assert "not yet" in launcher.stderr.readline()

    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)

    assert launcher.returncode == 0, err
    assert [path.name for path in cluster.out.iterdir()] == ["error.pb"]


def test_output_that_nobody_reads_is_dropped_and_what_is_read_again_is_shown() -> None:
    reader, writer = os.pipe()
    sink = worker_agent.Sink(writer, patience=0.0)
    block = b"x" * 4095 + b"\n"
    held = 0
    while len(worker_agent.select.select([], [writer], [], 0)[1]):
        sink.write(block)
        held += 1
    sink.write(b"lost\n")
    for _ in range(held):
        os.read(reader, 4096)

    sink.write(b"and here again")
    sink.say("done")

    assert os.read(reader, 4096) == b"and here again\ndone\n"
    os.close(reader)
    sink.say("EPIPE is no reason to end")
    os.close(writer)


def test_a_container_that_the_operator_did_not_prepare_says_so_in_one_line(tmp_path: Path) -> None:
    program = "import sys; from flytekitplugins_safedist.tools.cli import mpi_launch; sys.exit(mpi_launch())"
    missing = str(tmp_path / "hostfile")
    command = [sys.executable, "-c", program, "--nodes", "2", "--hostfile", missing, "--", "safedist-execute"]

    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "put the primary container first in the pod template" in done.stderr
