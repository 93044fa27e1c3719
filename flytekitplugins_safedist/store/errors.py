"""What an error from an object store means: gone, refused, or worth another try; and when that is made."""

from __future__ import annotations

import enum
import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import SafedistError, StorageError, WorkFailedError
from ..jitter import jittered
from ..texts import chain, public

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Outlook(enum.Enum):
    """What an error from a store means."""

    MISSING = "missing"
    DENIED = "denied"
    UNSUPPORTED = "unsupported"
    LOCAL = "local"
    """A disk of this machine, which says what trying again does not change."""
    TRANSIENT = "transient"


_MISSING_CODES = {
    *("NoSuchKey", "NoSuchBucket", "NoSuchVersion", "404", "410", "BlobNotFound", "ContainerNotFound"),
    "FlyteDataNotFoundException",  # flytekit's, by name
}
_DENIED_CODES = {
    *("AccessDenied", "Forbidden", "401", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
    *("ExpiredTokenException", "RequestExpired", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"),
    *("AuthenticationFailed", "AuthorizationFailure", "InvalidClientTokenId", "UnrecognizedClientException"),
}
"""Error codes of S3 (API reference, "Error responses"), GCS and Azure blob storage, and HTTP statuses."""

_DENIED_NAMES = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("UnauthorizedSSOTokenError", "SSOTokenLoadError", "ClientAuthenticationError", "RefreshError"),
    *("DefaultCredentialsError", "ProfileNotFound"),
}
"""Exceptions of botocore, azure-core and google-auth, by name: importing them all to compare would cost seconds."""

_FORGET_THEIR_CAUSE = {"FlyteDownloadDataException", "TypeTransformerFailedError"}
"""flytekit raises these without ``from`` (1.16, ``FileAccessProvider.async_get_data``, ``_literal_map_to_kwargs``)."""

_BUSY = re.compile(
    r"429|5\d\d|SlowDown|ServiceUnavailable|InternalError|RequestTimeout|OperationAborted|ConditionalRequestConflict"
    r"|Client(Connect|OS|Payload)\w*Error|Server\w*Error|\w*(Connection|Timeout)\w*Error|URLError"
)
"""Statuses and S3's codes that ask for patience, and exceptions of aiohttp and botocore that mean the network, by
name."""

_OF_A_DISK = {errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG}
"""What no client of a store says for it, and what stays."""


def judge(error: BaseException) -> Outlook:
    """What ``error`` means. What is unknown counts as passing: tries are bounded."""
    return _known(decisive(error)) or Outlook.TRANSIENT


def decisive(error: BaseException) -> BaseException:
    """The cause of ``error`` that says what it means; ``error`` itself where none does.

    The first cause decides: fsspec's HTTP file system says "not found" for everything, a refused connection included.
    """
    return next((cause for cause in _causes(error) if _known(cause) is not None), error)


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
        if judge(error) is not Outlook.TRANSIENT or left <= 0:
            return None
        pause = min(jittered(self._pause, 0.5, 1.0), left)
        self._pause = min(self._pause * 2, self._longest)
        return pause


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
            outlook = _of_a_store(error)
            if outlook not in (Outlook.TRANSIENT, Outlook.DENIED):
                raise
            pause = retry.pause(error)
            if pause is None:
                hint = "check the store's health, the pod's network and its credentials; Flyte will retry"
                raise StorageError(f"{what} failed", seen=one_line(decisive(error)), hint=hint) from error
            if tell:
                left = f"{pause:.1f} s, for {retry.left():.0f} s more"
                logger.info(f"{what} failed: {one_line(decisive(error))}; trying again in {left}")
            time.sleep(pause)


def failed_by_itself(error: SafedistError) -> bool:
    """Whether an error of ours was raised from one that no user can cause: one of ours that is the platform's, or a
    store's that may pass. What the user's own work has raised is the user's, whatever it is."""
    for cause in _causes(error)[:-1]:
        if isinstance(cause, SafedistError):
            if cause.platforms:
                return True
        elif not isinstance(error, WorkFailedError) and (known := _known(cause)) is not None:
            return known is Outlook.TRANSIENT
    return False


def _known(error: BaseException) -> Outlook | None:
    """What ``error`` is known to mean by itself; None where nobody has heard of it."""
    if isinstance(error, PermissionError):
        return Outlook.DENIED
    of_a_store = _said(error)
    if of_a_store is not None:
        return of_a_store
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return Outlook.MISSING
    if isinstance(error, OSError) and error.errno in _OF_A_DISK:
        return Outlook.LOCAL
    unknown = isinstance(error, ValueError) and str(error).startswith("Protocol not known")  # fsspec's words
    return Outlook.UNSUPPORTED if unknown or isinstance(error, ImportError) else None


def _said(error: BaseException) -> Outlook | None:
    """What a store, or the network on the way to it, has said by a code or a name of its own."""
    found = codes(error)
    if found & (_DENIED_CODES | _DENIED_NAMES):
        return Outlook.DENIED
    if found & _MISSING_CODES:
        return Outlook.MISSING
    if isinstance(error, (ConnectionError, TimeoutError)) or any(_BUSY.fullmatch(code) for code in found):
        return Outlook.TRANSIENT
    return None


def _of_a_store(error: BaseException) -> Outlook | None:
    """What a store has said, where it was one."""
    return next((said for cause in _causes(error) if (said := _said(cause)) is not None), None)


def one_line(error: BaseException) -> str:
    """``error`` with its type in at most 300 characters, without secrets."""
    text = public(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 300 else text[:297] + "..."


def _causes(error: BaseException) -> list[BaseException]:
    """``error`` and what it was explicitly raised from, the first cause first."""
    forgets = any(type(cause).__name__ in _FORGET_THEIR_CAUSE for cause in chain(error))
    return [*chain(error, implied=forgets)][::-1]


def codes(error: BaseException) -> set[str]:
    """What clients of stores call this error: its type, the service's code and HTTP's status."""
    found = {type(error).__name__}
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found.add(str(response.get("Error", {}).get("Code", "")))
    for attribute in ("status", "status_code", "error_code", "code"):
        value = getattr(error, attribute, None)
        if isinstance(value, (int, str)):
            return found | {str(value)}
    return found
