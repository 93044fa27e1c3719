"""How a process joins its job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from flytekitplugins_safedist import envvars
from flytekitplugins_safedist.errors import RendezvousError
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
    """Joins a job of this machine, by default a range at the port that is taken; they leave at the end."""
    joined: list[Membership] = []

    def join(node_rank: int | None = None, endpoint: Endpoint | None = None, heartbeat: float = 10) -> Membership:
        place = Topology(
            node_rank=node_rank,
            min_nodes=1 if node_rank is None else 2,
            max_nodes=2,
            nproc_per_node=1,
            endpoint=endpoint or Endpoint("127.0.0.1", taken.getsockname()[1]),
            source="a test",
            alone=False,
        )
        rules = Rules("job", place.min_nodes, 2, fixed=node_rank is not None, heartbeat=heartbeat)
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


@pytest.mark.timeout(60)
def test_a_port_that_is_never_given_back_is_an_error_of_its_own(led: Callable[..., Membership]) -> None:
    began = time.monotonic()
    with pytest.raises(RendezvousError, match="Address already in use"):
        led(heartbeat=1.5)
    assert time.monotonic() > began + 1.5, "a connection may have it for a moment"


@pytest.mark.parametrize(
    ("nnodes", "named", "address", "meeting"),
    [
        (1, "localhost", "127.0.0.1", "127.0.0.1"),
        (2, "localhost", "localhost", "localhost"),
        (2, "::1", "::1", "[::1]"),
    ],
)
def test_ranks_of_several_nodes_meet_at_node_0s_name_and_those_of_one_on_loopback(
    led: Callable[..., Membership], nnodes: int, named: str, address: str, meeting: str
) -> None:
    offered = led(0, Endpoint(named, 0))._prepare(nnodes)
    assert offered[envvars.MASTER_ADDR] == address
    assert offered[envvars.MEETING].rpartition(":")[0] == meeting
