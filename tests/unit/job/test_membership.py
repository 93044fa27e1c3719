"""How a process joins its job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from flytekitplugins_safedist.job.facts import Rules
from flytekitplugins_safedist.job.membership import Membership
from flytekitplugins_safedist.topology import Endpoint, Topology


@pytest.fixture
def taken():
    """A port that somebody's connection has: bound, and nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


@pytest.fixture
def led(taken):
    """Joins a range of this machine at the port that is taken; they leave at the end."""
    joined: list[Membership] = []

    def join() -> Membership:
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        place = Topology(
            node_rank=None, min_nodes=1, max_nodes=2, nproc_per_node=1, endpoint=endpoint, source="a test", alone=False
        )
        rules = Rules("job", 1, 2, fixed=False, heartbeat=10)
        joined.append(Membership(rules, place, open_round=lambda _: {}, local=None, say=lambda _: None))
        return joined[-1]

    yield join
    for one in joined:
        one.close(ended=False)


def test_the_pod_that_leads_a_range_listens_as_soon_as_a_connection_gives_its_port_back(
    led: Callable[[], Membership], taken: socket.socket
) -> None:
    threading.Timer(0.5, taken.close).start()
    assert led()._server is not None
