"""From a root cause, or the error that ended an agent, to what Flyte and the user are told. Pure.

A verdict is uploaded once, and the pods then exit 0. What Flyte does then, who pays for another attempt decides (of the
platform's own budget there are three by default).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..coordinator.books import Cause, Round
from ..coordinator.messages import Status
from ..errors import FencedError, RankFailedError, RankKilledError, SafedistError
from ..failures import Failure, Payer, mistake, of_errnos
from ..rank.outcome import Raised, RankOutcome
from ..rank.outcome_text import describe, how
from ..texts import encodable

NOT_STARTED = "no rank was started"
"""Why there is no restart after an error that keeps a node from beginning."""


@dataclass(frozen=True)
class Verdict:
    """The one error of a failed job, as it is uploaded.

    Attributes:
        payer: who pays for another attempt, if anybody.
        error: what the user reads; its code is what metrics and alerts are keyed on.
        time_ns: when the root cause happened, in nanoseconds since the epoch.
        decks: name and HTML of those that a failed rank left.
        raised: the exception of the rank that is the root cause, if it raised one.
    """

    payer: Payer
    error: SafedistError
    time_ns: int
    decks: tuple[dict[str, str], ...] = ()
    raised: Raised | None = None


def of_error(error: SafedistError) -> Verdict | None:
    """The verdict on an error that kept a job from running, or ended its agent.

    None where the error says nothing about the job: it is the user's or a mistake (flytekit uploads it as it is), or
    this process is fenced off: another one has taken its place, and it has no say.
    """
    if isinstance(error, FencedError) or not error.is_platforms:
        return None
    return Verdict(Payer.FLYTE, error, time.time_ns())


def of_full_memory(text: str) -> Verdict:
    """The verdict on nodes that were lost, the last of them with its container's memory full: the kernel most likely
    ended all of it, and left nobody to say so."""
    row = Failure.OUT_OF_MEMORY.row
    error = RankFailedError(text, hint="raise mem= in requests and limits, or use less: fewer ranks per node")
    error.code = row.code
    return Verdict(row.payer, error, time.time_ns())


def judge(
    cause: RankOutcome,
    reason: str,
    *,
    disk: str = "",
    returned: Sequence[int] = (),
    nodes: int = 1,
    earlier: Sequence[str] = (),
) -> Verdict:
    """What a job that failed with this root cause, and is not restarted any more, ends as.

    Args:
        cause: the root cause.
        reason: why there is no further restart.
        disk: what scratch might hold on the root cause's node, and held, as text.
        returned: ranks that had returned before, where the root cause is only the echo of a lost peer.
        nodes: how many the job has: one has no network between nodes.
        earlier: how the rounds before ended, in one line each.
    """
    # An echo where somebody was gone: else native code of this rank's may have given up by itself.
    failure = Failure.PEER_LOST if cause.echo and cause.failure.row.echo and returned else cause.failure
    raised = cause.raised.message if cause.raised is not None else ""
    if failure is Failure.PEER_LOST and not returned and _NOT_AT_BARRIER.search(raised):
        failure = Failure.TIMED_OUT
    row = failure.row
    opening, hint = _opening(cause, failure, returned=returned, nodes=nodes)
    text = f"{opening.format(rank=cause.rank, scratch=disk or _NOT_SEEN)}{describe(cause)}"
    text += "".join(f"\n\nBefore that, {line}." for line in earlier)
    text += f"\n\nNot restarted in place: {reason}."
    error: SafedistError = (RankKilledError if row.payer is Payer.FLYTE else RankFailedError)(text, hint=hint)
    error.code = row.code or cause.label
    return Verdict(row.payer, error, cause.time_ns, raised=cause.raised)


# torch says the same of a rank that is late and of one that is gone, whose own end would be the cause.
_NOT_AT_BARRIER = re.compile(r"failed to pass monitoredBarrier")
_NOT_SEEN = "not measured: its node was lost before"


def _opening(cause: RankOutcome, failure: Failure, *, returned: Sequence[int], nodes: int) -> tuple[str, str]:
    """What stands before the description of a failure, and the hint behind it."""
    raised, row = cause.raised, failure.row
    of_disk = of_errnos(raised.errnos) if raised is not None else ()
    if failure is not Failure.FULL_SHARED_MEMORY and Failure.FULL_DISK in of_disk:
        row = Failure.FULL_DISK.row  # also where it is an echo, or the user calls it recoverable
    if failure is Failure.MISTAKE and raised is not None:
        return "", (mistake(raised.message) or ("", False))[0]
    if failure is Failure.PEER_LOST and returned:
        return _RETURNED.format(returned=_listed(returned)), _RETURNED_HINT
    waits = failure in (Failure.PEER_LOST, Failure.NOT_MET, Failure.TIMED_OUT) and nodes > 1
    if waits and raised is not None and _AT_LOOPBACK.search(raised.message):
        return row.opening, _LOOPBACK_HINT
    return row.opening, "; or ".join(filter(None, (row.hint, _NETWORK_HINT if waits else "")))


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_RETURNED = "{returned} finished early, and the others then lost the connection to it. The first of them is: "
_RETURNED_HINT = (
    "let every rank take part in the same number of collective operations (uneven data: drop the last batch, or "
    "torch's Join), or end the function with a barrier"
)
# Gloo tells the others the address of its host's name, and a rank that calls it calls itself.
_AT_LOOPBACK = re.compile(r"connectFullMesh failed.*remote=\[(127\.|::1\])", re.DOTALL)
_LOOPBACK_HINT = (
    "on a node its own name leads to a loopback address (hostNetwork, a line of /etc/hosts), which gloo has told the "
    'others. Name an interface that all have: @task(environment={"GLOO_SOCKET_IFNAME": "eth0"}) (ip -brief address)'
)
_NETWORK_HINT = "look at the network between the nodes (NCCL_DEBUG=INFO, the NIC's counters), and at their timeouts"


# --- a failure, as all nodes of the job know it -----------------------------------------------------------------------
_NAME_CHARACTERS = 200
"""Of an error's name: every node keeps that of each restart."""

