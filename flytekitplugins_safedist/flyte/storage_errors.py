"""What an error from an object store means: gone, refused, or worth another try; and when that is made."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable

from ..errors import SafedistError, WorkFailedError
from ..jitter import jittered
from ..texts import chain


class Outlook(enum.Enum):
    """What an error from a store means."""

    MISSING = "missing"
    DENIED = "denied"
    UNSUPPORTED = "unsupported"
    TRANSIENT = "transient"


_MISSING_CODES = {"NoSuchKey", "NoSuchBucket", "NoSuchVersion", "404", "410", "BlobNotFound", "ContainerNotFound"}
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

_BUSY = re.compile(
    r"429|5\d\d|Client(Connect|OS|Payload)\w*Error|Server\w*Error|\w*(Connection|Timeout)\w*Error|URLError"
)
"""Statuses that ask for patience, and exceptions of aiohttp and botocore that mean the network, by name."""

# From the last "://" before it, so that the time it takes grows with a text's length, not with its square.
_QUERY = re.compile(r"(://(?:(?!://)[^\s?'\"<>])+)\?[^\s'\"<>)]+")


def judge(error: BaseException) -> Outlook:
    """What ``error`` means. What is unknown counts as passing: tries are bounded.

    The first cause decides: fsspec's HTTP file system says "not found" for everything, a refused connection included.
    """
    for cause in _causes(error):
        known = _known(cause)
        if known is not None:
            return known
    if isinstance(error, (ImportError, ValueError, TypeError, NotImplementedError, AttributeError)):
        return Outlook.UNSUPPORTED
    return Outlook.TRANSIENT


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
    found = codes(error)
    if isinstance(error, PermissionError) or found & _DENIED_CODES or found & _DENIED_NAMES:
        return Outlook.DENIED
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or found & _MISSING_CODES:
        return Outlook.MISSING
    if isinstance(error, (ConnectionError, TimeoutError)) or any(_BUSY.fullmatch(code) for code in found):
        return Outlook.TRANSIENT
    return None


def unsigned(text: str) -> str:
    """``text`` without secrets: the query of a signed URL is one."""
    return _QUERY.sub(r"\1?...", text)


def one_line(error: BaseException) -> str:
    """``error`` with its type in at most 300 characters, without secrets."""
    text = unsigned(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 300 else text[:297] + "..."


def _causes(error: BaseException) -> list[BaseException]:
    """``error`` and what it was explicitly raised from, the first cause first."""
    return [*chain(error)][::-1]


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
