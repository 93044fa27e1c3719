"""Torch elastic's c10d rendezvous, with its timeouts set together and no call that can hang for ever."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
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

_SLICE = 0.5
"""Seconds between looks at the watch while torch elastic waits for the others."""

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


class _Timeouts(RendezvousTimeout):  # type: ignore[misc]  # torch is Any to mypy here
    """Torch elastic's timeouts, with a last call that depends on who is still to come."""

    def __init__(self, last_call: Callable[[], float], **others: timedelta) -> None:
        super().__init__(**others)
        self._now = last_call

    @property
    def last_call(self) -> timedelta:
        """Asked for when the minimum of nodes is there."""
        return timedelta(seconds=self._now())


def step_down(dynamic: Any, seconds: float) -> None:
    """Take this node out of torch elastic's round at once, where the others would wait until its heartbeat times out.

    Torch elastic does so itself, at the start of ``next_rendezvous``, and offers no other way; a version that does it
    differently leaves the node to its heartbeat timeout.
    """
    with suppress(AttributeError, TypeError, RendezvousError):
        dynamic._stop_heartbeats()
        dynamic._op_executor.run(dynamic_rendezvous._RendezvousExitOp(), time.monotonic() + seconds)


def stop_beating(dynamic: Any) -> None:
    """End torch elastic's own keep-alives, where its store is lost: they would go on failing."""
    with suppress(AttributeError, TypeError, RendezvousError):
        dynamic._stop_heartbeats()


def open_dynamic(
    settings: RangeSettings, *, state: Connection, rounds: Any, address: str, last_call: Callable[[], float]
) -> Any:
    """Torch elastic's handler for a range of nodes.

    A node that stops beating is forgotten after ``heartbeat_timeout``, when our own watchers miss it too: were
    torch's shorter, it would give away the place of a node that the others still wait for; were it longer, a new round
    would wait for the dead.

    Args:
        settings: the range and its times.
        state: connection for torch's state.
        rounds: TCPStore in which torch makes a prefix for each round; its timeout bounds torch's waits for node 0.
        address: how other nodes reach this one. Torch would take the fully qualified host name, which pods without a
            headless service of their own cannot resolve.
        last_call: seconds that the round which is forming waits for further nodes once the minimum is there.
    """
    heartbeat_timeout = timedelta(seconds=settings.heartbeat_timeout)
    beats = {"keep_alive_interval": settings.heartbeat_timeout / _KEEP_ALIVES, "keep_alive_max_attempt": _KEEP_ALIVES}
    # Older torch has no such parameters: there it forgets a node after 15 s, whatever was asked for.
    known = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    return DynamicRendezvousHandler.from_backend(
        settings.run_id,
        rounds,
        BoundedBackend(state, settings.run_id),
        settings.min_nodes,
        settings.max_nodes,
        address,
        _Timeouts(
            last_call, join=timedelta(seconds=settings.timeout), close=heartbeat_timeout, heartbeat=heartbeat_timeout
        ),
        **{name: value for name, value in beats.items() if name in known},
    )


def next_round(
    joining: Future[Any],
    *,
    check: Callable[[], None],
    too_few: Callable[[], Exception],
    deadline: float,
    patience: float,
) -> Any:
    """Torch elastic's next round; None where it came together and fell apart again.

    Args:
        joining: torch elastic's ``next_rendezvous``, on a thread of its own.
        check: raises what ends the wait.
        too_few: the error where the minimum did not come together.
        deadline: for that, on ``time.monotonic``'s clock.
        patience: seconds beyond it that torch elastic may take to say so itself.
    """
    while True:
        try:
            return joining.result(_SLICE)
        except FutureTimeoutError:
            check()
            if time.monotonic() > deadline + patience:
                raise too_few() from None
        except RendezvousTimeoutError as error:
            raise too_few() from error
        except (DistError, RendezvousError) as error:
            check()
            if time.monotonic() > deadline:
                raise too_few() from error
            return None
