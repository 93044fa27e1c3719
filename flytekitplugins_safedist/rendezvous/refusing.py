"""What a node does that cannot take part: it comes all the same, with its error, and ends the job with it.

A node that stays away with an error that only it knows leaves the others waiting for it until their deadline, and the
error is lost.
"""

from __future__ import annotations

import time

from ..errors import NodeLostError
from .group import FixedGroup
from .protocol import End
from .range import RangeGroup


def refuse_fixed(group: FixedGroup, text: str) -> End:
    """In a group of fixed size: claim this node's place, and end the group.

    Raises:
        NodeLostError: another process was in this place before, and could take part: only this machine is in trouble.
    """
    group.connect(time.monotonic() + group.settings.timeout)
    if group.incarnation > 1:
        raise _goes_on(f"node {group.node_rank}'s place was taken before")
    # Who comes a moment later is to find the end, not a node 0 that never was.
    group.expected = group.nodes
    return group.close("failed", text)


def refuse_range(group: RangeGroup, text: str) -> End:
    """In a range: end the job if it has not begun.

    Raises:
        NodeLostError: it has: the others can do without this node.
    """
    end = group.refuse(text, time.monotonic() + group.settings.timeout)
    if end is None:
        raise _goes_on("the job has had a round")
    return end


def _goes_on(seen: str) -> NodeLostError:
    return NodeLostError(
        "this node cannot take part in a job that has begun, and goes on without it",
        seen=seen,
        hint="look for what is different on this node: its machine, its disk, its devices",
    )
