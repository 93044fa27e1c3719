"""``safedist-mpi-launch``: what the launcher pod of an MPIJob is to do.

Neither ``mpirun`` nor ``horovodrun``: the number of slots that the operator writes down is always 1, whatever the task
asked for (Flyte drops ``slots``), nobody would tell the agents where node 0 is, and the pods of an MPIJob have no
services whose names could be guessed (training-operator v1.9.0, ``mpijob_controller.go``, GetServicesForJob). What is
used is what the operator gives every launcher: the list of workers in the hostfile, and the command that reaches them,
``$OMPI_MCA_plm_rsh_agent``: ``kubectl exec`` in a script, or ``ssh`` where that variable is not set.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import envvars
from ...config.options import DEFAULT_REPLACEMENTS, Timeouts
from ...config.registered import Registered, grace_pinned
from ...errors import MpiLaunchError
from ...topology import DEFAULT_PORT

_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
_REACH = "OMPI_MCA_plm_rsh_agent"
"""What the operator tells Open MPI in the launcher pod (mpijob_controller.go, newLauncher)."""
LAUNCHER = "safedist-mpi-launch"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to do.

    Attributes:
        hosts: the workers; a host's place is its node rank.
        reach: the command that runs a shell command on a host: ``reach HOST COMMAND``.
        argv: the agent's command.
        deadline: seconds for a worker to answer.
        restarts: agents that are started again after they ended undecided, in the whole job.
        grace: seconds between SIGTERM and SIGKILL.
    """

    hosts: tuple[str, ...]
    reach: tuple[str, ...]
    argv: tuple[str, ...]
    deadline: float
    restarts: int
    grace: float

    def agent(self, node_rank: int, node_0: str, found: float) -> list[str]:
        """The command that has a worker run its agent, or wait for the one that runs there (:func:`.worker.hand_over`).

        Args:
            node_rank: of the worker.
            node_0: where node 0 is; it finds that out for itself.
            found: when that was found: the newest counts.
        """
        return self._order(
            node_rank,
            argv=self.argv,
            env={envvars.MPI_NODE_RANK: str(node_rank), envvars.MPI_NODES: str(len(self.hosts))},
            port=DEFAULT_PORT,
            node_0=node_0 if node_rank else "",
            found=found,
        )

    def signal(self, node_rank: int, number: int) -> list[str]:
        """The command that signals a worker's agent."""
        return self._order(node_rank, signal=number)

    def _order(self, node_rank: int, **order: object) -> list[str]:
        # A session of ssh does not know the image's PATH.
        path = f"PATH=$PATH:{shlex.quote(str(Path(sys.executable).parent))}"
        command = f"{path}; exec {shlex.join([LAUNCHER, '--order', json.dumps(order)])}"
        return [*self.reach, self.hosts[node_rank], command]


def plan(argv: Sequence[str], *, nodes: int, environment: Mapping[str, str]) -> Launch:
    """Decide the launch.

    Args:
        argv: the agent's command.
        nodes: how many agents the job has.
        environment: of this pod.

    Raises:
        MpiLaunchError: there is no hostfile, or it does not name that many workers.
    """
    hostfile = _read_hostfile(Path(environment.get(_HOSTFILE, "/etc/mpi/hostfile")))
    named = [line.split()[0] for line in hostfile.splitlines() if line.strip() and not line.startswith("#")]
    # A launcher that holds a GPU is listed, too.
    hosts = [host for host in dict.fromkeys(named) if not host.endswith("-launcher")]
    if len(hosts) != nodes:
        raise MpiLaunchError(
            "the operator's hostfile does not name the workers of this job",
            seen=f"{len(hosts)} workers ({', '.join(hosts) or 'none'})",
            expected=f"{nodes}, one for each node",
            hint="register the task again: nodes and the MPIJob's worker replicas must agree",
        )
    reach = shlex.split(environment.get(_REACH) or "ssh -o BatchMode=yes -o StrictHostKeyChecking=no")
    registered = Registered.from_env(environment)
    return Launch(
        hosts=tuple(hosts),
        reach=tuple(reach),
        argv=tuple(argv),
        deadline=(Timeouts() if registered is None else registered.timeouts).rendezvous,
        # As many as containers may be restarted in a PyTorchJob: never fewer than the job's own budget allows.
        restarts=nodes * (DEFAULT_REPLACEMENTS if registered is None else registered.max_replacements),
        grace=grace_pinned(environment),
    )


def _read_hostfile(path: Path) -> str:
    """``HOST slots=1``, a line for each worker, as the operator gives it to the first container of a launcher pod."""
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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line: ``--nodes N -- AGENT...``; in a worker ``--wait`` and ``--order JSON``."""
    parser = argparse.ArgumentParser(prog=LAUNCHER, description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--nodes", type=int, help="start one agent in each of so many workers")
    where.add_argument("--wait", action="store_true", help="a worker's first process: run the agent that is ordered")
    where.add_argument("--order", metavar="JSON", help="the launcher's, in a worker: give this to the first process")
    parser.add_argument("agent", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    options.agent = options.agent[1:] if options.agent[:1] == ["--"] else options.agent
    if options.nodes is not None and not options.agent:
        parser.error("the agent's command is missing")
    return options
