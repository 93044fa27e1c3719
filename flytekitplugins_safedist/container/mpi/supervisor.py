"""The launcher at work: an agent in every worker of an MPIJob, kept there until the attempt has its verdict.

An agent that exits 0 says that the verdict is in the store. Any other end leaves the job undecided, and the agent is
started again once its worker answers, node 0's too: as the operator and the kubelet do it for the pods of a PyTorchJob.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ...errors import JobInterruptedError, MpiLaunchError
from . import worker_agent
from .launching import Launch

_FIRST_PAUSE, _LAST_PAUSE = 10.0, 300.0
"""Seconds before an agent is started again, doubled each time: the kubelet's."""
_RETRY_SECONDS = 2.0
_STOP_SECONDS = 10.0
_VERDICT_SECONDS = 15.0
"""Of the grace period, kept for the upload of the verdict."""
_OUTPUT_LIMIT = 500
"""Characters of what a command that failed has said."""


@dataclass(frozen=True)
class _Seen:
    """The end of one connection: the agent's status, or None where the connection ended without its word."""

    status: int | None
    last: str

    def __str__(self) -> str:
        return f"status {self.status}" if self.status is not None else f"no message of its own ({self.last})"


@dataclass(frozen=True)
class _Left:
    """A node's agent has ended for good.

    Attributes:
        decided: the attempt's verdict is in the store.
        why: else, how it ended.
    """

    decided: bool
    why: str = ""


