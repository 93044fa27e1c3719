"""How a process joins its job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.agent.membership import Membership
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.errors import RendezvousError
from flytekitplugins_safedist.topology import Endpoint, Topology


@pytest.fixture
def taken():
    """A port that somebody's connection has: bound, and nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


@pytest.fixture
def led(taken):
    """Joins a range on this machine, at the port that is taken; they leave at the end."""
    joined: list[Membership] = []

    def join(heartbeat: float = 10) -> Membership:
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        place = Topology(None, 1, 2, 1, endpoint, "a test")
        rules = Rules("job", 1, 2, is_fixed=False, heartbeat=heartbeat)
        joined.append(Membership(rules, place, NoStore(), say=lambda _: None))
        return joined[-1]

    yield join
    for one in joined:
        one.close(ended=False)


def test_the_pod_that_leads_a_range_listens_as_soon_as_a_connection_gives_its_port_back(
    led: Callable[[], Membership], taken: socket.socket
) -> None:
    threading.Timer(0.5, taken.close).start()
    assert led().leads


@pytest.mark.timeout(60)
def test_a_port_that_is_never_given_back_is_an_error_of_its_own(led: Callable[..., Membership]) -> None:
    began = time.monotonic()
    with pytest.raises(RendezvousError, match="Address already in use"):
        led(heartbeat=1.5)
    assert time.monotonic() > began + 1.5, "a connection may have it for a moment"
