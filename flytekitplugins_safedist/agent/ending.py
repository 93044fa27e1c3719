"""How a node ends: what the job came to, who uploads it, and the order in which nodes leave.

One rule for all: exit 0 means that the attempt's verdict is in the store; anything else means that this process died
undecided, and that its pod is to be replaced. An operator takes the whole job for succeeded when node 0's pod has
exited 0, or, with an elastic policy, when any pod has. So no pod may exit 0 before the upload. flytekit uploads after
the task has returned; between the two, node 0's coordinator stays open: it is kept here, for the entrypoint to close.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import lastwords, stopping
from ..coordinator.coordinator import FENCED
from ..errors import (
    FencedError,
    GroupClosedError,
    JobInterruptedError,
    NodeLostError,
    NotReplacedError,
    PreflightError,
    RendezvousTimeoutError,
    SafedistError,
)
from ..handoff import Slot
from ..store.errors import one_line
from . import verdict
from .policy import CUT_OFF
from .verdict import Verdict

if TYPE_CHECKING:
    from ..coordinator import books
    from ..topology import Topology
    from .actions import Exit
    from .membership import Membership

logger = logging.getLogger(__name__)


def verdict_of(end: books.Verdict, job: Membership, known: books.Books) -> Verdict | None:
    """The verdict to upload; None where the job succeeded.

    Args:
        end: how it ended.
        job: this node in it.
        known: the books of the job.
    """
    if end.kind == "success":
        return None
    if end.kind == "failed" and end.cause is not None:
        told = verdict.told_by(end.cause)
        if told is not None:
            outcome, disk = told
            nodes = job.rules.max_nodes
            earlier = known.earlier(end.cause.round)
            return verdict.judge(outcome, end.text, disk=disk, returned=end.returned, nodes=nodes, earlier=earlier)
    if end.kind == "memory":
        return verdict.of_full_memory(end.text)
    return verdict.of_error(_of_platform(end, job))


def _of_platform(end: books.Verdict, job: Membership) -> SafedistError:
    has_begun = end.round.number >= 0
    if end.kind == "failed":
        text = f"{end.cause}, and that node was lost before it could say more; not restarted in place: {end.text}"
        return NotReplacedError(text)
    if end.kind == "unfit":
        is_late = end.code.endswith("Checks")
        mend = "raise Preflight(timeout=...)" if is_late else "keep the next attempt off that machine (kubectl cordon)"
        hint = f"{mend}, or repair it; Preflight(action='report') goes on"
        unfit = PreflightError(f"before the first rank: {end.text}", hint=hint)
        unfit.code = end.code
        return unfit
    if end.kind == "lost":
        return GroupClosedError(end.text)
    if end.nodes == ("0",) and not job.leads:
        return job.link.missing_error()
    kind = NotReplacedError if has_begun else RendezvousTimeoutError
    return kind(
        end.text,
        seen=f"missing: {', '.join(end.nodes) or 'none'}",
        expected="every node of the job",
        hint="look at the missing pods: pending, crashed, or unable to reach node 0; or raise timeouts.rendezvous",
    )


_SAME_NAME = "nothing, if the pod was recreated; otherwise two pods carry the same name"
_NO_PART = (
    "look at the job's pods (kubectl get pods): more of them than the job has nodes, or one that dies again and again; "
    "or at what is different on this node: its machine, its network, its devices"
)


def undecided(left: Exit, job: Membership) -> SafedistError:
    """The error of a process that has no further part in its job."""
    where = {"node": job.first.node, "host": socket.gethostname()}
    if left.why.startswith(FENCED):
        return FencedError("another process has taken this one's place", where=where, seen=left.why, hint=_SAME_NAME)
    if left.why == CUT_OFF:
        missing = job.link.missing_error()
        return NodeLostError(
            "this pod cannot reach the pod that leads the job",
            where=missing.where,
            seen=f"{missing.seen}; its sign in the store is renewed",
            expected=missing.expected,
            hint="the job goes on without this pod; see what keeps it from that port: a network policy, a security "
            "group, this machine's network",
        )
    return NodeLostError("this node has no further part in the job", where=where, seen=left.why, hint=_NO_PART)


def cannot_do_its_part(error: SafedistError, place: Topology, seen: str | None = None) -> NodeLostError:
    """What such an error comes to on a node that uploads nothing: it is told in its log and by its exit code."""
    name = "this node" if place.node_rank is None else f"node {place.node_rank}"
    what = f"{name} cannot do its part: {type(error).__name__}: {error}"
    return NodeLostError(what, seen=seen, hint="repair that on this node")


# --- the order in which nodes leave ---------------------------------------------------------------------------------
def is_decided(ask: Callable[[], bool]) -> bool | None:
    """Whether the attempt's outputs, or its one error, are in the store before this pod begins: it was killed before it
    could leave, or comes late. Else it would wait for a node 0 that has left. None where the store does not say.

    Args:
        ask: the store.
    """
    try:
        return ask()
    except Exception as error:  # whatever the store's client raises: the job itself will show whether the store is down
        logger.info(f"cannot tell whether this attempt has ended already ({one_line(error)})")
        return None


_OPEN: Slot[Membership] = Slot()
"""Node 0's, with the job's coordinator, to be closed after the upload: from the task to the entrypoint."""


def stay(job: Membership) -> None:
    """Node 0, when the task returns: keep the coordinator until :func:`leave`."""
    _OPEN.value = job


def leave(*, uploaded: bool) -> None:
    """After flytekit has ended: tell the nodes that are led from here, wait (bounded) until they have left, and close.

    Args:
        uploaded: whether ``outputs.pb`` or ``error.pb`` is where it should be.
    """
    job = _OPEN.take()
    if job is not None:
        job.close(decided=uploaded)


TO_BE_REPLACED = "this pod is to be replaced: "
"""How the last line begins of a pod that leaves its job undecided."""


class Undecided(SystemExit):
    """This process leaves its job undecided; not an ``Exception``, which flytekit would take for the user's."""

    def __init__(self) -> None:
        super().__init__(stopping.EXIT_UNDECIDED)


def is_the_end(error: SafedistError, place: Topology) -> bool:
    """Whether an error of the platform's on a node is its job's end: where nobody replaces the pod, or there is one
    alone, which would meet it again."""
    return place.alone or (place.max_nodes == 1 and not isinstance(error, JobInterruptedError))


@contextmanager
def replaced_when_undecided(place: Topology) -> Iterator[None]:
    """Inside, an error of the platform's that is not the job's end ends this process, for its pod to be replaced.

    A pod that nobody replaces keeps the error: it is its job's end.

    Args:
        place: this node's.

    Raises:
        Undecided: see above.
    """
    try:
        yield
    except SafedistError as error:
        if not error.is_platforms or is_the_end(error, place):
            raise
        if isinstance(error, JobInterruptedError):
            goes_on = "the job goes on" if place.max_nodes > 1 else "the job begins anew"
            stood = f". When it was told, {error.seen}" if error.seen is not None else ""
            text, prefix = f"this node leaves ({error.what}): {goes_on} when its replacement is there{stood}", ""
            logger.info(f"nothing is wrong with the task, and nothing is uploaded: {text}")
        else:
            text, prefix = str(error), TO_BE_REPLACED
            logger.info(f"infrastructure failure; nothing is uploaded, so that this pod is replaced: {error}")
        lastwords.keep(text, prefix)
        raise Undecided from error
