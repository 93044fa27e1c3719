"""From a root cause, or the error that ended an agent, to what Flyte and the user are told. Pure.

A verdict is uploaded once, and the pods then exit 0. Its kind and its origin decide what Flyte does (v1.16,
flytepropeller's ``executor.go``, ``isEligibleForRetry``):

- NON_RECOVERABLE: the task fails.
- RECOVERABLE, origin USER: another attempt if the task's ``retries`` allow one.
- RECOVERABLE, origin SYSTEM: another attempt from the platform's own budget (three by default); none of ``retries``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..agent.disk import DiskLimit
from ..errors import FencedError, RankFailedError, RankKilledError, SafedistError
from ..failures import FULL_ERRNOS, ROWS, Failure, Payer, mistake
from ..rank.outcome import RankOutcome
from ..rank.outcome_text import describe


class Kind(str, Enum):
    """Whether Flyte may try again."""

    NON_RECOVERABLE = "non-recoverable"
    RECOVERABLE = "recoverable"


class Origin(str, Enum):
    """Whose doing a failure is: it decides which budget another attempt is taken from."""

    USER = "user"
    SYSTEM = "system"


@dataclass(frozen=True)
class Verdict:
    """The one error of a failed job, as it is uploaded.

    Attributes:
        kind: whether Flyte may try again.
        origin: whose doing it is.
        code: its stable name: metrics and alerts are keyed on it.
        error: what the user reads.
        time_ns: when the root cause happened, in nanoseconds since the epoch.
        decks: name and HTML of those that a failed rank left.
    """

    kind: Kind
    origin: Origin
    code: str
    error: SafedistError
    time_ns: int
    decks: tuple[dict[str, str], ...] = ()


def is_infrastructure(error: SafedistError) -> bool:
    """Whether an error that kept a job from running, or ended its agent, is the platform's and worth a retry."""
    return bool(error.platforms)


def of_error(error: SafedistError) -> Verdict | None:
    """The verdict on an error that kept a job from running, or ended its agent.

    None where the error says nothing about the job: it is the user's or a mistake (flytekit uploads it as it is), or
    this process is fenced off: another one has taken its place, and it has no say.
    """
    if isinstance(error, FencedError) or not is_infrastructure(error):
        return None
    return Verdict(Kind.RECOVERABLE, Origin.SYSTEM, error.platforms, error, time.time_ns())


def judge(
    cause: RankOutcome,
    reason: str,
    *,
    disk: str,
    limit: DiskLimit | None,
    returned: Sequence[int] = (),
    nodes: int = 1,
) -> Verdict:
    """What a job that failed with this root cause, and is not restarted any more, ends as.

    Args:
        cause: the root cause.
        reason: why there is no further restart.
        disk: what scratch held on the root cause's node, as text.
        limit: how much ranks may write there, or None.
        returned: ranks that had returned before, where the root cause is only the echo of a lost peer.
        nodes: how many the job has: one has no network between nodes.
    """
    end = cause.end
    # An echo where somebody was gone: else native code of this rank's may have given up by itself.
    failure = Failure.PEER_LOST if end.is_echo and returned else end.failure
    row = ROWS[failure]
    code = row.code or end.label
    opening, hint = _opening(cause, failure, disk=disk, limit=limit, returned=returned, nodes=nodes)
    text = f"{opening}{describe(cause)}\n\nNot restarted in place: {reason}."
    kind, origin = _BUDGETS[row.payer]
    if row.payer is Payer.FLYTE:
        error: SafedistError = RankKilledError(text, hint=hint)
    else:
        error = RankFailedError(text, hint=hint).with_code(code)
    return Verdict(kind, origin, code, error, cause.time_ns)


_BUDGETS = {
    Payer.NOBODY: (Kind.NON_RECOVERABLE, Origin.USER),
    Payer.RETRIES: (Kind.RECOVERABLE, Origin.USER),
    Payer.FLYTE: (Kind.RECOVERABLE, Origin.SYSTEM),
}


def _opening(
    cause: RankOutcome,
    failure: Failure,
    *,
    disk: str,
    limit: DiskLimit | None,
    returned: Sequence[int],
    nodes: int,
) -> tuple[str, str]:
    """What stands before the description of a failure, and the hint behind it."""
    hint, raised = ROWS[failure].hint, cause.raised
    if failure is Failure.FULL_SHARED_MEMORY:
        return f"rank {cause.rank} found the node's shared memory (/dev/shm) full.\n\n", hint
    if raised is not None and FULL_ERRNOS.intersection(raised.errnos):
        allowed = f"limited to {limit}" if limit is not None else "with no size limit"
        opening = f"rank {cause.rank} ran out of disk space. Scratch is {allowed}: {disk}\n\n"
        return opening, ROWS[Failure.FULL_DISK].hint
    if failure is Failure.MISTAKE and raised is not None:
        return "", (mistake(raised.message) or ("", False))[0]
    network = _NETWORK_HINT if nodes > 1 else ""
    openings = {
        Failure.PEER_LOST: (f"{_echo(returned)}\n\n", _RETURNED_HINT if returned else network),
        Failure.NOT_MET: (f"{_NOT_MET}. The first to give up:\n\n", "; else ".join(filter(None, (hint, network)))),
        Failure.TIMED_OUT: (f"{_TIMED_OUT}. ", "; or ".join(filter(None, (hint, network)))),
    }
    return openings.get(failure, ("", hint))


def _echo(returned: Sequence[int]) -> str:
    lost = "every rank that failed had only lost its connection to others: none failed by itself, and no node was lost"
    if not returned:
        return f"{lost}. The first to lose one:"
    ranks = ", ".join(map(str, returned))
    return f"{lost}. Rank(s) {ranks} had already returned from the task's function. The first to miss them:"


_RETURNED_HINT = (
    "let every rank take part in the same number of collective operations (uneven data: drop the last batch, or "
    "torch's Join), or end the function with a barrier"
)
_NETWORK_HINT = "look at the network between the nodes (NCCL_DEBUG=INFO, the NIC's counters), and at their timeouts"
_NOT_MET = "the ranks did not come together in init_process_group, and none failed otherwise"
_TIMED_OUT = "a collective timed out: most likely ranks called different collectives"
