"""What went wrong, in facts: which errors may pass, and what each kind means to the person who reads it."""

from __future__ import annotations

import enum
import errno
import os
import re
from pathlib import Path
from typing import Any

from ..errors import CodeNotFoundError, SafedistError, StagingError


class Verdict(enum.Enum):
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

_BUSY = re.compile(r"429|5\d\d|Client(Connect|OS|Payload)\w*Error|Server\w*Error|\w*(Connection|Timeout)\w*Error")
"""Statuses that ask for patience, and exceptions of aiohttp and botocore that mean the network, by name."""

_QUERY = re.compile(r"(\w+://[^\s?'\"<>]+)\?[^\s'\"<>)]+")


def _causes(error: BaseException) -> list[BaseException]:
    """``error`` and what it was explicitly raised from, the first cause first."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain[::-1]


def _codes(error: BaseException) -> set[str]:
    codes = {type(error).__name__}
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        codes.add(str(response.get("Error", {}).get("Code", "")))
    for attribute in ("status", "status_code", "error_code", "code"):
        value = getattr(error, attribute, None)
        if isinstance(value, (int, str)):
            return codes | {str(value)}
    return codes


def judge(error: BaseException) -> Verdict:
    """What ``error`` means. What is unknown counts as passing: tries are bounded.

    The first cause decides: fsspec's HTTP file system says "not found" for everything, a refused connection included.
    """
    for cause in _causes(error):
        codes = _codes(cause)
        if isinstance(cause, PermissionError) or codes & _DENIED_CODES or codes & _DENIED_NAMES:
            return Verdict.DENIED
        if isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or codes & _MISSING_CODES:
            return Verdict.MISSING
        if isinstance(cause, (ConnectionError, TimeoutError)) or any(_BUSY.fullmatch(code) for code in codes):
            return Verdict.TRANSIENT
    if isinstance(error, (ImportError, ValueError, TypeError, NotImplementedError, AttributeError)):
        return Verdict.UNSUPPORTED
    return Verdict.TRANSIENT


def fetch_failed(error: BaseException, label: str, attempts: int) -> SafedistError:
    """The one error for a fetch that will not be tried again."""
    if isinstance(error, SafedistError):
        return error
    seen = f"{type(error).__name__}: {_one_line(error)}"
    where = {"uri": label, "host": os.uname().nodename}
    verdict = judge(error)
    if verdict is Verdict.MISSING:
        return CodeNotFoundError(
            "The task's code archive was not found",
            where=where,
            seen=seen,
            hint="register the task again (the archive was deleted, has expired, or is in another bucket)",
        )
    if verdict is Verdict.DENIED:
        return StagingError(
            "The store refused access to the task's code archive",
            where=where,
            seen=seen,
            hint="check that the pod's credentials exist, are not expired and may read this bucket"
            " (service account, FLYTE_AWS_*, AWS_*); a signed URL may have run out",
        )
    if verdict is Verdict.UNSUPPORTED:
        return StagingError(
            "This image cannot reach the store that holds the task's code archive",
            where=where,
            seen=seen,
            hint="install the store's fsspec package in the image (s3fs, gcsfs, adlfs, aiohttp)",
        )
    return StagingError(
        f"Fetching the task's code archive failed {attempts} time{'' if attempts == 1 else 's'}",
        where=where,
        seen=seen,
        hint="Flyte will retry; if it repeats, check the store's health and the pod's network",
    )


def _one_line(error: BaseException) -> str:
    text = _QUERY.sub(r"\1?...", " ".join(str(error).split()))  # the query of a signed URL is a secret
    return text if len(text) <= 300 else text[:297] + "..."


def disk_failed(error: OSError, directory: Path, needed: int | None, doing: str) -> StagingError:
    """The one error for a file system that would not take the code.

    Args:
        directory: where it was to be written.
        needed: bytes, at least, as far as known.
    """
    number = error.errno or 0
    name = errno.errorcode.get(number, "error")
    place = error.filename2 or error.filename or directory
    where: dict[str, Any] = {"path": os.fsdecode(place) if isinstance(place, bytes) else place}
    where |= {"host": os.uname().nodename}
    what, hint = _MEANING.get(number, (f"{doing} failed", "see the error; Flyte will retry"))
    seen = f"{name}: {os.strerror(number) if number else error}"
    expected = None
    if number in (errno.ENOSPC, errno.EDQUOT):
        expected = f"at least {needed} bytes free" if needed else "more space"
        seen = f"{seen}, {_free(directory)} in {directory}"
    return StagingError(f"{doing}: {what}", where=where, seen=seen, expected=expected, hint=hint)


_MEANING = {
    errno.ENOSPC: (
        "the disk is full",
        "free space, raise the pod's ephemeral storage, or name a larger directory with SAFEDIST_CODE_STORE",
    ),
    errno.EDQUOT: ("the quota is used up", "raise the quota, or name another directory with SAFEDIST_CODE_STORE"),
    errno.EROFS: (
        "the file system is read-only",
        "mount it writable, or use another --dest-dir or SAFEDIST_CODE_STORE",
    ),
    errno.EACCES: (
        "permission denied",
        "let the container's user write there (chown in the image, fsGroup in the pod), or use another directory",
    ),
    errno.EPERM: ("not permitted", "let the container's user write there, or use another directory"),
    errno.EIO: ("the device reports an input/output error", "the volume or the node is unhealthy; Flyte will retry"),
    errno.ESTALE: ("the network file system lost the directory", "Flyte will retry; check the volume"),
    errno.EXDEV: (
        "the file system cannot rename within itself",
        "name a directory on a local disk with SAFEDIST_CODE_STORE",
    ),
    errno.ENOTDIR: ("something that is not a directory is in the way", "remove it, or use another directory"),
}


def _free(directory: Path) -> str:
    try:
        space = os.statvfs(directory)
    except OSError:
        return "free space unknown"
    files = f", {space.f_favail} files" if space.f_files else ""
    return f"{space.f_bavail * space.f_frsize} bytes{files} free"
