"""Waiting for a store that may never answer: bounded, told to people, and over at once when nobody wants it any more.

No client of a store can be trusted to come back: it may retry within our tries, wait without a timeout, or sit in a
system call. So every call to one is made in a thread that can be abandoned. These are threads of their own and not
those of ``concurrent.futures``, because the interpreter joins the latter when it ends, whatever they hang in.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ...errors import StagingError

T = TypeVar("T")

_LOOK = 0.2
"""Seconds between two looks at the deadline and at whether anybody still wants the result."""

_TELL = 10.0
"""Seconds between two lines about one wait."""


class Abandoned(Exception):
    """Whoever waited for this has gone. Never seen outside: a thread that is not wanted any more ends with it."""


class Call(Generic[T]):
    """One call in a thread of its own, that nobody needs to wait for."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._result: T | None = None
        self._error: BaseException | None = None
        self.done = threading.Event()
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="safedist-fetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            self._error = error
        self.done.set()

    def result(self) -> T:
        """What the call gave, when it is done; the thread is gone then."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # it is what the action returned


class Watch:
    """One staging's time.

    Args:
        seconds: for all of it.
        say: takes a line for the log.
    """

    def __init__(self, seconds: float, say: Callable[[str], object]) -> None:
        self._seconds = seconds
        self._say = say
        self._end = time.monotonic() + seconds
        self._unwanted = threading.Event()

    def cancel(self) -> None:
        """Whoever still waits in another thread stops waiting."""
        self._unwanted.set()

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    def check(self, label: str, seen: object = None) -> None:
        """Go on only while there is time.

        Raises:
            StagingError: the time for staging is over.
            Abandoned: nobody wants the result any more.
        """
        if self._unwanted.is_set():
            raise Abandoned
        if time.monotonic() >= self._end:
            raise StagingError(
                "The task's code archive was not fetched in time",
                where={"uri": label, "host": os.uname().nodename},
                seen=seen,
                expected=f"all of it within {self._seconds:g} s",
                hint="check the store's health and the pod's network; Flyte will retry."
                " For an archive that takes longer, raise SAFEDIST_CODE_TIMEOUT (seconds)",
            )

    def result(self, call: Call[T], label: str, limit: float) -> T:
        """Wait for ``call``, at most until it has run for ``limit`` seconds.

        Raises:
            TimeoutError: it has; the call is abandoned.
            StagingError, Abandoned: see :meth:`check`.
        """
        told = call.began
        while not call.done.wait(min(_LOOK, limit, max(self.remaining(), 0.001))):
            now = time.monotonic()
            waited = now - call.began
            self.check(label, f"no answer for {waited:.0f} s")
            if waited >= limit:
                raise TimeoutError(f"no answer within {limit:g} s")
            if now - told >= _TELL:
                told = now
                self._say(f"waiting for {label}: no answer for {waited:.0f} s")
        return call.result()

    def call(self, action: Callable[[], T], label: str, limit: float) -> T:
        """:meth:`result` of a new :class:`Call`."""
        return self.result(Call(action), label, limit)
