"""A worker pod of an MPIJob: its first process, and the command by which the launcher gives it orders.

The operator's own first process (``sleep 365d``) ignores SIGTERM, as every first process does that has no handler for
it: ranks of an aborted job trained on for the whole grace period, and the pods of a finished one stayed as long. The
launcher cannot help: when a job is deleted, its right to ``kubectl exec`` goes with it.

So the first process is ours, and the agent is its child, with the container's environment and log. Orders come through
a socket in a directory of the pod, each a line of JSON, and are taken by this one process: however often the launcher
asks (its connection broke, its container was started again), one agent runs.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import envvars
from .. import readonly
from ..staging.failures import disk_failed

logger = logging.getLogger(__name__)

LISTEN_SECONDS = 300.0
"""How long an order waits for the agent's end: what is silent for longer, load balancers on the way may cut."""
_TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SOCKET = "socket"
_NO_ADDRESS = "hostname -i prints no address that others reach: let /etc/hosts name one, as the kubelet writes it"


def wait(environment: Mapping[str, str]) -> int:
    """Run the agent that the launcher orders, until a signal comes; pass that on, and leave when the agent has ended.

    Args:
        environment: the pod's variables.

    Returns:
        0: the operator makes a deleted worker anew, unless it ended as Failed; then it fails the whole job
        (training-operator v1.9.0, mpijob_controller.go, UpdateJobStatus).

    Raises:
        StagingError: the pod has no directory that can be written, or something else is in its place.
    """
    # In every thread, and taken one by one here: no handler can interrupt what is done about the one before.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_TOLD, signal.SIGCHLD})
    door = _opened(environment)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    told, agents = "", 0
    while not told or door.pod.runs:
        number = signal.sigwait({*_TOLD, signal.SIGCHLD})
        if number == signal.SIGCHLD:
            door.pod.reap()
        else:
            told = told or signal.Signals(number).name
            agents = max(agents, door.pod.leave(number))
    logger.info(f"{told}: {agents} agent(s) of this pod have ended")
    return 0


def hand_over(text: str, environment: Mapping[str, str]) -> None:
    """In a command that the launcher runs in the pod: give an order to the first process, and print what it answers.

    Args:
        text: the order; where it does not say where node 0 is, this is node 0, and its address is added.
        environment: of the first process.
    """
    order = json.loads(text)
    if order.get("node_0") == "":
        order |= {"node_0": _own_address(), "found": time.time()}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(_directory(environment) / _SOCKET))
        except OSError as error:
            sys.stdout.write(f"the worker's first process takes no orders yet ({error.strerror})\n")
            return
        connection.sendall(json.dumps(order).encode() + b"\n")
        with connection.makefile() as answers:
            for line in answers:
                sys.stdout.write(line)
                sys.stdout.flush()


class _Pod:
    """What runs here. The lock of what changes orders the agent's start, its end and what is told to it.

    Attributes:
        leaves: it takes no orders any more.
    """

    def __init__(self, directory: Path) -> None:
        self._node_0 = directory / "node-0"
        self._found = 0.0
        self._agent: int | None = None
        self._status: int | None = None
        self.leaves = False
        self._changes = threading.Condition()

    @property
    def runs(self) -> bool:
        """Whether the agent does."""
        return self._agent is not None and self._status is None

    def obey(self, order: Mapping[str, Any], answer: Callable[[str], object]) -> None:
        """Take an order, and wait for the agent's end, for some minutes.

        Args:
            order: a number of a ``signal`` for the agent, or what to run.
            answer: takes a line for the launcher: JSON, or a reason why nothing is done.
        """
        with self._changes:
            if "signal" in order:
                answer(json.dumps({"agents": self._pass_on(order["signal"])}))
                return
            if self.leaves or not order["node_0"]:
                answer("this pod was told to stop" if self.leaves else _NO_ADDRESS)
                return
            self._note_node_0(order["node_0"], order["found"])
            # One that exited 0 has decided; any other end is undecided, and another agent is to find out.
            starts = not self.runs and self._status != 0
            if starts:
                self._start(order)
            answer(json.dumps({"starts": starts, "node_0": order["node_0"]}))
            # An agent that ends with its pod has not failed by itself: it is started again as soon as the pod is back.
            has_ended = self._changes.wait_for(lambda: not self.runs, LISTEN_SECONDS)
            if has_ended and (self._status == 0 or not self.leaves):
                answer(json.dumps({"status": self._status}))

    def leave(self, number: int) -> int:
        """Take no further order, and pass the signal on; says to how many agents."""
        with self._changes:
            self.leaves = True
            return self._pass_on(number)

    def reap(self) -> None:
        """Orphans of whatever ran in the pod become children of its first process, too."""
        with self._changes, suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._agent:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._status = code if code >= 0 else 128 - code
                    self._changes.notify_all()

    def _pass_on(self, number: int) -> int:
        if self._agent is None or not self.runs:
            return 0
        logger.info(f"{signal.Signals(number).name}: passing it to the agent (process {self._agent})")
        os.kill(self._agent, number)  # not reaped yet: that takes the lock
        return 1

    def _note_node_0(self, address: str, found: float) -> None:
        """Orders may overtake each other, on connections that hung: the address that was found last counts."""
        if found > self._found:
            self._found = found
            beside = self._node_0.with_suffix(".new")
            beside.write_text(f"{address}\n", encoding="utf-8")
            beside.replace(self._node_0)

    def _start(self, order: Mapping[str, Any]) -> None:
        argv, address = order["argv"], order["node_0"]
        endpoint = f"[{address}]:{order['port']}" if ":" in address else f"{address}:{order['port']}"
        own = {**order["env"], envvars.MPI_ENDPOINT: endpoint, envvars.MPI_NODE_0: str(self._node_0)}
        try:
            # As a shell would: neither the signals that are blocked here nor those that Python ignores.
            self._agent = os.posix_spawnp(
                argv[0], argv, {**os.environ, **own}, setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
            )
            self._status = None
        except OSError as error:
            logger.error(f"cannot run {argv[0]}: {error.strerror}")
            self._status = 127


class _Door(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory / _SOCKET), _Visit)
        self.pod = _Pod(directory)


class _Visit(socketserver.StreamRequestHandler):
    server: _Door

    def handle(self) -> None:
        with suppress(OSError):  # the launcher's connection has broken, and its command with it
            order = json.loads(self.rfile.readline())
            self.server.pod.obey(order, lambda line: self.wfile.write(f"{line}\n".encode()))


def _own_address() -> str:
    """The pod's own entry in /etc/hosts, by the kubelet: the address that others reach it at; "" where it has none."""
    found = subprocess.run(["hostname", "-i"], stdout=subprocess.PIPE, text=True, check=False).stdout.split()
    return next((one for one in found if not one.startswith("127.") and one != "::1"), "")


def _directory(environment: Mapping[str, str]) -> Path:
    """Of this pod alone, also where temporary files are on a volume that pods share."""
    return readonly.temporary_parent(environment) / f"safedist-worker-{socket.gethostname()}"


def _opened(environment: Mapping[str, str]) -> _Door:
    """What a first process before this one has left in a volume goes: its agent has ended with it."""
    directory = _directory(environment)
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        return _Door(directory)
    except OSError as error:
        raise disk_failed(error, directory, "Making a place for the launcher's orders") from error
