"""A pod that comes back when its job's attempt has been decided: it finds the verdict in the store, and leaves with 0.

Node 0 leaves when it has uploaded. A pod that was killed before it could leave is started again by the operator, and
would otherwise wait for node 0's store until ``Timeouts.rendezvous`` is over, fail, be started again, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

from ..store.errors import one_line

LEAVES = "this attempt has ended, and its result is uploaded: nothing is left to do here"
"""The last line of a pod that came too late."""


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