def run(launch: Launch, *, say: Callable[[str], None], signals: Sequence[signal.Signals] = ()) -> None:
    """Start the agents, and wait until one says that the verdict is in the store.

    Args:
        launch: what to do.
        say: takes one sentence for the log.
        signals: passed on to the agents.

    Raises:
        JobInterruptedError: a signal came, and the agents left the job undecided.
        MpiLaunchError: none is left of the agents, and none of their restarts.
    """
    job = _Job(launch, say)
    # At once: as a container's first process, this one would not even be ended by a signal without a handler.
    before = {number: signal.signal(number, job.on_signal) for number in signals}
    try:
        job.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Job:
    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._events: SimpleQueue[int | _Left] = SimpleQueue()
        self._address: str | None = None
        self._asked = threading.Event()  # where node 0 is: it has answered, or was given up
        self._over = threading.Event()
        self._budget = threading.Semaphore(launch.restarts)
        self._connections: dict[int, subprocess.Popen[str]] = {}

    def on_signal(self, number: int, _frame: object) -> None:
        """A handler: only notes the signal, for what it takes to pass it on is no work for a handler."""
        self._events.put(number)

    def run(self) -> None:
        nodes = [
            threading.Thread(target=self._node, args=(rank,), daemon=True) for rank in range(len(self._launch.hosts))
        ]
        for node in nodes:
            node.start()
        try:
            self._until_the_verdict()
            self._say("the attempt's verdict is in the store; that is the job's end")
            self._let_leave(nodes)
        finally:
            self._over.set()
            _end_by(list(self._connections.values()), time.monotonic() + 0.1)

    def _until_the_verdict(self) -> None:
        left: list[_Left] = []
        told: str | None = None
        until: float | None = None
        while len(left) < len(self._launch.hosts):
            try:
                event = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except Empty:
                break
            if isinstance(event, _Left):
                if event.decided:
                    return
                left.append(event)
                continue
            if until is None:
                until = time.monotonic() + max(self._launch.grace - _VERDICT_SECONDS, self._launch.grace / 2)
            told = signal.Signals(event).name
            self._over.set()
            self._say(f"received {told}: passing it to {len(self._launch.hosts)} agents")
            self._signal_all(event)
        if told is not None:
            raise JobInterruptedError(
                f"the launcher of this MPIJob was told to stop by {told}",
                hint="its pod was deleted: a drained node, a preemption, or somebody by hand. The operator replaces no "
                "launcher, so this attempt ends",
            )
        raise MpiLaunchError(
            "every agent of this MPIJob has ended, and none is started again",
            seen="; ".join(dict.fromkeys(agent.why for agent in left)),
            hint="see the log of the launcher for how each ended",
        )

    # --- one node, in a thread of its own ------------------------------------------------------------------------

    def _node(self, rank: int) -> None:
        try:
            left = self._keep(rank)
        except MpiLaunchError as error:
            left = _Left(decided=False, why=str(error))
        if rank == 0:
            self._asked.set()
        self._events.put(left)

    def _keep(self, rank: int) -> _Left:
        backoff = _FIRST_PAUSE
        while True:
            address = self._find_node_0() if rank == 0 else self._reach(rank)
            if address is None or self._over.is_set():
                return _Left(decided=False, why=f"node {rank}'s agent was not started")
            seen = self._connect(rank, address)
            if seen.status == 0 or self._over.is_set():
                return _Left(decided=seen.status == 0, why=f"node {rank}'s agent ended with {seen}")
            if not self._budget.acquire(blocking=False):
                self._say(f"node {rank}'s agent ended with {seen}, and {self._launch.restarts} restarts are used up")
                return _Left(decided=False, why=f"{self._launch.restarts} restarts are used up")
            # Without its word it may live on, and only the connection has broken: then it is found again.
            pause = backoff if seen.status is not None else _RETRY_SECONDS
            self._say(f"node {rank}'s agent ended with {seen}; it is started again in {pause:.0f} s")
            self._over.wait(pause)
            backoff = min(_LAST_PAUSE, 2 * pause) if seen.status is not None else backoff

    def _find_node_0(self) -> str:
        """Where node 0 is now, once its worker answers; the others are told where that is another place."""
        before, self._address = self._address, self._address_of_node_0()
        self._asked.set()
        where = f"node 0 is {self._launch.hosts[0]} at {self._address}:{self._launch.port}"
        if before is None:
            self._say(f"{len(self._launch.hosts)} agents; {where}")
        elif before != self._address:
            self._say(f"{where} now: the others are told")
            for rank in range(1, len(self._launch.hosts)):
                threading.Thread(target=self._tell, args=(rank, self._address), daemon=True).start()
        return self._address

    def _tell(self, rank: int, address: str) -> None:
        try:
            self._ask(rank, self._launch.moved(rank, address), self._launch.deadline)
        except MpiLaunchError as error:
            self._say(f"node {rank} cannot be told where node 0 is now: {error}")

    def _reach(self, rank: int) -> str | None:
        """Where node 0 is, once this node's worker answers; None where it is nowhere."""
        self._asked.wait()
        if self._address is None:
            return None
        self._ask(rank, "true", self._launch.deadline)
        return self._address

    def _connect(self, rank: int, address: str) -> _Seen:
        """Run the agent, or wait for it, and show what it writes: whole lines only, two agents must not share one."""
        command, told = self._launch.agent(rank, address)
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
        outside = [address for address in found if not address.startswith("127.") and address != "::1"]
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
        for rank, process in enumerate(started):
            failed = _how_it_failed(process, until)
            if failed is not None:
                self._say(f"SIG{name} did not reach node {rank} ({failed}); its pod passes on what Kubernetes tells it")

    def _let_leave(self, nodes: Sequence[threading.Thread]) -> None:
        """The others leave once one did; the operator removes the pods of those that do not."""
        self._over.set()
        until = time.monotonic() + _STOP_SECONDS
        for node in nodes:
            node.join(timeout=max(until - time.monotonic(), 0.1))
        if any(node.is_alive() for node in nodes):
            self._signal_all(signal.SIGTERM)


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
    output = [line for line in written.strip().splitlines() if not line.startswith("+ ")]
    return "; ".join(output)[:_OUTPUT_LIMIT] or f"exit status {process.returncode}"


def _end_by(processes: Sequence[subprocess.Popen[str]], until: float) -> None:
    for process in processes:
        try:
            process.wait(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
