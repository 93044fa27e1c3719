"""What is asked of a store: every call bounded, every failure told, and tried again while it may pass."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Generic, TypeVar

from ..errors import SafedistError, StorageError
from ..failures import Outlook, decisive, outlook, word_of_a_store
from ..jitter import jittered
from .errors import one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS, TELL_SECONDS = 0.05, 10.0
"""Between two looks at a call, and between two lines about it."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between two tries."""

ANSWER_SECONDS, DOWN_SECONDS = 30.0, 300.0
"""How long the first try of a call may bring nothing, and one call do nothing but fail, where nobody says otherwise: a
pod that is replaced may come to a healthier node."""


class Retry:
    """When something that is asked of a store is tried again: while its error may pass, and for a time.

    The one for uploads, the task's code and checkpoints. Pauses double, and are jittered: all nodes of a job meet the
    same outage.

    Args:
        seconds: how long to go on after the first failure.
        first, longest: of the pauses, in seconds.
        clock: of seconds.
    """

    def __init__(
        self, seconds: float, *, first: float = 1.0, longest: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._pause, self._longest, self._clock = seconds, first, longest, clock
        self._end: float | None = None

    def left(self) -> float:
        """Seconds for which it is still tried."""
        return self._seconds if self._end is None else self._end - self._clock()

    def pause(self, error: BaseException) -> float | None:
        """Seconds to wait before the next try; None: the error will not pass, or the time is over."""
        self._end = self._clock() + self._seconds if self._end is None else self._end
        left = self.left()
        if outlook(error) is not Outlook.TRANSIENT or left <= 0:
            return None
        pause = min(jittered(self._pause, 0.5, 1.0), left)
        self._pause = min(self._pause * 2, self._longest)
        return pause


class Patience:
    """How long one thing may take, of which a store may be asked several times; and what people are told meanwhile.

    Args:
        label: what it is about, for messages.
        seconds: for all calls together.
        down: seconds for which one call may do nothing but fail.
        answer: seconds that the first try of a call may take without an answer, or anything new; the n-th may take n
            times as long.
    """

    def __init__(
        self, label: str, seconds: float = math.inf, *, down: float | None = None, answer: float | None = None
    ) -> None:
        self.label, self.seconds = label, seconds
        self.down = DOWN_SECONDS if down is None else down
        self.answer = ANSWER_SECONDS if answer is None else answer
        self._began = self._told = time.monotonic()

    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(self.seconds - self.passed(), 0.0)

    def end_within(self, seconds: float) -> None:
        """Wait no longer than that for anything that is still asked."""
        self.seconds = min(self.seconds, self.passed() + seconds)

    def tell(self, text: Callable[[], str]) -> None:
        """Say a line, if the last one was some time ago."""
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            logger.info(text())


class Request(Generic[T]):
    """One thing that is asked, from its first try to its answer, or to the error that does not pass.

    Args:
        patience: for it.
        begin: starts the try of that number, the first being 1; to cancel what it returns ends the try.
        check: raises where an answer is none.
        stays: whether it is of an error that no store has to do with.
        progress: another value whenever something has come.
        far: how far it is, for people.
    """

    def __init__(
        self,
        patience: Patience,
        begin: Callable[[int], Future[T]],
        *,
        check: Callable[[T], object] = bool,
        stays: Callable[[Exception], bool] = lambda _: False,
        progress: Callable[[], Hashable] = bool,
        far: Callable[[], str] | None = None,
    ) -> None:
        self.attempt = 0
        self._patience, self._begin, self._check, self._stays = patience, begin, check, stays
        self._progress, self._far = progress, far
        self._retry = Retry(patience.down, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        self._try()

    def is_done(self) -> bool:
        """Wait a moment for the answer; a try that fails meanwhile, or brings nothing for too long, is made again.

        Raises:
            Exception: the error that does not pass, as it was raised; TimeoutError where it is that nothing came.
        """
        try:
            if wait([self._future], min(LOOK_SECONDS, self._patience.remaining())).done:
                self._check(self._future.result())
                return True
            self._see_that_something_comes()
        except SafedistError:
            raise
        except Exception as error:
            self._future.cancel()
            pause = None if self._stays(error) else self._retry.pause(error)
            if pause is None or not self._patience.remaining():
                raise
            pause = min(pause, self._patience.remaining())
            why = f"{one_line(decisive(error))}; trying again in {pause:.1f} s (attempt {self.attempt} failed)"
            logger.info(f"{self._patience.label}: {why}")
            time.sleep(pause)
            self._try()
        return False

    def result(self) -> T:
        """The answer.

        Raises:
            Exception: see :meth:`is_done`.
        """
        try:
            while not self.is_done():
                pass
            return self._future.result()
        finally:
            self.cancel()

    def current(self) -> Future[T]:
        """The try that is under way, for whoever cannot look after it meanwhile."""
        return self._future

    def cancel(self) -> None:
        """End the try that is under way, if there is one."""
        self._future.cancel()

    def _try(self) -> None:
        self.attempt += 1
        self._seen, self._since = self._progress(), time.monotonic()
        self._future = self._begin(self.attempt)

    def _see_that_something_comes(self) -> None:
        now, seen = time.monotonic(), self._progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        waited = now - self._since
        if waited >= self.attempt * self._patience.answer or not self._patience.remaining():
            raise TimeoutError(f"no answer within {waited:.3g} s")
        if waited >= TELL_SECONDS:
            self._patience.tell(lambda: f"waiting for {self._patience.label}: no answer for {waited:.0f} s")
        elif self._far is not None:
            far = self._far
            self._patience.tell(lambda: f"{self._patience.label}: {far()}")


def outlasting(action: Callable[[], T], what: str, retry: Retry, *, tell: bool = True) -> T:
    """What ``action`` returns; again as long as a store is away. It may be any code that moves data to or from one, the
    user's types' own included: what is not known to be a store's error is theirs, and raised as it is.

    Args:
        action: may be done again from the beginning.
        what: it does, for the log.
        retry: for how long.
        tell: whether to say that it is tried again.

    Raises:
        StorageError: the store stayed away, or refuses.
    """
    while True:
        try:
            return action()
        except Exception as error:
            if word_of_a_store(error) not in (Outlook.TRANSIENT, Outlook.DENIED):
                raise
            pause = retry.pause(error)
            if pause is None:
                hint = "check the store's health, the pod's network and its credentials"
                raise StorageError(f"{what} failed", seen=one_line(decisive(error)), hint=hint) from error
            if tell:
                left = f"{pause:.1f} s, for {retry.left():.0f} s more"
                logger.info(f"{what} failed: {one_line(decisive(error))}; trying again in {left}")
            time.sleep(pause)


def in_own_thread(call: Callable[[], T]) -> Future[T] | None:
    """Make a call that nothing can end in a thread that nobody needs to wait for, not even the interpreter's end; None
    where the container may have no further thread."""
    answer: Future[T] = Future()
    try:
        threading.Thread(target=_work, args=(call, answer), name="safedist-store", daemon=True).start()
    except RuntimeError:
        return None
    return answer


def in_thread(call: Callable[[], T]) -> Future[T]:
    """The same; here, before this returns, where there can be no thread."""
    answer = in_own_thread(call)
    if answer is None:
        _work(call, answer := Future())
    return answer


def _work(call: Callable[[], T], answer: Future[T]) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        try:
            answer.set_result(call())
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            answer.set_exception(error)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call that has no end of its own returns.

    Raises:
        TimeoutError: nothing within so many seconds; it goes on, and nobody waits for it.
        Exception: whatever it raises.
    """
    answer = in_thread(call)
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()
