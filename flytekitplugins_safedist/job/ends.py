"""How a node ends whose job is ended by an error of the platform's, and not by what its ranks came to.

One rule for all: exit 0 means that the attempt's verdict is in the store; anything else means that this process died
undecided, and that its pod is to be replaced. So of each such end it must be settled whether it is the job's end at
all, and who uploads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING

from .. import lastwords, stopping
from ..errors import JobInterruptedError, RendezvousError, RendezvousTimeoutError, SafedistError
from .verdict import is_infrastructure

if TYPE_CHECKING:
    from ..rendezvous.protocol import End
    from ..rendezvous.session import RendezvousSession
    from ..topology import Topology

TURN_SECONDS = 5.0
"""Between two nodes that would upload the same verdict: time for the first one to do it."""

LAST_TURN_SECONDS = 60.0
"""The longest that a node waits for its turn, however many are before it."""

_DECIDED = ("timeout", "lost", "replacements")
"""Ends in the job's store that are the job's end; after the others somebody's place is taken by a new process."""


class Duty(Enum):
    """What falls to a node when its job has ended."""

    UPLOADS = "uploads"
    """It uploads the verdict; the others wait for that."""
    FOLLOWS = "follows"
    """It leaves when the verdict is uploaded."""
    SPEAKS = "speaks"
    """Nobody who could say so is there: nodes look for the verdict in turn, and the first that finds none uploads."""


class Undecided(SystemExit):
    """This process leaves its job undecided; not an ``Exception``, which flytekit would take for the user's."""

    def __init__(self) -> None:
        super().__init__(stopping.EXIT_UNDECIDED)


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
        if not is_infrastructure(error) or place.alone:
            raise
        if place.max_nodes == 1 and not isinstance(error, JobInterruptedError):
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


def part_of(error: RendezvousError, handler: RendezvousSession) -> Duty | None:
    """What falls to this node after an error that ended its agent; None where that is not the job's end.

    Args:
        error: what ended the agent.
        handler: this node's rendezvous, not yet left.
    """
    if handler.nodes == 1 and handler.node_0_holds_store:
        return None
    end: End | None = None
    uploads = False
    with suppress(RendezvousError):
        end = handler.jobs.end()
        uploads = handler.uploads
    if end is not None and end.kind in _DECIDED:
        return Duty.UPLOADS if uploads else Duty.FOLLOWS
    # Nobody could end the job for all: in a fixed size node 0 never came, in a range too few nodes did.
    return Duty.SPEAKS if end is None and isinstance(error, RendezvousTimeoutError) else None


def turn_of(handler: RendezvousSession) -> int:
    """This node's place in the order in which nodes upload what nobody else does."""
    return 0 if handler.holds_store else max(1, handler.node_rank)


def is_reported_by_another(
    turn: int,
    exists: Callable[[], bool],
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait for this node's turn, and look meanwhile whether the verdict is in the store; False: it is to upload it.

    Two nodes may upload all the same, when the store is slow: what the first one left stays (:mod:`..flyte.uploads`).

    Args:
        turn: 0 for the first.
        exists: asks the store.
        wait, clock: how to wait, and for how long that was.
    """
    until = clock() + min(LAST_TURN_SECONDS, turn * TURN_SECONDS)
    while True:
        with suppress(Exception):  # whatever the store's client raises: the upload will show whether the store is down
            if exists():
                return True
        left = until - clock()
        if left <= 0:
            return False
        wait(min(TURN_SECONDS / 2, left))
