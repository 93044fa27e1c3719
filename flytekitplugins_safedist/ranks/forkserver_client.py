"""The agent's end of the rank server: start it, ask it, hear of ranks that ended.

A pod's server is forked out of the entrypoint's own process, so that a node imports torch and flytekit only once. The
order is what makes it safe: import everything heavy, look whether this process still has one thread and no CUDA, fork,
and only then do anything that may start threads or open channels (staging, flytekit's clients). Where it is not safe,
the agent starts its rank server as a fresh interpreter later on, which costs the imports a second time.

The container's first process becomes the agent, and not the server. The server imports the user's module, which may
end it, crash it or take its signals; the first process of a container takes all others with it, and nobody could upload
why. And it imports before it forks: to run the task at all flytekit imports the user's module in the agent, and with it
torch in nearly every job, which is there already, in pages that agent, server and ranks share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import envvars, frames
from ..config.registered import Registered
from ..diagnosis import stacks
from ..errors import LaunchError, LaunchTimeoutError
from ..handoff import Slot
from . import backends, forkserver, known, memory, preload, process_tree
from .outcome_text import signal_reason

logger = logging.getLogger(__name__)

SERVER_NICE_SECONDS = 40.0
SIGNAL_SECONDS = 30.0
"""How long the server may take to pass a signal on. Its work is short then; only a stopped machine is that slow."""

EARLY: Slot[RankServer] = Slot()
"""Forked before anything could start a thread: from the entrypoint to the task's agent."""

_LOOK_SECONDS = 1.0
"""Of silence, after which it is seen whether somebody has frozen the server."""

_KILLED_SECONDS = 10.0
"""How long a server that was killed is waited for."""


@dataclass(frozen=True)
class EndedRank:
    """A rank that ended: its process id, exit code (negative: signal), when, in nanoseconds since the epoch, and the
    most bytes it had in memory (0: unknown)."""

    pid: int
    exit_code: int
    time_ns: int
    peak: int = 0


