"""Two jobs that meet on one address by mistake: each is told of the other, and neither joins the other's group."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from ..errors import StoreLostError
from .client import Connection
from .protocol import Hello, Keys

logger = logging.getLogger(__name__)

_WHAT = "another job's node answers at this job's address"
_VISITOR = "safedist/visitor"
"""The latest node of another job that came, as text; under no run's name, as the greeting is."""


def own_hello(connection: Connection, keys: Keys, patience: float) -> Hello:
    """The greeting of a store, where it is this job's.

    Raises:
        StoreLostError: there is none within ``patience`` seconds; or the store is another job's, which is told.
    """
    raw = connection.call("waiting for the greeting", lambda store: bytes(store.get(keys.hello)), patience)
    hello = Hello.parse(raw)
    if hello.run == keys.run_id:
        return hello
    visitor = f"{socket.gethostname()}, of run id {keys.run_id!r}"
    with suppress(StoreLostError):
        connection.call("saying who came", lambda store: store.set(_VISITOR, visitor))
    raise StoreLostError(
        _WHAT,
        where={"store": connection.where, "host": socket.gethostname()},
        seen=f"run id {hello.run!r}",
        expected=f"run id {keys.run_id!r}",
        hint="see which pod that address leads to (kubectl get pods,endpoints -o wide): its name may still lead to a "
        "pod that is gone, or two jobs share a machine's port (hostNetwork, MASTER_PORT)",
    )


def met(error: StoreLostError) -> bool:
    """Whether the store that was reached is another job's."""
    return error.what == _WHAT


class Visitors:
    """For the store's host: says in the log once who came of another job."""

    def __init__(self) -> None:
        self._said = ""

    def look(self, control: Connection) -> None:
        """Say it, if there is somebody new."""
        visitor = control.call("seeing who came", lambda store: bytes(store.compare_set(_VISITOR, "", ""))).decode()
        if visitor and visitor != self._said:
            self._said = visitor
            logger.warning(
                f"a node of another job came to this job's store and was turned away: {visitor}. Next step: see why "
                "that job has this pod's address: a name that leads here, or a machine's port that two jobs share"
            )
