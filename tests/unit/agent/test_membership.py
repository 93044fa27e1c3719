"""How a process joins its job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.agent.membership import Membership
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.errors import RendezvousError
from flytekitplugins_safedist.topology import Endpoint, Topology


def test_the_pod_that_leads_a_range_begins_anew_when_its_name_comes_to_lead_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that has no address for a moment is another pod's as far as anybody can say."""
    ask, names = socket.getaddrinfo, threading.Event()

    def resolve(host: str, *arguments: object, **options: object) -> object:
        if host != "worker-0":
            return ask(host, *arguments, **options)  # type: ignore[arg-type]
        if not names.is_set():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1", *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = Topology(None, 1, 2, 1, Endpoint("worker-0", other.getsockname()[1]), "a test")
        job = Membership(Rules("job", 1, 2, is_fixed=False), place, NoStore())
        assert not job.leads
        job.link.begin(job.first)
        names.set()
        assert "leads the job" in str(job.inbox.get(timeout=30))
        job.close(decided=False)


def test_a_process_whose_name_is_cut_within_a_letter_joins_as_any_other() -> None:
    """As setproctitle names a process, or a script of that name that is started itself."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("a训练模型脚本.py".encode())
    try:
        Membership(Rules("job", 1, 1), Topology(0, 1, 1, 1, None, "a test"), NoStore()).close(decided=False)
    finally:
        name.write_bytes(before)


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
        joined.append(Membership(rules, place, NoStore()))
        return joined[-1]

    yield join
    for one in joined:
        one.close(decided=False)


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
