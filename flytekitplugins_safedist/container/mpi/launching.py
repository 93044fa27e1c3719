"""``safedist-mpi-launch``: the command of an MPIJob's launcher pod. Starts one agent in each worker pod.

Neither ``mpirun`` nor ``horovodrun``: the number of slots that the operator writes down is always 1, whatever the task
asked for (Flyte drops ``slots``), nobody would tell the agents where node 0 is, and the pods of an MPIJob have no
services whose names could be guessed (training-operator v1.9.0, ``mpijob_controller.go``, GetServicesForJob). What is
used is what the operator gives every launcher: the list of workers in the hostfile, and the command that reaches them,
``$OMPI_MCA_plm_rsh_agent``: ``kubectl exec`` in a script, or ``ssh`` where that variable is not set.

This module decides; :mod:`~flytekitplugins_safedist.container.mpi.supervisor` carries it out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import envvars, stopping
from ...config.options import DEFAULT_REPLACEMENTS
from ...config.registered import Registered, grace_pinned, replacements_pinned
from ...errors import MpiLaunchError
from ...topology import DEFAULT_PORT

HOSTFILE_VARIABLE = "OMPI_MCA_orte_default_hostfile"
REACH_VARIABLE = "OMPI_MCA_plm_rsh_agent"
"""What the operator tells Open MPI in the launcher pod (mpijob_controller.go, newLauncher)."""
DEFAULT_HOSTFILE = "/etc/mpi/hostfile"
DEADLINE_SECONDS = 900.0
LAUNCHER = "safedist-mpi-launch"
RECORD = "/tmp/safedist-agent-"  # noqa: S108  (private: its mode is 0600, no link is followed)
"""How the file of :func:`.worker_agent.work` begins, in the worker's own file system; the host's name follows."""
_NOT_THE_WORKERS = ("OMPI_", "I_MPI_", "NVIDIA_", "HOSTNAME", "HOME", "PWD", "OLDPWD", "SHLVL", "SSH_", "_")
"""Of the launcher's own pod, or blanked in it by the operator (NVIDIA_VISIBLE_DEVICES): never handed to a worker."""
_ADOPT = (
    "import json,os,sys;order=json.loads(sys.stdin.readline());os.environ.update(order['env']);os.chdir(order['cwd']);"
    "os.execvp(order['argv'][0],order['argv'])"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to do.

    Attributes:
        hosts: the workers; a host's place is its node rank.
        reach: the command that runs a shell command on a host: ``reach HOST COMMAND``.
        argv: the agent's command.
        port: on which the agents meet at node 0.
        keeps_environment: a command run through *reach* has the worker container's environment (``kubectl exec``);
            else (``ssh``) it is sent over the standard input, where neither ``ps`` nor a log sees it.
        environment: of this pod.
        cwd: where the agent starts.
        deadline: seconds for a worker to answer.
        restarts: agents of lost workers that are started again, in the whole job.
        grace: seconds between SIGTERM and SIGKILL.
    """

    hosts: tuple[str, ...]
    reach: tuple[str, ...]
    argv: tuple[str, ...]
    port: int
    keeps_environment: bool
    environment: Mapping[str, str]
    cwd: str
    deadline: float = DEADLINE_SECONDS
    restarts: int = DEFAULT_REPLACEMENTS
    grace: float = stopping.GRACE_SECONDS

    def identity(self, node_rank: int, address: str) -> dict[str, str]:
        """What tells an agent which node it is (read by :mod:`~flytekitplugins_safedist.topology`)."""
        host = f"[{address}]" if ":" in address else address
        return {
            envvars.MPI_NODE_RANK: str(node_rank),
            envvars.MPI_NODES: str(len(self.hosts)),
            envvars.MPI_ENDPOINT: f"{host}:{self.port}",
            envvars.MPI_NODE_0: self._node_0(node_rank),
        }

    def record(self, node_rank: int) -> str:
        """The file of :func:`.worker_agent.work`, in the worker's own file system."""
        return f"{RECORD}{self.hosts[node_rank]}"

    def agent(self, node_rank: int, address: str) -> tuple[str, str | None]:
        """The shell command that runs a node's agent, or waits for the one that runs there already, and what it reads
        from its standard input."""
        identity = self.identity(node_rank, address)
        worker = [LAUNCHER, "--worker", self.record(node_rank), "--", *self.argv]
        if self.keeps_environment:
            variables = [f"{name}={value}" for name, value in identity.items()]
            return f"cd {shlex.quote(self.cwd)} && exec {shlex.join(['env', *variables, *worker])}", None
        order = {"env": {**_for_workers(self.environment), **identity}, "cwd": self.cwd, "argv": worker}
        # The same image, so the same interpreter; PATH is not known yet in a session of sshd.
        return f"exec {shlex.join([sys.executable, '-c', _ADOPT])}", json.dumps(order) + "\n"

    def signal(self, node_rank: int, name: str) -> str:
        """The shell command that signals a node's agent: killing ``kubectl exec`` or ``ssh`` would leave it running."""
        return f"read pid < {self.record(node_rank)} && kill -{name} $pid"

    def moved(self, node_rank: int, address: str) -> str:
        """The shell command that tells a node's agent where node 0 is now."""
        file = shlex.quote(self._node_0(node_rank))
        return f"echo {shlex.quote(address)} > {file}.new && mv {file}.new {file}"

    def _node_0(self, node_rank: int) -> str:
        return f"{self.record(node_rank)}.node-0"


def read_hostfile(path: Path) -> str:
    """The hostfile that the operator gives to the first container of a launcher pod.

    Raises:
        MpiLaunchError: there is none: this container is no launcher, or not the first of its pod.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MpiLaunchError(
            "this container has no list of workers",
            where={"hostfile": path},
            seen="no such file",
            expected="the first container of an MPIJob's launcher pod",
            hint="put the primary container first in the pod template: the operator prepares the first container of a "
            "pod, and starts the task's command in every worker when that is another",
        ) from error


def plan(
    argv: Sequence[str], *, nodes: int, hostfile: str, me: str, environment: Mapping[str, str], cwd: str
) -> Launch:
    """Decide the launch.

    Args:
        argv: the agent's command.
        nodes: how many agents the job has.
        hostfile: the operator's text: ``HOST slots=1``, a line for each worker.
        me: this host, which the operator lists too when the launcher holds a GPU.
        environment: of this pod.
        cwd: of this process.

    Raises:
        MpiLaunchError: the hostfile does not name that many workers.
    """
    named = [line.split()[0] for line in hostfile.splitlines() if line.strip() and not line.startswith("#")]
    hosts = [host for host in dict.fromkeys(named) if host != me and not host.endswith("-launcher")]
    if len(hosts) != nodes:
        raise MpiLaunchError(
            "the operator's hostfile does not name the workers of this job",
            seen=f"{len(hosts)} workers ({', '.join(hosts) or 'none'})",
            expected=f"{nodes}, one for each node",
            hint="register the task again: nodes and the MPIJob's worker replicas must agree",
        )
    reach = shlex.split(environment.get(REACH_VARIABLE) or "ssh -o BatchMode=yes -o StrictHostKeyChecking=no")
    registered = Registered.from_env(environment)
    return Launch(
        hosts=tuple(hosts),
        reach=tuple(reach),
        argv=tuple(argv),
        port=DEFAULT_PORT,
        keeps_environment=Path(reach[0]).name != "ssh",
        environment=environment,
        cwd=cwd,
        deadline=DEADLINE_SECONDS if registered is None else registered.timeouts.rendezvous,
        # As many as containers may be restarted in a PyTorchJob: never fewer than the job's own budget allows.
        restarts=nodes * replacements_pinned(environment),
        grace=grace_pinned(environment),
    )


def _for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not any(_matches(name, pattern) for pattern in _NOT_THE_WORKERS)
    }


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or (len(pattern) > 1 and pattern.endswith("_") and name.startswith(pattern))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line: ``--nodes N -- AGENT...``; in a worker ``--wait``; ``--worker FILE -- AGENT...``."""
    parser = argparse.ArgumentParser(prog=LAUNCHER, description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--nodes", type=int, help="start one agent in each of so many workers")
    where.add_argument("--worker", type=Path, metavar="FILE", help="the launcher's: run this pod's agent, once")
    where.add_argument("--wait", action="store_true", help="a worker's first process: leave with the agents")
    parser.add_argument("--hostfile", type=Path, help="default: what the operator says, or /etc/mpi/hostfile")
    parser.add_argument("agent", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    options.agent = options.agent[1:] if options.agent[:1] == ["--"] else options.agent
    if not options.agent and not options.wait:
        parser.error("the agent's command is missing")
    return options
