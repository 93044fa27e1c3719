"""From a root cause to what Flyte and the user are told. Pure.

The exit contract (shared by every way a job can fail): a user's error is uploaded once and the pods exit 0; a
recoverable one likewise, marked so; infrastructure uploads nothing and exits non-zero, and Flyte retries.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from ..errors import JobInterruptedError, LaunchError, RankFailedError, RankKilledError, RendezvousError, SafedistError
from ..ranks.outcome import Fault, RankOutcome, Status, describe, error_code
from ..ranks.scratch import FULL_ERRNOS, human
from .policy import Decision


class Kind(str, Enum):
    """What Flyte should make of a failure."""

    USER = "user"
    RECOVERABLE = "recoverable"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class Verdict:
    """The one error of a failed job.

    Attributes:
        kind: what Flyte should make of it.
        error: what the user reads.
        time_ns: when the root cause happened.
    """

    kind: Kind
    error: SafedistError
    time_ns: int


_PLATFORM_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
"""Sent from outside the program. The others (SIGSEGV, SIGABRT, ...) are the program's own doing, and would repeat."""


def is_infrastructure(error: SafedistError) -> bool:
    """Whether an error that kept a job from running, or ended its agent, is the platform's and worth a retry."""
    return isinstance(error, (JobInterruptedError, LaunchError, RendezvousError))


def judge(cause: RankOutcome, decision: Decision, *, disk: str, limit: int | None) -> Verdict:
    """What a job that failed with this root cause, and is not restarted any more, ends as.

    Args:
        cause: the root cause.
        decision: why there is no further restart.
        disk: what scratch held on the root cause's node, as text.
        limit: the scratch limit in bytes, or None.
    """
    text = f"{describe(cause)}\n\nNot restarted in place: {decision.reason}."
    if cause.raised is not None and FULL_ERRNOS.intersection(cause.raised.errnos):
        allowed = f"limited to {human(limit)} by Scratch(size_limit=...)" if limit is not None else "with no size limit"
        error: SafedistError = RankFailedError(
            f"rank {cause.rank} ran out of disk space. Scratch is {allowed}: {disk}\n\n{text}",
            hint="write less, give the task more ephemeral storage, or move scratch to a larger volume "
            "(Scratch(path=...))",
        ).with_code(error_code(cause))
        # A full disk stays full: Flyte must not retry it by itself. The user's own word that it may wins.
        return Verdict(Kind.RECOVERABLE if cause.raised.fault is Fault.RECOVERABLE else Kind.USER, error, cause.time_ns)
    kind = _kind(cause)
    if kind is Kind.INFRASTRUCTURE:
        return Verdict(kind, RankKilledError(text), cause.time_ns)
    return Verdict(kind, RankFailedError(text).with_code(error_code(cause)), cause.time_ns)


def _kind(cause: RankOutcome) -> Kind:
    if cause.raised is not None:
        return {
            Fault.USER: Kind.USER,
            Fault.RECOVERABLE: Kind.RECOVERABLE,
            Fault.SYSTEM: Kind.INFRASTRUCTURE,
        }[cause.raised.fault]
    if cause.status is Status.KILLED and -(cause.exit_code or 0) in _PLATFORM_SIGNALS:
        return Kind.INFRASTRUCTURE
    return Kind.USER
