"""Which addresses are this machine's."""

from __future__ import annotations

import socket

import pytest

from flytekitplugins_safedist.job import ports


def test_this_machines_own_name_is_here_also_where_it_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    assert ports.is_here(socket.gethostname())
    assert not ports.is_here("another-pod")
