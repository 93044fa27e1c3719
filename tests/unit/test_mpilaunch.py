"""The launcher of an MPIJob: one agent in each worker, told who it is; node 0's end is the job's end.

The way into the workers is a stand-in, as there is no cluster here: a script with the interface of the operator's
``kubexec.sh`` (``kubectl exec``) or of ``ssh``, which runs the command on this machine, in an environment like the
worker's. Everything else is real: the launcher and the agents are processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist import mpilaunch
from flytekitplugins_safedist.errors import MpiLaunchError

PACKAGE = Path(__file__).parents[2]
AGENT = """
import json, os, pathlib, sys
rank = os.environ["SAFEDIST_MPI_NODE_RANK"]
seen = {name: value for name, value in os.environ.items() if name.startswith(("SAFEDIST_", "SECRET", "OMPI", "NVIDIA"))}
pathlib.Path(sys.argv[1], rank).write_text(json.dumps({"env": seen, "cwd": os.getcwd(), "argv": sys.argv[2:]}))
print("agent", rank, "is here")
"""


class Cluster:
    """A launcher pod and its workers, on this machine."""

    def __init__(self, root: Path, hosts: list[str], *, over: str) -> None:
        self.root = root
        self.out = root / "out"
        self.out.mkdir()
        binaries = root / "bin"
        binaries.mkdir()
        self._script(binaries / "hostname", "echo 127.0.0.1 10.9.9.9")
        worker = (
            f"PATH={binaries}:$PATH SECRET_OF_WORKER=w" if over == "kubexec.sh" else f"-i PATH={binaries}:/usr/bin:/bin"
        )
        body = f'echo "$@" >> {root}/commands; host=$1; shift; exec env {worker} HOSTNAME=$host /bin/sh -c "$*"'
        self._script(root / over, body)
        self.hostfile = root / "hostfile"
        self.hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
        self.env = {
            **os.environ,
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
        program = "import sys; from flytekitplugins_safedist.cli import mpi_launch; sys.exit(mpi_launch())"
        command = ["--nodes", str(nodes), "--", sys.executable, "-c", agent, *args]
        return subprocess.Popen(
            [sys.executable, "-c", program, *command],
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

    def told(self, rank: int) -> dict[str, dict[str, str]]:
        return json.loads((self.out / str(rank)).read_text())


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
    assert "seen: 1 workers (j-worker-0); expected: 2, one for each node" in err


@pytest.mark.parametrize(("rank", "status"), [(0, 7), (1, 0)])
def test_node_0s_status_is_the_launchers(tmp_path: Path, rank: int, status: int) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")
    agent = f"import os, sys; sys.exit(7 if os.environ['SAFEDIST_MPI_NODE_RANK'] == '{rank}' else 0)"

    assert cluster.run(2, agent)[0] == status


def test_sigterm_reaches_the_agents(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ["j-worker-0", "j-worker-1"], over="kubexec.sh")
    agent = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + int(os.environ['SAFEDIST_MPI_NODE_RANK'])))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    launcher = cluster.start(2, agent)
    assert launcher.stdout is not None
    ready = {launcher.stdout.readline(), launcher.stdout.readline()}
    assert ready == {"[node 0] ready\n", "[node 1] ready\n"}

    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)

    assert launcher.returncode == 40
    assert "received SIGTERM: passing it to 2 agents" in err


def test_a_worker_that_never_answers_is_named(tmp_path: Path) -> None:
    script = tmp_path / "kubexec.sh"
    script.write_text("#!/bin/sh\necho 'pods \"j-worker-0\" is forbidden' >&2\nexit 1\n")
    script.chmod(0o755)
    launch = mpilaunch.Launch(
        hosts=("j-worker-0",),
        reach=(str(script),),
        argv=("true",),
        port=1,
        keeps_environment=True,
        environment={},
        cwd="/",
        deadline=0.0,
    )

    with pytest.raises(MpiLaunchError, match="a worker cannot be reached") as caught:
        mpilaunch.run(launch, say=lambda _: None)

    assert caught.value.where["host"] == "j-worker-0"
    assert 'pods "j-worker-0" is forbidden' in str(caught.value)
    assert "pods/exec" in str(caught.value)
