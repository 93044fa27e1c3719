"""Torch elastic's c10d rendezvous, with its timeouts set together and no call that can hang for ever."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from ..errors import StoreLostError
from .client import Connection

if TYPE_CHECKING:
    from .settings import RangeSettings

_KEEP_ALIVES = 6
"""Keep-alives within the time after which torch elastic forgets a node; it compares nodes' wall clocks for that."""


class BoundedBackend(RendezvousBackend):  # type: ignore[misc]  # torch is Any to mypy here
    """Torch elastic's backend over a connection whose calls are given up when the store does not answer.

    Its keep-alive thread and its questions would otherwise hang for ever in a frozen store, whatever their timeouts.
    """

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self._backend = connection.call("opening the state", lambda store: C10dRendezvousBackend(store, run_id))

    @property
    def name(self) -> str:
        """As torch elastic's own."""
        return str(self._backend.name)

    def get_state(self) -> Any:
        """See torch's RendezvousBackend."""
        return self._bounded(self._backend.get_state)

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """See torch's RendezvousBackend."""
        return self._bounded(lambda: self._backend.set_state(state, token))

    def _bounded(self, op: Callable[[], Any]) -> Any:
        try:
            return self._connection.call("asking who is there", lambda _: op())
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error


def open_dynamic(settings: RangeSettings, *, state: Connection, rounds: Any, address: str) -> Any:
    """Torch elastic's handler for a range of nodes.

    A node that stops beating is forgotten after ``silence``, the same time after which our own watchers miss it: were
    torch's shorter, it would give away the place of a node that the others still wait for; were it longer, a new round
    would wait for the dead.

    Args:
        settings: the range and its times.
        state: connection for torch's state.
        rounds: TCPStore in which torch makes a prefix for each round; its timeout bounds torch's waits for node 0.
        address: how other nodes reach this one. Torch would take the fully qualified host name, which pods without a
            headless service of their own cannot resolve.
    """
    silence = timedelta(seconds=settings.silence)
    beats = {"keep_alive_interval": settings.silence / _KEEP_ALIVES, "keep_alive_max_attempt": _KEEP_ALIVES}
    # Older torch has no such parameters: there it forgets a node after 15 s, whatever was asked for.
    known = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    return DynamicRendezvousHandler.from_backend(
        settings.run_id,
        rounds,
        BoundedBackend(state, settings.run_id),
        settings.min_nodes,
        settings.max_nodes,
        address,
        RendezvousTimeout(
            join=timedelta(seconds=settings.timeout),
            last_call=timedelta(seconds=settings.last_call),
            close=silence,
            heartbeat=silence,
        ),
        **{name: value for name, value in beats.items() if name in known},
    )
