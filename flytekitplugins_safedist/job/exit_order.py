"""The order in which nodes leave: node 0 when its outputs (or the one error) are uploaded, then the others.

An operator takes the whole job for succeeded when node 0's pod has exited 0, or, with an elastic policy, when any pod
has. So no pod may exit 0 before the upload. flytekit uploads after the task has returned; between the two, node 0's
store must stay open. It is kept here, for the entrypoint to close.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import NodeLostError, RendezvousError, StoreLostError
from ..flyte.storage_errors import one_line
from ..handoff import HERE

if TYPE_CHECKING:
    from ..rendezvous.session import RendezvousSession


def stay(handler: RendezvousSession) -> None:
    """Node 0, when the task returns: keep the store open until :func:`leave`."""
    HERE.open_rendezvous = handler


def leave(*, uploaded: bool) -> None:
    """Node 0, after flytekit has ended: tell the others, wait (bounded) until they have left, and close the store.

    Args:
        uploaded: whether ``outputs.pb`` or ``error.pb`` is where it should be.
    """
    handler: RendezvousSession | None = HERE.take("open_rendezvous")
    if handler is None:
        return
    # A store that is gone (in a range another node may hold it) takes nothing back: the others look at the upload.
    with suppress(RendezvousError):
        if uploaded:
            handler.jobs.set_uploaded()
        else:
            handler.jobs.set_not_uploaded("flytekit ended with an error before its upload")
    with suppress(RendezvousError):
        handler.shutdown()


def follow(handler: RendezvousSession, *, timeout: float, exists: Callable[[], bool]) -> None:
    """Node r > 0, when its ranks are done: return when node 0 has uploaded.

    Args:
        handler: this node's rendezvous.
        timeout: seconds that the upload may take.
        exists: whether the uploaded object can be seen; asked only when node 0 cannot be.

    Raises:
        StoreLostError: node 0 is gone, and no upload can be seen: this node has not left, for the job may go on.
        NodeLostError: node 0 is too slow, or says that there is no upload. Infrastructure: the attempt is lost.
    """
    try:
        handler.jobs.wait_uploaded(timeout)
    except RendezvousError as error:
        seen, there = str(error), False
        try:
            there = exists()
        except Exception as unreachable:  # whatever the store's client raises: this node's end is the same
            seen += f"; storage cannot be asked: {one_line(unreachable)}"
        if not there and isinstance(error, StoreLostError):
            raise
        handler.leave()
        if there:
            return
        raise NodeLostError(
            "this node's ranks had finished, and no upload by node 0 can be seen",
            where={"node": handler.node_rank},
            seen=seen,
            expected="outputs.pb or error.pb at the output prefix",
            hint="look at node 0's pod and log: killed before its upload, or storage refused it or hangs",
        ) from error
    handler.leave()
