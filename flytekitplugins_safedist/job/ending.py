"""How a node ends: what the job came to, who uploads it, and the order in which nodes leave.

One rule for all: exit 0 means that the attempt's verdict is in the store; anything else means that this process died
undecided, and that its pod is to be replaced. An operator takes the whole job for succeeded when node 0's pod has
exited 0, or, with an elastic policy, when any pod has. So no pod may exit 0 before the upload. flytekit uploads after
the task has returned; between the two, node 0's coordinator stays open: it is kept here, for the entrypoint to close.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .. import lastwords, stopping
from ..errors import (
    FencedError,
    GroupClosedError,
    JobInterruptedError,
    NodeLostError,
    NotReplacedError,
    PreflightError,
    RendezvousError,
    RendezvousTimeoutError,
    SafedistError,
)
from ..handoff import Slot
from ..rank.outcome import RankOutcome
from ..store.errors import one_line
from .facts import End, earlier_rounds
from .link import GivenUp, LinkLost
from .messages import Go, Hello, Leave, Refused, TheEnd, Uploaded, Welcome
from .verdict import Verdict, judge, of_error

if TYPE_CHECKING:
    from ..agent.disk import DiskLimit
    from ..topology import Topology
    from .membership import Membership
    from .sign import SignWatch

TURN_SECONDS = 5.0
"""Between two nodes that would upload the same verdict: time for the first one to do it."""

LAST_TURN_SECONDS = 60.0
"""The longest that a node waits for its turn, however many are before it."""


Finish = TheEnd | GivenUp
"""How the job ended, as this node knows it: as the coordinator says; or there is none to say it."""


def verdict_of(finish: Finish, limit: DiskLimit | None, nodes: int) -> Verdict | None:
    """The verdict to upload; None where the job succeeded.

    Args:
        finish: how it ended.
        limit: how much ranks may write, or None.
        nodes: how many the job has at most.
    """
    if isinstance(finish, GivenUp):
        return of_error(finish.error)
    end = finish.end
    if end.kind == "done":
        return None
    if end.kind == "failed":
        cause = RankOutcome.from_json(end.outcome)
        earlier = earlier_rounds(finish.history, cause.round)
        return judge(cause, end.reason, disk=end.disk, limit=limit, returned=end.returned, nodes=nodes, earlier=earlier)
    return of_error(_of_platform(end))


def _of_platform(end: End) -> SafedistError:
    if end.kind == "preflight":
        is_late = end.reason.endswith("Checks")
        mend = "raise Preflight(timeout=...)" if is_late else "keep the next attempt off that machine (kubectl cordon)"
        hint = f"{mend}, or repair it; Preflight(action='report') goes on"
        unfit = PreflightError(f"before the first rank: {end.text}", hint=hint)
        unfit.code = end.reason
        return unfit
    if end.kind == "replacements":
        return GroupClosedError(end.text)
    kind = NotReplacedError if end.kind == "lost" else RendezvousTimeoutError
    return kind(
        end.text,
        seen=f"missing: {', '.join(end.missing) or 'none'}",
        expected="every node of the job",
        hint="look at the missing pods: pending, crashed, or unable to reach node 0; or raise timeouts.rendezvous",
    )


_SAME_NAME = "nothing, if the pod was recreated; otherwise two pods carry the same name"
_ONE_IMAGE = "every pod of the job must run the same image and configuration"
_THIS_NODE = "look for what is different on this node: its machine, its disk, its devices"
_TOO_MANY = (
    "look at the job's pods (kubectl get pods): more of them than the job has nodes, or one that dies again and again"
)
_REFUSED: dict[str, tuple[type[RendezvousError], str, str]] = {
    "fenced": (FencedError, "another process has taken this one's place", _SAME_NAME),
    "begun": (NodeLostError, "this node cannot take part in a job that has begun, and goes on without it", _THIS_NODE),
    "version": (RendezvousError, "node 0 leads another group than this node's", _ONE_IMAGE),
}


def refusal(refused: Refused, me: Hello) -> RendezvousError:
    """The error of a process that has no part in its job."""
    no_part = (NodeLostError, "this node has no part in the job", _TOO_MANY)
    kind, what, hint = _REFUSED.get(refused.why, no_part)
    return kind(what, where={"node": me.node, "host": me.host}, seen=refused.text, hint=hint)


# --- the order in which nodes leave ---------------------------------------------------------------------------------
_OPEN: Slot[Membership] = Slot()
"""Node 0's, with the job's coordinator, to be closed after the upload: from the task to the entrypoint."""


def stay(job: Membership) -> None:
    """Node 0, when the task returns: keep the coordinator until :func:`leave`."""
    _OPEN.value = job


def leave(*, uploaded: bool) -> None:
    """Node 0, after flytekit has ended: tell the others, wait (bounded) until they have left, and close.

    Args:
        uploaded: whether ``outputs.pb`` or ``error.pb`` is where it should be.
    """
    job = _OPEN.take()
    if job is None:
        return
    job.tell(Uploaded(uploaded, "" if uploaded else "flytekit ended with an error before its upload"))
    job.close(ended=True)


def follow(job: Membership, *, timeout: float, exists: Callable[[], bool]) -> bool:
    """After the end, on a node that does not upload: wait until node 0 has.

    Args:
        job: this node in its job.
        timeout: seconds that the upload may take.
        exists: whether the verdict can be seen in the store; asked only when node 0 cannot be.

    Returns:
        True when the verdict is there; False where the job goes on: node 0 was lost before its upload.

    Raises:
        NodeLostError: node 0 is too slow, or says that there is no upload. Infrastructure: the attempt is lost.
    """
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        item = job.heard(left)
        if isinstance(item, Leave):
            return item.ok or _settled(job, exists, item.why)
        if isinstance(item, LinkLost | GivenUp | Refused | Go):
            there, _ = _looked(exists)
            if not there:
                job.inbox.put(item)  # for the agent, which drives on
            return there
        if isinstance(item, Welcome):
            continue  # the same coordinator, on a new connection
    return _settled(job, exists, f"no word from node 0 within {timeout:g} s")


def _settled(job: Membership, exists: Callable[[], bool], seen: str) -> bool:
    there, trouble = _looked(exists)
    if there:
        return True
    raise NodeLostError(
        "this node's ranks had finished, and no upload by node 0 can be seen",
        where={"node": job.me.node, "host": job.me.host},
        seen=seen + trouble,
        expected="outputs.pb or error.pb at the output prefix",
        hint="look at node 0's pod and log: killed before its upload, or storage refused it or hangs",
    )


def _looked(exists: Callable[[], bool]) -> tuple[bool, str]:
    try:
        return exists(), ""
    except Exception as unreachable:  # whatever the store's client raises: this node's end is the same
        return False, f"; storage cannot be asked: {one_line(unreachable)}"


def leave_to_the_leader(
    given_up: GivenUp, watch: SignWatch | None, exists: Callable[[], bool], patience: float
) -> None:
    """This node cannot reach whoever leads the job. Where that one lives, this node has no say: only its pod is to be
    replaced.

    Args:
        given_up: what the search has come to.
        watch: what is known of the leader's sign; None where there is no store.
        exists: whether the verdict is in the store; asks it.
        patience: seconds that the store may be away.

    Raises:
        NodeLostError: the leader's sign is renewed, or the store cannot be read.
    """
    state = "nobody" if watch is None else watch.wait(exists, patience)
    if state not in ("led", "unknown"):
        return
    seen = "its sign in the store is renewed" if state == "led" else "nor can the store be read"
    raise NodeLostError(
        "this pod cannot reach the pod that leads the job",
        where=given_up.error.where,
        seen=f"{given_up.error.seen}; {seen}",
        expected="node 0's agent to answer under that name",
        hint="the job goes on without this pod; see what keeps it from that port: a network policy, a security group, "
        "this machine's network",
    ) from given_up.error


def is_reported_by_another(turn: int, exists: Callable[[], bool]) -> bool:
    """Where nobody could end the job for all: wait for this node's turn, and look meanwhile whether the verdict is in
    the store; False: it is to upload it.

    Two nodes may upload all the same, when the store is slow: what the first one left stays.

    Args:
        turn: 0 for the first.
        exists: asks the store.
    """
    until = time.monotonic() + min(LAST_TURN_SECONDS, turn * TURN_SECONDS)
    while True:
        with suppress(Exception):  # whatever the store's client raises: the upload will show whether the store is down
            if exists():
                return True
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(TURN_SECONDS / 2, left))


# --- processes that leave their job undecided -----------------------------------------------------------------------


class Undecided(SystemExit):
    """This process leaves its job undecided; not an ``Exception``, which flytekit would take for the user's."""

    def __init__(self) -> None:
        super().__init__(stopping.EXIT_UNDECIDED)


def is_the_end(error: SafedistError, place: Topology) -> bool:
    """Whether an error of the platform's on a node is its job's end: where nobody replaces the pod, or there is one
    alone, which would meet it again."""
    return place.alone or (place.max_nodes == 1 and not isinstance(error, JobInterruptedError))


@contextmanager
def replaced_when_undecided(place: Topology, say: Callable[[str], object]) -> Iterator[None]:
    """Inside, an error of the platform's that is not the job's end ends this process, for its pod to be replaced.

    A pod that nobody replaces keeps the error: it is its job's end.

    Args:
        place: this node's.
        say: takes a sentence for the node's log.

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
            text, prefix = f"this node leaves ({error.what}): {goes_on} when its replacement is there", ""
            say(f"nothing is wrong with the task, and nothing is uploaded: {text}")
        else:
            text, prefix = str(error), "this pod is to be replaced: "
            say(f"infrastructure failure; nothing is uploaded, so that this pod is replaced: {error}")
        lastwords.keep(text, prefix)
        raise Undecided from error
