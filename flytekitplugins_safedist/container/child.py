"""Work in a child process, because it starts threads and clients: this process is to be forked, and has neither."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar

from .. import stopping
from ..errors import SafedistError, StagingError
from ..ranks import process_tree
from ..texts import public

T = TypeVar("T")

_CLEARING_SECONDS = 0.8 * stopping.UNWIND_SECONDS
"""For the child to clear up when this process is told to stop, which then has little more itself."""


class Child(Generic[T]):
    """A child process, and what its work comes to."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe
        self.status: int | None = None

    def result(self) -> T:
        """Wait for what the work returns.

        Raises:
            StagingError: the child was killed.
            BaseException: what the work has raised.
        """
        if stopping.stop_requested():  # and what was done meanwhile has swallowed it
            raise stopping.StopRequested(stopping.EXIT_UNDECIDED)
        with os.fdopen(self._pipe, "rb", closefd=False) as answers:
            answer = answers.read()
        self.reap(os.waitpid(self._pid, 0)[1])
        if not answer:
            raise StagingError(
                "the process that fetches and unpacks the code has ended without a word",
                where={"pid": self._pid, "host": os.uname().nodename},
                seen=f"exit code {self.status} (negative: the signal that ended it)",
                hint="give the pod more memory if it was killed for that",
            )
        is_returned, value = pickle.loads(answer)  # noqa: S301  (this process's own child has written it)
        if is_returned:
            returned: T = value
            return returned
        raise value

    def reap(self, status: int) -> None:
        """Note the end of the child."""
        self.status = os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """Have the child clear up and end, unless it has ended; it is killed if it takes too long."""
        deadline = time.monotonic() + _CLEARING_SECONDS
        number: int = signal.SIGTERM
        while self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)
            number = signal.SIGKILL if time.monotonic() > deadline else 0
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.reap(status)
            else:
                time.sleep(0.005)


@contextmanager
def working(work: Callable[[], T]) -> Iterator[Child[T]]:
    """Inside, *work* goes on in a child process, which at the end is gone. SIGTERM unwinds this process meanwhile."""
    with stopping.unwinding():
        read, write = os.pipe()
        child: Child[T] | None = None
        # Until the child has its own handler: this process's would raise in it where nobody hears (a hook of fork()).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            with process_tree.starting("the process that fetches the code"):
                pid = os.fork()
            if pid == 0:
                _be_the_child(work, write)
            child = Child(pid, read)
            os.close(write)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            yield child
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # where the fork has failed
            if child is not None:
                child.end()
            os.close(read)


def _be_the_child(work: Callable[[], Any], answers: int) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, _leave)
        process_tree.die_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with os.fdopen(answers, "wb") as pipe:
            pipe.write(_answer(work))
    finally:
        stopping.end_now(0)


def _answer(work: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except stopping.StopRequested:
        return b""
    except BaseException as error:
        if not isinstance(error, SafedistError):
            # Where it was raised is known here only.
            print(public(traceback.format_exc()), file=sys.stderr, end="", flush=True)  # noqa: T201
        try:
            told = pickle.dumps((False, error))
            pickle.loads(told)  # noqa: S301  (some can be written and not read)
        except Exception:  # an error of a library's that cannot be pickled
            seen = public(f"{type(error).__name__}: {error}")
            told = pickle.dumps((False, StagingError("the code cannot be fetched", seen=seen)))
        return told


def _leave(*_: object) -> NoReturn:
    raise stopping.StopRequested
