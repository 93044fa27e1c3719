"""The launcher at work: an agent in every worker of an MPIJob, kept there until node 0's has ended.

Node 0's end is the job's end: it alone uploads. Any other node's agent that is lost is started again once its worker
answers, as the operator and the kubelet do it for the pods of a PyTorchJob.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from ...errors import MpiLaunchError
from . import worker_agent
from .launching import Launch

_FIRST_PAUSE, _LAST_PAUSE = 10.0, 300.0
"""Seconds before an agent is started again, doubled each time: the kubelet's."""
_RETRY_SECONDS = 2.0
_STOP_SECONDS = 10.0
_ATTACH_SECONDS = 60.0
_ATTACHES = 3
_SAID_LIMIT = 500
"""Characters of what a command that failed has said."""


@dataclass(frozen=True)
class _Seen:
    """The end of one connection: the agent's status, or None where the connection ended without its word."""

    status: int | None
    last: str


def run(launch: Launch, *, say: Callable[[str], None], signals: Sequence[signal.Signals] = ()) -> int:
    """Start the agents and wait for node 0. Gives its exit status.

    Args:
        launch: what to do.
        say: takes one sentence for the log.
        signals: passed on to the agents.

    Raises:
        MpiLaunchError: a worker did not answer in time.
        SystemExit: a signal came before there was an agent.
    """
    job = _Job(launch, say)
    # At once: as a container's first process, this one would not even be ended by a signal without a handler.
    before = {one: signal.signal(one, job.on_signal) for one in signals}
    try:
        return job.run()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _Job:
    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._events: SimpleQueue[tuple[str, int | MpiLaunchError]] = SimpleQueue()
        self._address = ""
        self._started = False
        self._over = threading.Event()
        self._budget = threading.Semaphore(launch.restarts)
        self._connections: dict[int, subprocess.Popen[str]] = {}

    def on_signal(self, number: int, _frame: object) -> None:
        """A handler: only notes the signal, for what it takes to pass it on is no work for a handler."""
        if not self._started:
            raise SystemExit(128 + number)
        self._events.put(("signal", number))

    def run(self) -> int:
        hosts = self._launch.hosts
        self._address = self._address_of_node_0()
        self._started = True
        nodes = [threading.Thread(target=self._node, args=(rank,), daemon=True) for rank in range(len(hosts))]
        for node in nodes:
            node.start()
        self._say(f"{len(hosts)} agents; node 0 is {hosts[0]} at {self._address}:{self._launch.port}")
        try:
            status = self._until_the_end()
        finally:
            self._over.set()
            self._let_leave(nodes)
        self._say(f"node 0 left with {status}; that is the job's end")
        return status

    def _until_the_end(self) -> int:
        while True:
            what, value = self._events.get()
            if isinstance(value, MpiLaunchError):
                self._signal_all(signal.SIGTERM)
                raise value
            if what == "end":
                return value
            self._over.set()
            name = signal.Signals(value).name
            self._say(f"received {name}: passing it to {len(self._launch.hosts)} agents")
            self._signal_all(value)

    # --- one node, in a thread of its own ------------------------------------------------------------------------

    def _node(self, rank: int) -> None:
        try:
            status = self._node_0() if rank == 0 else self._keep(rank)
        except MpiLaunchError as error:
            if not self._over.is_set():
                self._events.put(("error", error))
            return
        if rank == 0:
            self._events.put(("end", status))

    def _node_0(self) -> int:
        seen = self._connect(0, start=True)
        for _ in range(_ATTACHES):
            if seen.status is not None:
                break
            # The agent may live on. It must not be started a second time: its end is the attempt's.
            self._say(f"the connection to node 0 ended without its agent's word ({seen.last}); asking for it again")
            try:
                self._ask(0, "true", _ATTACH_SECONDS)
            except MpiLaunchError as error:
                self._say(str(error))
                break
            seen = self._connect(0, start=False)
        return worker_agent.EXIT_UNKNOWN if seen.status is None else seen.status

    def _keep(self, rank: int) -> int:
        pause = _FIRST_PAUSE
        while True:
            self._ask(rank, "true", self._launch.deadline)
            seen = self._connect(rank, start=True)
            if seen.status == 0 or self._over.is_set():
                return 0
            how = f"status {seen.status}" if seen.status is not None else f"no word of its own ({seen.last})"
            if not self._budget.acquire(blocking=False):
                self._say(f"node {rank}'s agent ended with {how}, and {self._launch.restarts} restarts are used up")
                return 1
            self._say(f"node {rank}'s agent ended with {how}; it is started again in {pause:.0f} s")
            if self._over.wait(pause):
                return 0
            pause = min(_LAST_PAUSE, 2 * pause)

    def _connect(self, rank: int, *, start: bool) -> _Seen:
        """Run the agent, or wait for it, and show what it writes: whole lines only, two agents must not share one."""
        command, told = self._launch.agent(rank, self._address, start=start)
        process = subprocess.Popen(
            [*self._launch.reach, self._launch.hosts[rank], command],
            stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._connections[rank] = process
        if told is not None and process.stdin is not None:
            try:
                process.stdin.write(told)
                process.stdin.close()
            except BrokenPipeError:
                pass  # it is gone already; its last words say why
        status, last = None, "it printed nothing"
        for line in process.stdout or ():
            status = worker_agent.ended(line) if status is None else status
            if worker_agent.ended(line) is None:
                last = line.rstrip()
                sys.stdout.write(f"[node {rank}] {last}\n")
                sys.stdout.flush()
        process.wait()
        return _Seen(status, f"exit status {process.returncode}: {last}")

    # --- the way into the workers --------------------------------------------------------------------------------

    def _address_of_node_0(self) -> str:
        # The pod's own entry in /etc/hosts, by the kubelet: the address that others reach it at.
        found = self._ask(0, "hostname -i", self._launch.deadline).split()
        outside = [one for one in found if not one.startswith("127.") and one != "::1"]
        if not outside:
            raise MpiLaunchError(
                "node 0 does not know its address",
                where={"host": self._launch.hosts[0]},
                seen=f"hostname -i prints {' '.join(found) or 'nothing'}",
                hint="let /etc/hosts in the pod name its address, as the kubelet writes it",
            )
        return outside[0]

    def _ask(self, rank: int, command: str, deadline: float) -> str:
        """The output of *command* on a worker, once it answers: its pod may be slower than ours, or come back."""
        started, told = time.monotonic(), False
        while True:
            left = deadline - (time.monotonic() - started)
            answer, reason = self._ask_once(rank, command, max(left, _RETRY_SECONDS))
            if answer is not None:
                return answer
            if left <= _RETRY_SECONDS or self._over.is_set():
                raise MpiLaunchError(
                    "a worker cannot be reached",
                    where={
                        "host": self._launch.hosts[rank],
                        "over": self._launch.reach[0],
                        "waited": f"{deadline:.0f} s",
                    },
                    seen=reason,
                    hint="kubectl describe the worker's pod; the launcher's service account needs pods/exec",
                )
            if not told:
                self._say(f"waiting for {self._launch.hosts[rank]}: {reason}")
                told = True
            self._over.wait(_RETRY_SECONDS)

    def _ask_once(self, rank: int, command: str, timeout: float) -> tuple[str | None, str]:
        try:
            done = subprocess.run(
                [*self._launch.reach, self._launch.hosts[rank], command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return None, "no answer"
        if done.returncode == 0:
            return done.stdout, ""
        return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]

    def _signal_all(self, number: int) -> None:
        name = signal.Signals(number).name.removeprefix("SIG")
        started = [
            subprocess.Popen(
                [*self._launch.reach, host, self._launch.signal(rank, name)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            for rank, host in enumerate(self._launch.hosts)
        ]
        until = time.monotonic() + _STOP_SECONDS
        for rank, one in enumerate(started):
            failed = _how_it_failed(one, until)
            if failed is not None:
                self._say(f"SIG{name} did not reach node {rank} ({failed}); its pod passes on what Kubernetes tells it")

    def _let_leave(self, nodes: Sequence[threading.Thread]) -> None:
        """Other nodes leave once node 0 did; the operator removes the pods of those that do not."""
        until = time.monotonic() + _STOP_SECONDS
        for node in nodes:
            node.join(timeout=max(until - time.monotonic(), 0.1))
        if any(node.is_alive() for node in nodes):
            self._signal_all(signal.SIGTERM)
        _end_by(list(self._connections.values()), time.monotonic() + 0.1)


def _how_it_failed(process: subprocess.Popen[str], until: float) -> str | None:
    """What a command wrote, on one line, if it failed; it is given up *until* then."""
    try:
        _, written = process.communicate(timeout=max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "no answer"
    if process.returncode == 0:
        return None
    # The operator's script shows each of its commands (set -x).
    said = [line for line in written.strip().splitlines() if not line.startswith("+ ")]
    return "; ".join(said)[:_SAID_LIMIT] or f"exit status {process.returncode}"


def _end_by(processes: Sequence[subprocess.Popen[str]], until: float) -> None:
    for one in processes:
        try:
            one.wait(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            one.kill()
