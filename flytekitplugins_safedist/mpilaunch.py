"""``safedist-mpi-launch``: the command of an MPIJob's launcher pod. Starts one agent in each worker pod.

Neither ``mpirun`` nor ``horovodrun``: the number of slots that the operator writes down is always 1, whatever the task
asked for (Flyte drops ``slots``), nobody would tell the agents where node 0 is, and the pods of an MPIJob have no
services whose names could be guessed (training-operator v1.9.0, ``mpijob_controller.go``, GetServicesForJob). What is
used is what the operator gives every launcher: the list of workers in the hostfile, and the command that reaches them,
``$OMPI_MCA_plm_rsh_agent``: ``kubectl exec`` in a script, or ``ssh`` where that variable is not set.

Node 0's end is the job's end: it alone uploads.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import envvars
from .errors import MpiLaunchError
from .topology import DEFAULT_PORT

HOSTFILE_VARIABLE = "OMPI_MCA_orte_default_hostfile"
REACH_VARIABLE = "OMPI_MCA_plm_rsh_agent"
"""What the operator tells Open MPI in the launcher pod (mpijob_controller.go, newLauncher)."""
DEFAULT_HOSTFILE = "/etc/mpi/hostfile"
DEADLINE_SECONDS = 900.0
_RETRY_SECONDS = 2.0
_STOP_SECONDS = 10.0
_NOT_THE_WORKERS = ("OMPI_", "I_MPI_", "NVIDIA_", "HOSTNAME", "HOME", "PWD", "OLDPWD", "SHLVL", "SSH_", "_")
"""Of the launcher's own pod, or blanked in it by the operator (NVIDIA_VISIBLE_DEVICES): never handed to a worker."""
_ADOPT = (
    "import json,os,sys;said=json.loads(sys.stdin.readline());os.environ.update(said['env']);os.chdir(said['cwd']);"
    "os.execvp(said['argv'][0],said['argv'])"
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
        deadline: seconds for the workers to answer.
    """

    hosts: tuple[str, ...]
    reach: tuple[str, ...]
    argv: tuple[str, ...]
    port: int
    keeps_environment: bool
    environment: Mapping[str, str]
    cwd: str
    deadline: float = DEADLINE_SECONDS

    def identity(self, node_rank: int, address: str) -> dict[str, str]:
        """What tells an agent which node it is (read by :mod:`~flytekitplugins_safedist.topology`)."""
        host = f"[{address}]" if ":" in address else address
        return {
            envvars.MPI_NODE_RANK: str(node_rank),
            envvars.MPI_NODES: str(len(self.hosts)),
            envvars.MPI_ENDPOINT: f"{host}:{self.port}",
        }


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
    return Launch(
        hosts=tuple(hosts),
        reach=tuple(reach),
        argv=tuple(argv),
        port=DEFAULT_PORT,
        keeps_environment=Path(reach[0]).name != "ssh",
        environment=environment,
        cwd=cwd,
    )


def run(launch: Launch, *, say: Callable[[str], None], signals: Sequence[signal.Signals] = ()) -> int:
    """Start the agents and wait for node 0. Gives its exit status.

    Raises:
        MpiLaunchError: a worker did not answer in time.
    """
    address = _address_of_node_0(launch, say)
    for host in launch.hosts[1:]:
        _ask(launch, host, "true", say)
    agents = [_start(launch, rank, address) for rank in range(len(launch.hosts))]
    readers = [threading.Thread(target=_relay, args=(one, rank), daemon=True) for rank, one in enumerate(agents)]
    for reader in readers:
        reader.start()
    say(f"started {len(agents)} agents; node 0 is {launch.hosts[0]} at {address}:{launch.port}")
    before = {one: signal.signal(one, lambda number, _: _stop(launch, number, say)) for one in signals}
    try:
        status = agents[0].wait()
        for reader in readers[:1]:
            reader.join()  # its last lines carry the reason
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        _leave(agents)
    say(f"node 0 left with {status}; that is the job's end")
    return status if status >= 0 else 128 - status


def _address_of_node_0(launch: Launch, say: Callable[[str], None]) -> str:
    # The pod's own entry in /etc/hosts, by the kubelet: the address that others reach it at.
    found = _ask(launch, launch.hosts[0], "hostname -i", say).split()
    outside = [one for one in found if not one.startswith("127.") and one != "::1"]
    if not outside:
        raise MpiLaunchError(
            "node 0 does not know its address",
            where={"host": launch.hosts[0]},
            seen=f"hostname -i prints {' '.join(found) or 'nothing'}",
            hint="let /etc/hosts in the pod name its address, as the kubelet writes it",
        )
    return outside[0]


def _ask(launch: Launch, host: str, command: str, say: Callable[[str], None]) -> str:
    """The output of *command* on *host*, once it answers: a worker's pod may be slower than ours."""
    started, told = time.monotonic(), False
    while True:
        left = launch.deadline - (time.monotonic() - started)
        try:
            done = subprocess.run(
                [*launch.reach, host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=max(left, _RETRY_SECONDS),
            )
            if done.returncode == 0:
                return done.stdout
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            reason = "no answer"
        if left <= _RETRY_SECONDS:
            raise MpiLaunchError(
                "a worker cannot be reached",
                where={"host": host, "over": launch.reach[0], "waited": f"{launch.deadline:.0f} s"},
                seen=reason,
                hint="kubectl describe the worker's pod; the launcher's service account needs pods/exec",
            )
        if not told:
            say(f"waiting for {host}: {reason}")
            told = True
        time.sleep(_RETRY_SECONDS)


def _start(launch: Launch, rank: int, address: str) -> subprocess.Popen[str]:
    identity = launch.identity(rank, address)
    pid_file = _pid_file(launch)
    if launch.keeps_environment:
        command = f"echo $$ > {pid_file}; cd {shlex.quote(launch.cwd)} && exec "
        command += shlex.join(["env", *(f"{name}={value}" for name, value in identity.items()), *launch.argv])
    else:
        # The same image, so the same interpreter; PATH is not known yet in a session of sshd.
        command = f"echo $$ > {pid_file}; exec {shlex.join([sys.executable, '-c', _ADOPT])}"
    process = subprocess.Popen(
        [*launch.reach, launch.hosts[rank], command],
        stdin=subprocess.DEVNULL if launch.keeps_environment else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if process.stdin is not None:
        said = {"env": dict(_for_workers(launch.environment)) | identity, "cwd": launch.cwd, "argv": launch.argv}
        try:
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already; its exit status says why
    return process


def _for_workers(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if not any(
            name == one or (one.endswith("_") and len(one) > 1 and name.startswith(one)) for one in _NOT_THE_WORKERS
        ):
            yield name, value


def _pid_file(launch: Launch) -> str:
    # In the worker's own file system; the name keeps two jobs on one test machine apart.
    return f"/tmp/safedist-agent-{launch.hosts[0]}-${{HOSTNAME:-pod}}.pid"  # noqa: S108


def _relay(process: subprocess.Popen[str], rank: int) -> None:
    """Whole lines only: two agents must not share one."""
    stream: IO[str] | None = process.stdout
    for line in stream or ():
        sys.stdout.write(f"[node {rank}] {line.rstrip()}\n")
        sys.stdout.flush()


def _stop(launch: Launch, number: int, say: Callable[[str], None]) -> None:
    """Pass a signal on: killing ``kubectl exec`` or ``ssh`` would leave the agents running."""
    name = signal.Signals(number).name.removeprefix("SIG")
    say(f"received SIG{name}: passing it to {len(launch.hosts)} agents")
    command = f"kill -{name} $(cat {_pid_file(launch)})"
    started = [
        subprocess.Popen([*launch.reach, host, command], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for host in launch.hosts
    ]
    for one in started:
        try:
            one.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            one.kill()


def _leave(agents: Sequence[subprocess.Popen[str]]) -> None:
    """Other nodes leave once node 0 did; the operator removes the pods of those that do not."""
    until = time.monotonic() + _STOP_SECONDS
    for one in agents:
        try:
            one.wait(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line: ``--nodes N -- AGENT...``."""
    parser = argparse.ArgumentParser(prog="safedist-mpi-launch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("agent", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    options.agent = options.agent[1:] if options.agent[:1] == ["--"] else options.agent
    if not options.agent:
        parser.error("the agent's command is missing")
    return options