_DISK_CHARACTERS = 2048
"""Of what is told about scratch: a line per rank, for more ranks than a node has."""


def cause_of(outcome: RankOutcome, round_: Round, at: Status, *, limit: int, disk: str = "") -> Cause:
    """A failure, as all nodes know it.

    Args:
        outcome: of the rank.
        round_: in which.
        at: its node.
        disk: what scratch may hold there, and does, where that matters.
        limit: bytes of its text.
    """

    def dump(told: RankOutcome) -> str:
        return json.dumps({"outcome": told.to_json(), "disk": encodable(disk[:_DISK_CHARACTERS])}, ensure_ascii=False)

    return Cause(
        round_,
        outcome.rank,
        _name(outcome)[:_NAME_CHARACTERS],
        dump(outcome.fitting(limit, dump)),
        outcome.time_ns,
        echo=outcome.echo,
        repeats=(outcome.raised is not None and outcome.raised.repeats)
        or (outcome.gpu is not None and outcome.gpu.stays),
        is_timeout=outcome.timed_out,
        step=outcome.step if outcome.is_the_codes else -1,
        machine=at.ground,
        is_machines=outcome.gpu is not None and outcome.gpu.stays,
        where=f"{at.name} ({at.where})",
    )


def told_by(cause: Cause) -> tuple[RankOutcome, str] | None:
    """The inverse: the outcome's record, and what scratch holds; None where the text is gone."""
    try:
        data = json.loads(cause.text)
        return RankOutcome.from_json(data["outcome"]), str(data["disk"])
    except (ValueError, KeyError, TypeError):
        return None


def _name(outcome: RankOutcome) -> str:
    if outcome.gpu is not None:
        return outcome.gpu.what
    return how(outcome).removeprefix("raised ")
