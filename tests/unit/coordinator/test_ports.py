"""Which addresses are this machine's."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from flytekitplugins_safedist.coordinator import ports


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return True
    return False


@pytest.mark.usefixtures("no_names")
def test_this_machines_own_name_is_here_also_where_it_does_not_resolve() -> None:
    assert ports.is_here(socket.gethostname())
    assert not ports.is_here("another-pod")


@pytest.mark.usefixtures("no_names")
def test_node_0_listens_also_where_its_own_name_does_not_resolve() -> None:
    with ports.listener("another-pod", 0) as listening, socket.socket() as other:
        other.connect(("127.0.0.1", listening.getsockname()[1]))
        assert (listening.family == socket.AF_INET6) == has_ipv6(), "nobody knows by which family others come"
