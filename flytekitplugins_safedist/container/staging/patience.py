"""One staging's time: how long a call may take, when it is tried again, and what people are told meanwhile."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from ...errors import CodeNotFoundError, MissingDependencyError, SafedistError, StagingError
from ...flyte.storage_errors import Outlook, judge, one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK, _TELL, _LONGEST_PAUSE = 0.2, 10.0, 15.0
"""Seconds between two looks at a call, between two lines about it, and of the longest pause between two tries."""

_DOWN = 300.0
"""Seconds for which one call may do nothing but fail: a pod that is replaced may come to a healthier node."""


def public(uri: str) -> str:
    """``uri`` for messages and logs: signatures in a query and passwords before the host are secrets."""
    parts = urlsplit(uri)
    if not parts.scheme:
        return uri
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return shown + ("?..." if parts.query else "")


@dataclass
class Patience:
    """One staging's time, and what is told while it passes.

    Attributes:
        label: the archive, for messages.
        seconds: for all of it.
        answer: seconds that the first try of a call may take without an answer; the n-th may take n times as long.
        pause: seconds before the second try; doubled for each further one, and jittered.
    """

    label: str
    seconds: float
    answer: float
    pause: float
    began: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(self.began + self.seconds - time.monotonic(), 0.0)

    def end_within(self, seconds: float) -> None:
        """Wait no longer than that for anything that is still asked."""
        self.seconds = min(self.seconds, time.monotonic() - self.began + seconds)

    def tell(self, text: Callable[[float], str]) -> None:
        """Say a line, given the seconds since the beginning, if the last one was some time ago."""
        now = time.monotonic()
        if now - self.told >= _TELL:
            self.told = now
            logger.info(f"code: {text(now - self.began)}")

    def result(self, asked: Future[T], limit: float, grown: Callable[[], int] = int) -> T:
        """What a call brings; it is cancelled where that takes too long.

        Args:
            limit: seconds in which it is to end, or ``grown()`` to change.

        Raises:
            TimeoutError: it did not.
        """
        size, since = grown(), time.monotonic()
        try:
            while not wait([asked], min(_LOOK, limit, self.remaining())).done:
                now = time.monotonic()
                if size != (size := grown()):
                    since = now
                if now - since >= limit or not self.remaining():
                    raise TimeoutError(f"no answer within {now - since:.3g} s")
                waited = now - since
                self.tell(lambda _: f"waiting for {self.label}: no answer for {waited:.0f} s")  # noqa: B023
            return asked.result()
        finally:
            asked.cancel()

    def tried(self, action: Callable[[float], T]) -> T:
        """What ``action`` returns, which is told the seconds that a call may take; again as long as it fails by
        something that may pass.

        Raises:
            SafedistError: it did not pass.
        """
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return action(attempt * self.answer)
            except SafedistError:
                raise
            except Exception as error:
                over = not self.remaining() or time.monotonic() - began > _DOWN
                if judge(error) is not Outlook.TRANSIENT or over:
                    raise self._failed(error, attempt) from error
                longest = min(self.pause * 2 ** min(attempt - 1, 10), _LONGEST_PAUSE, self.remaining())
                seconds = longest * random.uniform(0.5, 1.0)  # noqa: S311
                logger.info(
                    f"{self.label}: {one_line(error)}; trying again in {seconds:.1f} s (attempt {attempt} failed)"
                )
                time.sleep(seconds)
        raise AssertionError("unreachable: counting does not end")  # pragma: no cover

    def _failed(self, error: Exception, attempts: int) -> SafedistError:
        kind, what, hint = _MEANING[judge(error)]
        late = kind is StagingError and judge(error) is Outlook.TRANSIENT
        return kind(
            what,
            where={"uri": self.label, "host": os.uname().nodename},
            seen=f"{one_line(error)}, at attempt {attempts}" if late else one_line(error),
            expected=f"all of it within {self.seconds:g} s, an answer within {_DOWN:g} s" if late else None,
            hint=hint,
        )


_MEANING: Mapping[Outlook, tuple[type[SafedistError], str, str]] = {
    Outlook.MISSING: (
        CodeNotFoundError,
        "The task's code archive was not found",
        "register the task again (the archive was deleted, has expired, or is in another bucket)",
    ),
    Outlook.DENIED: (
        StagingError,
        "The store refused access to the task's code archive",
        "check that the pod's credentials exist, are not expired and may read this bucket"
        " (service account, FLYTE_AWS_*, AWS_*); a signed URL may have run out",
    ),
    Outlook.UNSUPPORTED: (
        MissingDependencyError,
        "This image cannot reach the store that holds the task's code archive",
        "install the store's fsspec package in the image (s3fs, gcsfs, adlfs, aiohttp)",
    ),
    Outlook.TRANSIENT: (
        StagingError,
        "The task's code archive was not fetched in time",
        "check the store's health and the pod's network; Flyte will retry."
        " For an archive that takes longer, raise SAFEDIST_CODE_TIMEOUT (seconds)",
    ),
}
