"""The launcher at work: an agent in every worker of an MPIJob, kept there until the attempt has its verdict.

An agent that exits 0 says that the verdict is in the store. Any other end leaves the job undecided, and the agent is
started again once its worker answers, node 0's too: as the operator and the kubelet do it for the pods of a PyTorchJob.
Each worker has one thread, which gives it one order after another: a connection that breaks, a pod that is made anew
and a node 0 that has moved all come to the same, an order more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from ...errors import JobInterruptedError, MpiLaunchError
from . import worker
from .plan import Launch

_RETRY_SECONDS, _LAST_PAUSE = 2.0, 300.0
"""Between two orders; after an agent that ended undecided doubled each time, up to the kubelet's longest."""
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 10.0
_VERDICT_SECONDS = 15.0
"""Of the grace period, kept for the upload of the verdict."""
_OUTPUT_LIMIT = 500
"""Characters of what a command that failed has said."""


def run(launch: Launch, *, say: Callable[[str], None], signals: Sequence[signal.Signals] = ()) -> None:
    """Have the workers run their agents, and wait until one says that the verdict is in the store.

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
    for number in signals:
        signal.signal(number, job.on_signal)
    job.run()


class _Job:
    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._events: SimpleQueue[signal.Signals | str | None] = SimpleQueue()
        """Signals, and how each node has left for good: why, or None with the verdict in the store."""
        self._node_0, self._found = "", 0.0
        self._asked = threading.Event()  # where node 0 is: it has answered, or was given up
        self._over = threading.Event()
        self._budget = threading.Semaphore(launch.restarts)
        self._connecting = threading.Lock()  # an order with an old address is sent before node 0's new one, and cut off
        self._connections: dict[int, subprocess.Popen[str]] = {}
        self._said: dict[int, str] = {}

    def on_signal(self, number: int, _frame: object) -> None:
        """A handler: only notes the signal, for what it takes to pass it on is no work for a handler."""
        self._events.put(signal.Signals(number))

    def run(self) -> None:
        nodes = self._at_each_node(self._node)
        try:
            self._until_the_verdict()
            self._say("the attempt's verdict is in the store; that is the job's end")
            # The others leave once one did; the operator removes the pods of those that do not.
            self._over.set()
            if not _ended(nodes, _STOP_SECONDS):
                self._signal_all(signal.SIGTERM)
        finally:
            self._over.set()
            for connection in self._connections.values():
                _hang_up(connection)

    def _until_the_verdict(self) -> None:
        left: list[str] = []
        told: str | None = None
        until: float | None = None
        while len(left) < len(self._launch.hosts):
            try:
                # Never without end: a signal that comes just before it waits is a handler's only when it wakes.
                left_of_it = _LOOK_SECONDS if until is None else until - time.monotonic()
                event = self._events.get(timeout=min(_LOOK_SECONDS, max(0.0, left_of_it)))
            except Empty:
                if until is not None and time.monotonic() >= until:
                    break
                continue
            if event is None:
                return
            if isinstance(event, str):
                left.append(event)
                continue
            if until is None:
                until = time.monotonic() + max(self._launch.grace - _VERDICT_SECONDS, self._launch.grace / 2)
            told = event.name
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
            seen="; ".join(dict.fromkeys(left)),
            hint="see the logs of the workers' pods for how each ended",
        )

    def _at_each_node(self, what: Callable[[int], None]) -> list[threading.Thread]:
        nodes = [threading.Thread(target=what, args=(rank,), daemon=True) for rank in range(len(self._launch.hosts))]
        for node in nodes:
            node.start()
        return nodes

    def _signal_all(self, number: signal.Signals) -> None:
        def tell(rank: int) -> None:
            answers, last = _talk(_start(self._launch.signal(rank, number)), _STOP_SECONDS)
            if not answers:
                self._say(
                    f"{number.name} did not reach node {rank} ({last}); its pod passes on what Kubernetes tells it"
                )

        _ended(self._at_each_node(tell), _STOP_SECONDS + 1)

    # --- one node, in a thread of its own ------------------------------------------------------------------------

    def _node(self, rank: int) -> None:
        if rank:
            self._asked.wait()
        why = self._keep(rank) if not rank or self._node_0 else f"node {rank} was not started"
        self._asked.set()
        self._events.put(why)

    def _keep(self, rank: int) -> str | None:
        """Order the agent again and again, until it has decided: None. Else why the node is given up."""
        host, deadline = self._launch.hosts[rank], self._launch.deadline
        heard, backoff = time.monotonic(), _RETRY_SECONDS
        while not self._over.is_set():
            pause = _RETRY_SECONDS
            answers, last = self._order(rank)
            status = answers.get("status")
            if status == 0:
                return None
            if answers:
                heard = time.monotonic()
            elif time.monotonic() - heard >= deadline:
                waited = f"{host} cannot be reached by {self._launch.reach[0]} for {deadline:.0f} s ({last})"
                return f"{waited}: see kubectl describe pod; the launcher's service account needs pods/exec"
            else:
                self._say_once(rank, f"waiting for {host}: {last}")
            if status is not None and not self._over.is_set():
                if not self._budget.acquire(blocking=False):
                    return (
                        f"node {rank}'s agent ended with status {status}: {self._launch.restarts} restarts are used up"
                    )
                pause, backoff = backoff, min(_LAST_PAUSE, 2 * backoff)
                self._say(f"node {rank}'s agent ended with status {status}; it is started again in {pause:.0f} s")
            self._over.wait(pause)
        return f"node {rank}'s agent was told to stop"

    def _order(self, rank: int) -> tuple[dict[str, Any], str]:
        with self._connecting:
            process = _start(self._launch.agent(rank, self._node_0, self._found))
            self._connections[rank] = process
        # A connection may hang without an end: the order itself does not.
        limit = worker.LISTEN_SECONDS + self._launch.deadline
        return _talk(process, limit, lambda answer: self._note(rank, answer))

    def _say_once(self, rank: int, text: str) -> None:
        if self._said.get(rank) != text:
            self._said[rank] = text
            self._say(text)

    def _note(self, rank: int, answer: dict[str, Any]) -> None:
        """What a worker has answered at first."""
        if "starts" not in answer:
            return
        if answer["starts"]:
            self._said[rank] = ""  # each start is said
        which = "an agent starts in this pod" if answer["starts"] else "an agent runs in this pod already"
        self._say_once(rank, f"[node {rank}] {which}")
        if rank:
            return
        with self._connecting:
            moved = self._node_0 not in ("", answer["node_0"])
            self._node_0, self._found = answer["node_0"], time.time()
            for other, connection in self._connections.items() if moved else ():
                if other:
                    _hang_up(connection)  # the next order says it
        if moved:
            self._say(f"node 0 is {self._launch.hosts[0]} at {self._node_0} now: the others are told")
        self._asked.set()


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the operator's script has kubectl as a child
    )


def _talk(
    process: subprocess.Popen[str], limit: float, heard: Callable[[dict[str, Any]], None] = lambda _: None
) -> tuple[dict[str, Any], str]:
    """All that a worker's first process answers, and what the command has written otherwise, on one line.

    Args:
        process: from :func:`_start`.
        limit: seconds until it is ended.
        heard: takes each answer as it comes.
    """
    timer = threading.Timer(limit, _hang_up, (process,))
    timer.start()
    answers: dict[str, Any] = {}
    others: list[str] = []
    for line in process.stdout or ():
        try:
            answer = dict(json.loads(line))
        except (TypeError, ValueError):
            if not line.startswith("+ "):  # the operator's script shows each of its commands
                others.append(line.strip())
            continue
        heard(answer)
        answers |= answer
    process.wait()
    timer.cancel()
    return answers, "; ".join(others)[-_OUTPUT_LIMIT:] or f"exit status {process.returncode}"


def _hang_up(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(process.pid, signal.SIGKILL)


def _ended(threads: Sequence[threading.Thread], within: float) -> bool:
    """Whether they have, after so many seconds at most."""
    until = time.monotonic() + within
    for thread in threads:
        thread.join(timeout=max(until - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
