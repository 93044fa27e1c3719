"""The agent's end of the rank server: start it, ask it, hear of ranks that ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import frames
from ..errors import LaunchError, LaunchTimeoutError
from ..failures import how_ended
from ..rank.order import JobOrder, RankOrder
from . import cleanup
from .launch import Launched
from .scan import Step

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


@dataclass(frozen=True)
class Imported:
    """What came of importing libraries.

    Attributes:
        unsafe: why ranks must not be forked; None: they may.
        left: what is left to each rank, and why.
        failed: errors of imports, by statement.
    """

    unsafe: str | None
    left: tuple[str, ...]
    failed: dict[str, str]


class RankServer(contextlib.AbstractContextManager["RankServer"]):
    """A running rank server.

    Use as a context manager: leaving it ends the server, every rank, and all their descendants.

    Attributes:
        pid: its process id.
    """

    def __init__(self, launched: Launched) -> None:
        self._connection = launched.connection
        self.pid = launched.pid
        self._ended: list[EndedRank] = []
        self._started: set[int] = set()
        self._answers: list[dict[str, Any]] = []
        self._unsent = bytearray()
        self._taking = 0
        self._imported = Imported("start_method='spawn'", (), {})
        self._exit_code: int | None = None
        self._store_exit_code: int | None = None
        self._looked_at = 0.0

    def __exit__(self, *_: object) -> None:
        self.close()

    def guard(self, paths: Sequence[Path]) -> None:
        """What the server removes at its end, which is this process's at the latest."""
        self._send("guard", paths=list(map(str, paths)))

    def take(
        self, steps: Sequence[Step], environment: Mapping[str, str], path: Sequence[str] = (), *, needed: bool = False
    ) -> None:
        """Have the server import what this job's files import from installed packages; :meth:`ready` waits.

        Args:
            steps: see :mod:`.scan`.
            environment: all variables under which that is done.
            path: the ranks' module search path: what they find elsewhere must not be taken from here.
            needed: by every rank.
        """
        self._send("take", steps=list(steps), environment=dict(environment), path=list(path), needed=needed)
        self._taking += 1

    def take_needed(self, libraries: Sequence[str], environment: Mapping[str, str]) -> None:
        """The same of what every rank needs, by name."""
        self.take([f"import {name}" for name in libraries], environment, needed=True)

    def ready(self, timeout: float) -> Imported:
        """Wait until all is imported that was asked for.

        Args:
            timeout: seconds.

        Raises:
            LaunchError: the server is gone, or takes longer.
        """
        while self._taking:
            answer = self._answer("take", timeout)
            self._taking -= 1
            self._imported = Imported(answer["unsafe"], tuple(answer["left"]), answer["failed"])
        return self._imported

    def is_ready(self, wait: float) -> bool:
        """Whether all is imported that was asked for; waits up to ``wait`` seconds. Raises LaunchError: it is gone."""
        deadline = time.monotonic() + wait
        while len(self._answers) < self._taking and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        return len(self._answers) >= self._taking

    def start(self, job: JobOrder, ranks: Sequence[RankOrder], *, fork: bool, timeout: float) -> list[int]:
        """Start ranks; returns their process ids, in the same order.

        Args:
            job: what all of them are told.
            ranks: what each is told.
            fork: from what was imported; else as fresh interpreters.
            timeout: seconds.
        """
        orders = [each.to_dict() for each in ranks]
        pids: list[int] = self._ask("start", timeout, job=job.to_dict(), ranks=orders, fork=fork)["pids"]
        self._started.update(pids)
        return pids

    def keep_store(self) -> int:
        """Have a store kept that the ranks of the next round meet at, in the place of the round's before: its port; 0
        where torch opens none.

        Raises:
            LaunchError: the server is gone, or can start no process.
        """
        self._store_exit_code = None
        return int(self._ask("keep_store", SIGNAL_SECONDS)["port"])

    def signal(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to ranks that have not ended; SIGKILL also to all they have started.

        Raises:
            LaunchError: the server is gone, and the ranks with it. One that does not answer is ended: what it does not
                pass on would reach nobody, and its ranks would run on.
        """
        try:
            self._ask("signal", SIGNAL_SECONDS, pids=list(pids), number=int(number))
        except LaunchTimeoutError as error:
            self._kill(signal.SIGKILL)
            raise self._lost() from error

    def ask_for_stacks(self, pid: int, number: int) -> None:
        """Have a rank write its stacks, at the signal of that number: its parent signals it, so that the process id is
        nobody else's by then."""
        self.signal([pid], number)

    def ended(self, *, wait: float = 0.0) -> list[EndedRank]:
        """Ranks that ended since the last call; waits up to ``wait`` seconds for the first.

        Raises:
            LaunchError: the server itself is gone, or the store that it kept.
        """
        if not self._ended:
            self._receive(wait)
        while self._is_readable(0):  # the ends of all ranks that are told by now
            self._receive(0)
        if self._store_exit_code is not None:
            raise LaunchError(
                "the process that keeps the store at which torch's ranks meet is gone",
                where={"pid of the rank server": self.pid, "host": socket.gethostname()},
                seen=how_ended(self._store_exit_code),
                expected="it to live as long as the ranks: without it no group can be made, and NCCL's own watch fails",
                hint="give the pod more memory if it was killed",
            )
        ended, self._ended = self._ended, []
        return ended

    def end_ranks(self) -> None:
        """End all ranks, and what they have started. A server that cannot is ended itself."""
        if self._exit_code is not None:
            return
        try:
            if self._taking:  # it imports, and hears of nothing; it has no ranks yet
                raise self._lost()
            self._ask("end_ranks", SERVER_NICE_SECONDS)
        except LaunchError:
            self.close()
        self._started.clear()
        self._ended.clear()

    def stand_by(self, seconds: float) -> None:
        """Have the server guard nothing any more, and end when nobody has needed it for so long.

        Raises:
            LaunchError: it is gone.
        """
        self._ask("stand_by", SIGNAL_SECONDS, seconds=seconds)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a server that stands by has not ended, and would have imported the same under these variables."""
        try:
            return self._ask("fits", SIGNAL_SECONDS, environment=dict(environment))["why"] is None
        except LaunchError:
            return False

    def close(self) -> None:
        """End the server and all ranks; what it guards goes, too. Closing twice is allowed."""
        if self._exit_code is not None:
            return
        self._connection.close()
        if self._taking:
            self._kill(signal.SIGKILL)
        cleanup.thaw(self.pid)
        self._reap(SERVER_NICE_SECONDS)

    # --- protocol --------------------------------------------------------------------------------------------------
    def _ask(self, op: str, timeout: float, **request: Any) -> dict[str, Any]:
        self._send(op, **request)
        return self._answer(op, timeout)

    def _send(self, op: str, **request: Any) -> None:
        self._unsent += frames.packed(json.dumps({"op": op, **request}).encode())
        self._flush()

    def _flush(self) -> None:
        """Send what the connection takes. A server that imports, or is frozen, reads nothing: whoever waits for its
        answer, which has a deadline, sends the rest."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:
            raise self._lost() from None

    def _answer(self, op: str, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not (answer := next((each for each in self._answers if each["answers"] == op), {})):
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchTimeoutError(
                    f"the process that starts ranks did not answer {op!r} in time",
                    where={"pid": self.pid},
                    seen=f"nothing for {timeout:g} s",
                    hint="raise Timeouts(start=...) if importing your libraries takes that long; else look for a hang "
                    "at import (py-spy dump --pid)",
                )
            self._receive(min(left, _LOOK_SECONDS))
        self._answers = self._answers[self._answers.index(answer) + 1 :]  # those before it are of what was given up
        if "error" in answer:
            raise LaunchError(
                f"the process that starts ranks could not {op}",
                where={"pid": self.pid},
                seen=answer["error"],
                hint="look at what it names; at a limit of this container (processes and threads, open files, memory)",
            )
        return answer

    def _is_readable(self, wait: float) -> bool:
        """Whether something has come; returns early where more can be sent."""
        self._flush()
        look = select.poll()  # select() fails from the 1024th descriptor of this process on
        look.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return any(event & ~select.POLLOUT for _, event in look.poll(wait * 1000))

    def _receive(self, wait: float) -> None:
        if not self._is_readable(wait):
            if time.monotonic() > self._looked_at + _LOOK_SECONDS:
                self._looked_at = time.monotonic()
                cleanup.thaw(self.pid)  # else nobody hears of a rank's end
            return
        try:
            message = json.loads(frames.receive(self._connection, frames.RANK_BYTES))
        except ConnectionError:
            raise self._lost() from None
        if "answers" in message:
            self._answers.append(message)
        elif "store_exit_code" in message:
            self._store_exit_code = message["store_exit_code"]
        else:
            self._started.discard(message["pid"])
            self._ended.append(EndedRank(**message))

    def _lost(self) -> LaunchError:
        began = bool(self._started or self._ended)
        # The kernel ends the ranks with their server, but not what they started; each leads a group of its own.
        for pid in self._started:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left, or another user's
                os.killpg(pid, signal.SIGKILL)
        self._started.clear()
        self._reap(1.0)
        hint = "give the pod more memory if it was killed"
        if not began:
            hint += (
                "; and a PYTHONHOME of another interpreter keeps Python from starting (its words are in this pod's "
                "log): unset it"
            )
        return LaunchError(
            "the process that starts and watches this node's ranks is gone, and its ranks with it",
            where={"pid": self.pid, "host": socket.gethostname()},
            seen=how_ended(self._exit_code),
            hint=hint,
        )

    def _kill(self, number: int) -> None:
        """The server, under whatever process id it goes on: it leads a group."""
        with contextlib.suppress(ProcessLookupError):  # gone unseen, see _reap
            os.killpg(self.pid, number)

    def _reap(self, patience: float) -> None:
        # What the kernel cannot end now waits for a device or a file system, and is left.
        for seconds, then in ((patience, signal.SIGKILL), (_KILLED_SECONDS, 0)):
            deadline = time.monotonic() + seconds
            while self._exit_code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    return  # gone, and unseen: a module of the user's has this process ignore SIGCHLD
                if pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    self._kill(then)
                    break
                else:
                    time.sleep(0.005)
