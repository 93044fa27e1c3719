"""The agent's end of the rank server: start it, ask it, hear of ranks that ended.

In a pod it is forked from what the entrypoint has imported (:mod:`.prefork`); elsewhere it is a fresh interpreter,
which imports for all ranks.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import frames
from ..errors import LaunchError, LaunchTimeoutError
from ..rank import evidence
from . import forkserver, memory, process_tree
from .outcome_text import signal_reason
from .preload import Preloaded

logger = logging.getLogger(__name__)

SERVER_NICE_SECONDS = 40.0
SIGNAL_SECONDS = 30.0
"""How long the server may take to pass a signal on. Its work is short then; only a stopped machine is that slow."""

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
        self.prepared = False

    @classmethod
    def spawn(cls, environment: Mapping[str, str]) -> RankServer:
        """Start a rank server as a fresh interpreter: safe whatever this process has done so far.

        Args:
            environment: its variables until :meth:`prepare`.
        """
        ours, theirs = socket.socketpair()
        with theirs, process_tree.starting("the rank server"):
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
    def fork(cls, preloaded: Preloaded) -> RankServer:
        """Fork a rank server from this very process: what it has imported need not be imported again.

        Only for a process that has never had a second thread, nor a gRPC channel, nor CUDA.

        Args:
            preloaded: what importing it has said.
        """
        ours, theirs = socket.socketpair()
        with process_tree.starting("the rank server"):
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                os.setsid()
                forkserver.ForkServer(theirs, preloaded).run()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        return cls(ours, pid)

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def guard(self, paths: Sequence[Path]) -> None:
        """What the server removes at its end, which is this process's at the latest; also when that comes while the
        server imports."""
        self._send("guard", paths=list(map(str, paths)))

    def prepare(
        self,
        *,
        cwd: Path,
        environment: Mapping[str, str],
        sys_path: Sequence[str],
        libraries: Sequence[str] = (),
        modules: Sequence[str] = (),
        late: Sequence[str] = (),
        mode: str = "",
    ) -> None:
        """Have the server be the place where this job's modules are imported, and import them; :meth:`ready` waits.

        Args:
            cwd: the working directory, of ranks to come as well.
            environment: all variables under which modules are imported; those of :mod:`.importer` say from where.
            sys_path: where they are looked for.
            libraries, modules, late: see :func:`~flytekitplugins_safedist.ranks.preload.preload`; a server that was
                forked has the others than ``late``.
            mode: see :func:`~flytekitplugins_safedist.flyte.task_context.importing`.
        """
        self.prepared = True
        names = {"libraries": list(libraries), "modules": list(modules), "late": list(late)}
        self._send("prepare", environment=dict(environment), cwd=str(cwd), sys_path=list(sys_path), mode=mode, **names)

    def ready(self, timeout: float) -> str | None:
        """Wait until what :meth:`prepare` was given is imported; why ranks must not be forked then (None: they may).

        Args:
            timeout: seconds.

        Raises:
            LaunchError: it cannot be, or the server is gone.
        """
        unsafe: str | None = self._answer("prepare", timeout)["unsafe"]
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
        self.signal([pid], evidence.SIGNAL, whole_group=False)

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
        self._send(op, **request)
        return self._answer(op, timeout)

    def _send(self, op: str, **request: Any) -> None:
        try:
            self._connection.sendall(frames.packed(json.dumps({"op": op, **request}).encode()))
        except OSError:
            raise self._lost() from None

    def _answer(self, op: str, timeout: float) -> dict[str, Any]:
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
