"""The rank server: a fresh interpreter between an agent and its ranks, which never runs the user's code.

It imports the libraries, forks ranks (or starts them as fresh interpreters), reaps them, and passes signals on. It runs
no threads, so forking from it is safe. When the agent closes the connection, or is gone, it kills every rank with all
its descendants and removes what the agent had asked it to: nothing outlives the agent. The kernel hands it the orphans
of its ranks (it is their subreaper), so that also those go that left their rank's session (Inductor's compile workers
do).

The protocol is frames of JSON over a socket that only these two processes hold. Requests are answered in their order,
and may come before the answer to the one before; ends of ranks come as frames of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import frames, stopping
from ..rank import main as rank_main
from ..rank import replicas
from ..rank.fork import add_sets, die_with_parent, elsewhere
from ..rank.order import JobOrder, RankOrder
from . import cleanup, store
from .libraries import Libraries, unsafe_to_fork

_KILL_GRACE_SECONDS = 30.0
_ORPHANS_SECONDS = 5.0
"""For what ranks have left to be gone, between two rounds: less than the agent waits for any answer."""

_LOOK_SECONDS = 1.0

_READ_AT_START = ("PYTHON", "TZ", "LANG", "LC_", "LD_", "MALLOC_", "GLIBC_")
"""Beginnings of variables that the interpreter and the C library read once, as a process starts."""

_LIVES_BY = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP}


def main(descriptor: int, agent: int) -> NoReturn:
    """As a fresh interpreter."""
    with socket.socket(fileno=descriptor) as connection:  # closed, or PYTHONWARNINGS=error has Python complain
        ForkServer(connection, agent).run()
    # What libraries have to say at an interpreter's end (nanobind lists what it takes for leaks) concerns nobody.
    stopping.end_now(0)


class ForkServer:
    """Serves one agent until that is done, or gone.

    Args:
        connection: to the agent.
        agent: its process id.
        libraries: what was imported before.
    """

    def __init__(self, connection: socket.socket, agent: int, libraries: Libraries | None = None) -> None:
        self.connection = connection
        self.libraries = libraries or Libraries()
        self.ranks: set[int] = set()
        self.guarded: list[Path] = []
        self.helpers: frozenset[int] = frozenset()  # what libraries started as they were imported: every round's
        self.keepers: set[int] = set()  # of the store for the next round, or this one: at most one
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.agents_end = _descriptor_of(agent)
        self.ends_at = math.inf
        self.guards_replicas = False

    def run(self) -> None:
        """Answer requests and report ends of ranks, until the agent is gone; then leave nothing behind."""
        try:
            with contextlib.suppress(ConnectionError):  # the agent is gone
                self._serve()
        finally:
            signal.set_wakeup_fd(-1)
            self._end_ranks(spare=())
            for path in self.guarded:
                cleanup.remove(path)

    def _serve(self) -> None:
        # Of all signals the one that also wakes a process which SIGSTOP has frozen: it clears up after its agent, too.
        die_with_parent(signal.SIGCONT)
        self._listen_to_signals()
        cleanup.adopt_orphans()
        connection = self.connection.fileno()
        look = select.poll()  # the connection may have a number that select() does not take
        for descriptor in (connection, self.wake_read, *self.agents_end):
            look.register(descriptor, select.POLLIN)
        while True:
            # By time as well: a rank's end must not be missed for good where its signal was.
            readable = {descriptor for descriptor, _ in look.poll(_LOOK_SECONDS * 1000)}
            if self.wake_read in readable or not readable:
                self.reap()
            if connection in readable:
                self._answer(**json.loads(frames.receive(self.connection, frames.MOST_BYTES)))
            elif not {*self.agents_end}.isdisjoint(readable) or time.monotonic() > self.ends_at:
                return

    def _listen_to_signals(self) -> None:
        """Take every signal that this process lives by: also from libraries that have taken one."""
        for number in _LIVES_BY:
            # The agent decides what a signal means; this process ends when the agent does. Handlers, not SIG_IGN: a
            # fresh interpreter inherits what is ignored, and its rank could not be stopped in order.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LIVES_BY)

    def _answer(self, op: str, **request: Any) -> None:
        self.ends_at = math.inf
        if op == "guard":
            self.guarded = list(map(Path, request["paths"]))
            return
        try:
            reply = getattr(self, f"on_{op}")(**request)
        except (OSError, ValueError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        self._send({"answers": op, **(reply or {})})

    def _send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(frames.packed(json.dumps(message).encode()))

    # --- requests ------------------------------------------------------------------------------------------------
    def on_take(
        self, *, environment: dict[str, str], steps: Sequence[Any], path: Sequence[str], needed: bool
    ) -> dict[str, Any]:
        """Import libraries.

        Args:
            environment: all variables under which that is done.
            steps: see :meth:`.libraries.Libraries.take`.
            path: the ranks' module search path; empty: it is not known yet.
            needed: see there.
        """
        os.environ.clear()
        os.environ.update(environment)
        if needed and not self.guards_replicas:
            self.guards_replicas = True
            replicas.install()  # before torch
            self.libraries.unsafe = unsafe_to_fork("starting Python")
        die_with_parent(signal.SIGKILL)  # what hangs in an import could not see that the agent is gone
        self.libraries.take([step if isinstance(step, str) else tuple(step) for step in steps], needed=needed)
        die_with_parent(signal.SIGCONT)
        self._listen_to_signals()
        self.helpers = frozenset(cleanup.children())
        return {
            "unsafe": self.libraries.unsafe or (elsewhere(self.libraries.reads.top_names(), path) if path else None),
            "left": self.libraries.left,
            "failed": self.libraries.failed,
        }

    def on_start(self, *, job: dict[str, Any], ranks: Sequence[dict[str, Any]], fork: bool) -> dict[str, Any]:
        orders = JobOrder.from_dict(job), [RankOrder.from_dict(each) for each in ranks]
        server = os.getpid()
        pids: list[int] = []
        try:
            for order in orders[1]:
                pid = os.fork() if fork else rank_main.start_fresh(orders[0], order)
                if pid == 0:
                    self._become_rank(orders[0], order, server)
                self.ranks.add(pid)
                pids.append(pid)
        except OSError:
            for pid in pids:  # the agent never hears of these
                cleanup.end_group(pid)
            raise
        return {"pids": pids}

    def on_signal(self, *, pids: list[int], number: int) -> None:
        for pid in self.ranks.intersection(pids):  # those not reaped yet: their numbers cannot belong to anyone else
            if number == signal.SIGKILL:
                cleanup.end_group(pid)
            else:
                cleanup.send_signal(pid, number, whole_group=False)

    def on_keep_store(self) -> dict[str, Any]:
        self._end_store()
        pid, port = store.keep(self._shed)
        self.keepers = {pid} if pid else set()
        if not port:
            self._end_store()
        return {"port": port}

    def _end_store(self) -> None:
        for pid in self.keepers:
            cleanup.end_group(pid)
            os.waitpid(pid, 0)
        self.keepers = set()

    def on_end_ranks(self) -> None:
        self._end_ranks(spare=self._spared)

    def on_fits(self, *, environment: dict[str, str]) -> dict[str, Any]:
        before, now = (add_sets(each, self.libraries.sets) for each in (os.environ, environment))
        why = self.libraries.reads.difference(before, now)
        return {"why": why or _starts_otherwise(os.environ, environment)}

    def on_stand_by(self, *, seconds: float) -> None:
        self._end_store()
        self.guarded = []
        self.ends_at = time.monotonic() + seconds

    # --- children ------------------------------------------------------------------------------------------------
    def reap(self) -> None:
        """Take in what has ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 1 << 16)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self.reap_one(ended.si_pid)

    def reap_one(self, pid: int) -> None:
        """Reap a child; of a rank tell the agent."""
        now = time.time_ns()
        if pid in self.ranks:
            # Before the pid is free for others: whatever the rank started and left behind goes with it.
            cleanup.end_group(pid)
        _, status, used = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if pid in self.keepers:
            self.keepers.discard(pid)
            self._send({"store_exit_code": code})
        if pid not in self.ranks:
            return  # an orphan of a rank's
        self.ranks.discard(pid)
        # First of all: an orphan that the kernel cannot end (below) must not keep the agent waiting for this rank. The
        # kernel keeps the most that a process had in memory, in KiB, also of one that it has killed for that.
        self._send({"pid": pid, "exit_code": code, "time_ns": now, "peak": used.ru_maxrss * 1024})
        if not self.ranks:
            # An orphan does not tell whose it was, and may serve a rank that still runs: it goes with the last rank.
            cleanup.end_descendants(spare=self._spared, patience=_ORPHANS_SECONDS)

    @property
    def _spared(self) -> set[int]:
        """Children that outlive a round's ranks."""
        return {*self.helpers, *self.keepers}

    def _end_ranks(self, *, spare: Collection[int]) -> None:
        for pid in self.ranks:
            cleanup.end_group(pid)
        # A process in uninterruptible sleep (a wedged GPU or NFS) may never go; do not wait for it for ever.
        cleanup.end_descendants(spare=spare, patience=_KILL_GRACE_SECONDS)
        self.ranks.clear()

    def _shed(self) -> None:
        """In a forked child: let go of what is the server's."""
        self.connection.close()
        signal.set_wakeup_fd(-1)
        for descriptor in (self.wake_read, self.wake_write, *self.agents_end):
            os.close(descriptor)
        for number in _LIVES_BY:
            signal.signal(number, signal.SIG_DFL)

    def _become_rank(self, job: JobOrder, order: RankOrder, server: int) -> NoReturn:
        """In the forked child: shed the server, and be the rank."""
        try:
            self._shed()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            libraries = self.libraries
            rank_main.be(job, order, server=server, sets=libraries.sets, reads=libraries.reads)
        finally:
            os._exit(rank_main.EXIT_FAILED)


def _starts_otherwise(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Why this process, or a fork of it, is not as one that is started with these variables now."""
    names = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    return next((f"{name} is another" for name in names if name.startswith(_READ_AT_START)), None)


def _descriptor_of(process: int) -> list[int]:
    """One that can be read when a process has ended. The connection does not always tell: a child that the user's code
    has forked holds a copy of the agent's end. None where a sandbox has no such thing."""
    try:
        return [os.pidfd_open(process)]
    except (OSError, AttributeError):
        return []
