"""A pod that comes back when its job's attempt has been decided: it finds the verdict in the store, and leaves with 0.

Node 0 leaves when it has uploaded. A pod that was killed before it could leave is started again by the operator, and
would otherwise wait for node 0's store until ``Timeouts.rendezvous`` is over, fail, be started again, and so on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import stopping
from ..store.errors import one_line

LOOK_SECONDS = 10.0
"""Between two looks while this node waits for the others."""


def is_decided(verdict: Callable[[], bool], say: Callable[[str], object]) -> bool:
    """Whether the attempt's outputs, or its one error, are in the store already.

    Args:
        verdict: asks the store.
        say: takes a sentence for the node's log.
    """
    try:
        return verdict()
    except Exception as error:  # whatever the store's client raises: the job itself will show whether the store is down
        say(f"cannot tell whether this attempt has ended already ({one_line(error)})")
        return False


@contextmanager
def leaving_when_decided(
    verdict: Callable[[], bool], say: Callable[[str], object], *, begun: Callable[[], bool]
) -> Iterator[None]:
    """Inside, and until this node's first round has begun, look for the verdict, and end this process with 0 when it is
    there. Nothing of the job has begun here: the rank server removes the scratch when this process is gone.

    Only in a container's process (:func:`.stopping.listening`); a user's own interpreter is not ended.
    """
    settled = threading.Event()

    def look() -> None:
        while not settled.wait(LOOK_SECONDS) and not begun():
            if is_decided(verdict, say) and not begun():
                say(LEAVES)
                stopping.decided(0)
                stopping.end()

    if stopping.listening():
        threading.Thread(target=look, name="safedist verdict", daemon=True).start()
    try:
        yield
    finally:
        settled.set()


LEAVES = "this attempt has ended, and its result is uploaded: nothing is left to do here"
"""The last line of a pod that came too late."""