class RankServer:
    """A running rank server.

    Use as a context manager: leaving it ends the server, every rank, and all their descendants.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        self._ended: list[EndedRank] = []
        self._started: set[int] = set()
        self._reply: dict[str, Any] | None = None
        self._exit_code: int | None = None
        self._looked_at = 0.0

    @classmethod
    def spawn(cls, environment: Mapping[str, str]) -> RankServer:
        """Start a rank server as a fresh interpreter: safe whatever this process has done so far.

        Args:
            environment: its variables until :meth:`prepare`.
        """
        ours, theirs = socket.socketpair()
        with theirs, _as_launch_error():
            child = subprocess.Popen(
                [sys.executable, "-m", "flytekitplugins_safedist.ranks.forkserver", str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Its own session: Ctrl-C in a terminal goes to the agent alone, which then stops ranks in order.
                start_new_session=True,
            )
        child.returncode = 0  # reaped by close(), not by subprocess
        return cls(ours, child.pid)

    @classmethod
    def fork(cls) -> RankServer:
        """Fork a rank server from this very process: what it has imported need not be imported again.

        Only for a process that has never had a second thread, nor a gRPC channel, nor CUDA: the entrypoint, at its
        start. Callers check with :func:`~flytekitplugins_safedist.ranks.preload.unsafe_to_fork` first.
        """
        ours, theirs = socket.socketpair()
        with _as_launch_error():
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                os.setsid()
                forkserver.ForkServer(theirs).run()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        return cls(ours, pid)

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(
        self,
        *,
        guard: Sequence[Path],
        cwd: Path,
        environment: Mapping[str, str],
        sys_path: Sequence[str],
        libraries: Sequence[str] = (),
        modules: Sequence[str] = (),
        late: Sequence[str] = (),
        timeout: float,
    ) -> str | None:
        """Make the server the place where this job's modules are imported, and import them.

        Args:
            guard: what it removes at its end, which is this process's at the latest.
            cwd: the working directory, of ranks to come as well.
            environment: all variables under which modules are imported; those of :mod:`.importer` say from where.
            sys_path: where they are looked for.
            libraries, modules, late: see :func:`~flytekitplugins_safedist.ranks.preload.preload`; without libraries
                nothing is imported.
            timeout: seconds.

        Returns:
            Why ranks must not be forked from it (None: they may).
        """
        names = {"libraries": list(libraries), "modules": list(modules), "late": list(late)}
        place = {"guard": list(map(str, guard)), "cwd": str(cwd), "sys_path": list(sys_path)}
        unsafe: str | None = self._ask("prepare", timeout, environment=dict(environment), **place, **names)["unsafe"]
        return unsafe

    def imported(self) -> int:
        """Bytes that importing has taken in the server, so far."""
        return memory.anonymous(self._pid)

    def start(self, files: Sequence[Path], *, fork: bool, timeout: float) -> list[int]:
        """Start ranks by the files of their orders; returns their process ids, in the same order.

        Args:
            files: of each rank's :class:`~flytekitplugins_safedist.ranks.orders.RankOrder`.
            fork: from what was imported; else as fresh interpreters.
            timeout: seconds.
        """
        pids: list[int] = self._ask("start", timeout, files=list(map(str, files)), fork=fork)["pids"]
        self._started.update(pids)
        return pids

    def signal(self, pids: Sequence[int], number: int, *, whole_group: bool) -> None:
        """Send a signal to ranks that have not ended: to the ranks alone, or to all they have started as well.

        Raises:
            LaunchError: the server is gone, and the ranks with it. One that does not answer is ended: what it does not
                pass on would reach nobody, and its ranks would run on.
        """
        try:
            self._ask("signal", SIGNAL_SECONDS, pids=list(pids), number=int(number), whole_group=whole_group)
        except LaunchTimeoutError as error:
            with contextlib.suppress(ProcessLookupError):  # gone unseen, see _reap
                os.kill(self._pid, signal.SIGKILL)
            raise self._lost() from error

    def ask_for_stacks(self, pid: int) -> None:
        """Have a rank write its stacks: its parent signals it, so that the number is nobody else's by then."""
        self.signal([pid], stacks.SIGNAL, whole_group=False)

    def ended(self, *, wait: float = 0.0) -> list[EndedRank]:
        """Ranks that ended since the last call; waits up to ``wait`` seconds for the first.

        Raises:
            LaunchError: the server itself is gone.
        """
        if not self._ended:
            self._receive(wait)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the server and all ranks; what it guards goes, too. Closing twice is allowed."""
        if self._exit_code is not None:
            return
        self._connection.close()
        process_tree.thaw(self._pid)
        self._reap(SERVER_NICE_SECONDS)

    # --- protocol --------------------------------------------------------------------------------------------------
    def _ask(self, op: str, timeout: float, **request: Any) -> dict[str, Any]:
        try:
            self._connection.sendall(frames.packed(json.dumps({"op": op, **request}).encode()))
        except OSError:
            raise self._lost() from None
        deadline = time.monotonic() + timeout
        while self._reply is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchTimeoutError(
                    f"the process that starts ranks did not answer {op!r} in time",
                    where={"pid": self._pid},
                    seen=f"nothing for {timeout:g} s",
                    hint="raise Timeouts(start=...) if importing your module takes that long; else look for a hang "
                    "at import (py-spy dump --pid)",
                )
            self._receive(min(left, _LOOK_SECONDS))
        reply, self._reply = self._reply, None
        if "error" in reply:
            raise LaunchError(
                f"the process that starts ranks could not {op}", where={"pid": self._pid}, seen=reply["error"]
            )
        return reply

    def _receive(self, wait: float) -> None:
        readable, _, _ = select.select([self._connection], [], [], wait)
        if not readable:
            if time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._looked_at = time.monotonic()
                process_tree.thaw(self._pid)  # else nobody hears of a rank's end
            return
        try:
            message = json.loads(frames.receive(self._connection, frames.RANK_BYTES))
        except ConnectionError:
            raise self._lost() from None
        if "exit_code" in message:
            self._started.discard(message["pid"])
            self._ended.append(EndedRank(**message))
        else:
            self._reply = message

    def _lost(self) -> LaunchError:
        began = bool(self._started or self._ended)
        # The kernel ends the ranks with their server, but not what they started; each leads a group of its own.
        for pid in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._started.clear()
        self._reap(1.0)
        code = self._exit_code
        seen = "it left" if code is None else signal_reason(-code) if code < 0 else f"exit code {code}"
        hint = "give the pod more memory if it was killed"
        if not began:
            hint += (
                "; a task module that ends its process at import needs start_method='spawn'; and a PYTHONHOME of "
                "another interpreter keeps Python from starting (its words are in this pod's log): unset it"
            )
        return LaunchError(
            "the process that starts and watches this node's ranks is gone, and its ranks with it",
            where={"pid": self._pid, "host": socket.gethostname()},
            seen=seen,
            hint=hint,
        )

    def _reap(self, patience: float) -> None:
        # What the kernel cannot end now waits for a device or a file system, and is left.
        for seconds, then in ((patience, signal.SIGKILL), (_KILLED_SECONDS, 0)):
            deadline = time.monotonic() + seconds
            while self._exit_code is None:
                try:
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:
                    return  # gone, and unseen: a module of the user's has this process ignore SIGCHLD
                if pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(self._pid, then)
                    break
                else:
                    time.sleep(0.005)


@contextlib.contextmanager
def _as_launch_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(
            "the rank server cannot be started",
            where={"host": socket.gethostname()},
            seen=f"{type(error).__name__}: {error}",
            hint="look at this node's limits of processes, memory and open files",
        ) from error


def fork_early(environment: Mapping[str, str]) -> None:
    """Leave a rank server in :data:`EARLY` for the task that this pod is going to run, if it is one of ours.

    Args:
        environment: the pod's variables, with what was pinned into them when the task was registered.
    """
    registered = Registered.from_env(environment)
    if registered is None or registered.start_method != "preload":
        return
    if preload.unsafe_to_fork("starting this process") is not None:
        return
    libraries = [*backends.create(registered.backend).libraries, "flytekitplugins_safedist.job.run"]
    # One thread: the server, which knows the task's own word for their number, gives it to what is loaded here.
    with variables({**environment, envvars.OMP_NUM_THREADS: "1", **known.VARIABLES}):
        unsafe = preload.import_libraries(libraries)
    if unsafe is None:
        preload.keep()
        EARLY.value = RankServer.fork()
    else:
        logger.info(f"ranks are not forked from this process: {unsafe}")


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Libraries read these when they are loaded; ranks and the agent must not inherit what is meant for that alone."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
