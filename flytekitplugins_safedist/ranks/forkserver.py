"""The rank server: one small process per node between the agent and its ranks.

It starts ranks (by fork after preloading, or as fresh interpreters), reaps them, and passes signals on. It runs no
threads, so forking from it is safe. When the agent closes the connection, or disappears, it kills every rank with all
its descendants and removes what the agent had asked it to: nothing outlives the agent. The kernel hands it the orphans
of its ranks (it is their subreaper), so that also those go that left their rank's session (Inductor's compile workers
do).

The protocol is frames of JSON over a socket that only these two processes hold: ``prepare`` once, then ``start`` and
``signal``, and its end. One request at a time, answered by a frame; ``guard`` comes at any time, and has no answer, and
ends of ranks come as frames of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing.util
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from .. import frames, stopping
from ..errors import IncompatibleVersionError
from . import importer, known, preload, process_tree, replicas, scratch, worker
from .order import RankOrder
from .preload import Preloaded

_KILL_GRACE_SECONDS = 30.0
_ORPHANS_SECONDS = 5.0
"""For what ranks have left to be gone, between two rounds: less than the agent waits for any answer."""

_LOOK_SECONDS = 1.0
_LIVES_BY = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGIO}


def main(arguments: list[str]) -> NoReturn:
    """Entry as a fresh interpreter: ``python -m flytekitplugins_safedist.ranks.forkserver SOCKET_FD``."""
    ForkServer(socket.socket(fileno=int(arguments[0]))).run()
    with contextlib.suppress(Exception):  # an object of a user's module may stand there
        sys.stdout.flush()
    # What libraries have to say at an interpreter's end (nanobind lists what it takes for leaks) concerns nobody.
    stopping.end_now(0)


class ForkServer:
    """Serves one agent until that is done, or gone."""

    def __init__(self, connection: socket.socket, preloaded: Preloaded | None = None) -> None:
        """
        Args:
            connection: to the agent.
            preloaded: what was imported before this process was forked; None in a fresh interpreter.
        """
        self.connection = connection
        self.ranks: set[int] = set()
        self.guarded: list[Path] = []
        self.preloaded = preloaded or Preloaded("nothing was preloaded")
        self.helpers: frozenset[int] = frozenset()  # what modules started when they were imported: every round's
        self.importing = False
        self.wake_read, self.wake_write = os.pipe()

    def run(self) -> None:
        """Answer requests and report ends of ranks, until the agent is gone; then leave nothing behind."""
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)
        self.listen_to_signals()
        # Of all signals the one that also wakes a process which SIGSTOP has frozen: it clears up after its agent, too.
        process_tree.die_with_parent(signal.SIGCONT)
        process_tree.adopt_orphans()
        # The kernel's word that the agent is gone, which a server that imports for minutes would hear of only then.
        fcntl.fcntl(self.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.connection, fcntl.F_SETFL, fcntl.fcntl(self.connection, fcntl.F_GETFL) | os.O_ASYNC)
        try:
            while True:
                watched: list[Any] = [self.connection, self.wake_read]
                # By time as well: a rank's end must not be missed for good where its signal was.
                readable, _, _ = select.select(watched, [], [], _LOOK_SECONDS)
                if self.wake_read in readable or not readable:
                    self.reap()
                if self.connection in readable:
                    self.answer(**json.loads(frames.receive(self.connection, frames.RANK_BYTES)))
        except ConnectionError:
            return  # the agent is gone
        finally:
            self.clean_up()

    def listen_to_signals(self) -> None:
        """Take every signal that this process lives by: at its start, and back from modules that it has imported."""
        for number in _LIVES_BY:
            # The agent decides what a signal means; this process ends when the agent does. Handlers, not SIG_IGN: a
            # fresh interpreter inherits what is ignored, and its rank could not be stopped in order.
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGIO, self.look_for_agent)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LIVES_BY)

    def answer(self, op: str, **request: Any) -> None:
        if op == "guard":
            self.guarded += map(Path, request["paths"])
            return
        try:
            reply = getattr(self, f"on_{op}")(**request)
        except (OSError, ValueError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        self.send(reply or {})

    def send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(frames.packed(json.dumps(message).encode()))

    def look_for_agent(self, *_: object) -> None:
        if self.importing and self.agent_is_gone():
            # Here and now: an exception would go through the import, which may catch it and go on.
            self.clean_up()
            stopping.end_now(0)

    def agent_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)  # unread requests of it do not hide that it left
        return bool(poll.poll(0))

    # --- requests ------------------------------------------------------------------------------------------------
    def on_prepare(
        self, *, cwd: str, environment: dict[str, str], sys_path: list[str], mode: str, **names: list[str]
    ) -> dict[str, Any]:
        """Be the place where this job's modules are imported, however and wherever this process was started."""
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update({**environment, **known.VARIABLES})
        preload.limit_openmp(os.environ)
        importer.install_from(os.environ)
        sys.path[:] = sys_path
        if any(names.values()):
            self.import_for_ranks(mode=mode, **names)
        return {"unsafe": self.preloaded.unsafe}

    def import_for_ranks(self, *, mode: str, libraries: list[str], modules: list[str], late: list[str]) -> None:
        self.importing = True
        try:
            self.look_for_agent()  # it may have gone before we were importing
            replicas.install()
            if libraries:
                self.preloaded = preload.preload(libraries, modules, late, mode)
            else:  # the others were imported before this process was forked
                self.preloaded = preload.with_late(self.preloaded, late)
        except IncompatibleVersionError as error:  # fresh interpreters will say so themselves, where it is seen
            self.preloaded = Preloaded(str(error))
        finally:
            self.importing = False
            self.listen_to_signals()
        self.helpers = frozenset(process_tree.children())

    def on_start(self, *, files: list[str], fork: bool) -> dict[str, Any]:
        pids: list[int] = []
        server = os.getpid()
        for file in files:
            pid = os.fork() if fork else _fresh(file)
            if pid == 0:
                self.become_rank(Path(file), server)
            self.ranks.add(pid)
            pids.append(pid)
        return {"pids": pids}

    def on_signal(self, *, pids: list[int], number: int, whole_group: bool) -> None:
        for pid in self.ranks.intersection(pids):  # those not reaped yet: their numbers cannot belong to anyone else
            _signal_rank(pid, number, whole_group=whole_group)

    # --- children ------------------------------------------------------------------------------------------------
    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 1 << 16)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self.reap_one(ended.si_pid)

    def reap_one(self, pid: int) -> None:
        now = time.time_ns()
        if pid in self.ranks:
            # Before the pid is free for others: whatever the rank started and left behind goes with it.
            _signal_rank(pid, signal.SIGKILL, whole_group=True)
        _, status, used = os.wait4(pid, 0)
        if pid not in self.ranks:
            return  # an orphan of a rank's
        self.ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        # First of all: an orphan that the kernel cannot end (below) must not keep the agent waiting for this rank. The
        # kernel keeps the most that a process had in memory, in KiB, also of one that it has killed for that.
        self.send({"pid": pid, "exit_code": code, "time_ns": now, "peak": used.ru_maxrss * 1024})
        if not self.ranks:
            # An orphan does not tell whose it was, and may serve a rank that still runs: it goes with the last rank.
            process_tree.end(spare=self.helpers, patience=_ORPHANS_SECONDS)

    def clean_up(self) -> None:
        signal.set_wakeup_fd(-1)
        self.hear_the_last()
        for pid in self.ranks:
            _signal_rank(pid, signal.SIGKILL, whole_group=True)
        # A process in uninterruptible sleep (a wedged GPU or NFS) may never go; do not wait for it for ever.
        process_tree.end(spare=(), patience=_KILL_GRACE_SECONDS)
        for path in self.guarded:
            scratch.remove(path)

    def hear_the_last(self) -> None:
        """What the agent wanted guarded, and this process has not read yet, because it was importing."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(0)
            while True:
                message = json.loads(frames.receive(self.connection, frames.RANK_BYTES))
                if message["op"] == "guard":
                    self.answer(**message)

    def become_rank(self, order_file: Path, server: int) -> NoReturn:
        """In the forked child: shed the server, and be the rank."""
        try:
            self.connection.close()
            signal.set_wakeup_fd(-1)
            os.close(self.wake_read)
            os.close(self.wake_write)
            for number in _LIVES_BY:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # The server's finalizers are not ours (multiprocessing does the same in its children).
            multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
            worker.be(order_file, server=server, preloaded=self.preloaded)
        finally:
            os._exit(worker.EXIT_FAILED)


def _fresh(file: str) -> int:
    """Start a rank as a fresh interpreter: not by a fork of ours, for this process may run threads by now."""
    order = RankOrder.from_json(Path(file).read_text())
    with order.log.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "flytekitplugins_safedist.ranks.worker", file, str(os.getpid())],
            env=order.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    child.returncode = 0  # reaped by reap(), not by subprocess
    return child.pid


def _signal_rank(pid: int, number: int, *, whole_group: bool) -> None:
    # Between fork and setsid a rank has no group of its own yet; the process itself is there all the same.
    for send in (os.killpg, os.kill) if whole_group else (os.kill,):
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
            return


if __name__ == "__main__":
    main(sys.argv[1:])
