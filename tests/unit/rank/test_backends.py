"""How ranks find each other: the documented variables, a fresh key-value server for each round, and clear absence."""

from __future__ import annotations

import http.client
import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist import envvars
from flytekitplugins_safedist.errors import MissingDependencyError, TopologyError
from flytekitplugins_safedist.fs.identity import Identity
from flytekitplugins_safedist.rank import backends
from flytekitplugins_safedist.rank.backends.horovod import HorovodBackend
from flytekitplugins_safedist.rank.backends.torch import (
    FLOOR,
    TorchBackend,
    refuse_another_place,
    refuse_before_floor,
)


def told(
    backend: Any, local_rank: int, *, node_rank: int = 1, nnodes: int = 3, nproc: int = 4, timeout: float = 900.0
) -> dict[str, str]:
    """The variables of one rank."""
    at = Identity(
        rank=node_rank * nproc + local_rank,
        world_size=nnodes * nproc,
        local_rank=local_rank,
        local_world_size=nproc,
        node_rank=node_rank,
        nnodes=nnodes,
        round=2,
        attempt=0,
    )
    offered = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "horovod_port": "4321"}
    found: dict[str, str] = backend.environment(at, offered, run_id="f123-a0", timeout=timeout)
    return found


def test_the_ranks_of_a_job_that_a_rank_has_started_meet_where_their_own_job_does() -> None:
    settings: Any = SimpleNamespace(nproc_per_node=2, max_restarts=1)
    there = {"HOME": "/root", "SAFEDIST_MEETING": "/tmp/corner", "SAFEDIST_STORE_PORT": "4321"}
    found = backends.inherited(settings, there)
    assert found["HOME"] == "/root"
    assert there.keys() & found.keys() == {"HOME"}


# --- variables -------------------------------------------------------------------------------------------------------
TORCH = {
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    "RANK": "6",
    "LOCAL_RANK": "2",
    "WORLD_SIZE": "12",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "ROLE_NAME": "default",
    "ROLE_RANK": "6",
    "ROLE_WORLD_SIZE": "12",
    "TORCHELASTIC_RUN_ID": "f123-a0",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "NODE_RANK": "1",  # composer/utils/dist.py: initialize_dist
}
HOROVOD = {
    # horovod/runner/gloo_run.py: create_slot_env_vars, create_run_env_vars; gloo_context.cc
    "HOROVOD_RANK": "6",
    "HOROVOD_SIZE": "12",
    "HOROVOD_LOCAL_RANK": "2",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "3",
    "HOROVOD_HOSTNAME": "node-1",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.7",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "900",
}


def test_torch_ranks_get_torchruns_variables() -> None:
    assert told(TorchBackend(), 2) == TORCH


def test_horovod_ranks_get_horovodruns_variables_and_torchs() -> None:
    assert told(HorovodBackend(), 2) == TORCH | HOROVOD


def test_on_one_node_gloo_stays_on_the_loopback_interface() -> None:
    assert told(HorovodBackend(), 0, nnodes=1, node_rank=0)["HOROVOD_GLOO_IFACE"] == "lo"
    assert "HOROVOD_GLOO_IFACE" not in told(HorovodBackend(), 0)


def test_a_timeout_below_a_second_does_not_become_none_at_all() -> None:
    told_as = [told(HorovodBackend(), 0, timeout=each)["HOROVOD_GLOO_TIMEOUT_SECONDS"] for each in (0.2, 1.0, 1.5, 9e2)]
    assert told_as == ["1", "1", "2", "900"]


@pytest.mark.parametrize("backend", [TorchBackend(), HorovodBackend()], ids=["torch", "horovod"])
@given(nnodes=st.integers(1, 5), nproc=st.integers(1, 5))
def test_ranks_are_a_permutation_and_hosts_differ_between_nodes(backend: Any, nnodes: int, nproc: int) -> None:
    seen = [
        told(backend, local, nnodes=nnodes, nproc=nproc, node_rank=node)
        for node in range(nnodes)
        for local in range(nproc)
    ]
    assert [int(each["RANK"]) for each in seen] == list(range(nnodes * nproc))
    assert {each["WORLD_SIZE"] for each in seen} == {str(nnodes * nproc)}
    if isinstance(backend, HorovodBackend):
        assert [int(each["HOROVOD_RANK"]) for each in seen] == list(range(nnodes * nproc))
        assert len({each["HOROVOD_HOSTNAME"] for each in seen}) == nnodes


@pytest.mark.parametrize("backend", [TorchBackend(), HorovodBackend()], ids=["torch", "horovod"])
def test_what_says_who_a_rank_is_cannot_be_set_by_users(backend: Any) -> None:
    settable = {envvars.HOROVOD_CPU_OPERATIONS, envvars.HOROVOD_GLOO_TIMEOUT_SECONDS}
    assert set(told(backend, 0)) - settable <= envvars.IDENTITY


def test_torch_opens_nothing_of_its_own() -> None:
    backend = TorchBackend()
    assert backend.open_round(nnodes=2, nproc_per_node=2) == {}
    backend.close_round()


# --- Horovod's key-value server --------------------------------------------------------------------------------------
class Client:
    def __init__(self, offered: Any) -> None:
        self.port = int(offered["horovod_port"])

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


@pytest.fixture
def horovod() -> Iterator[HorovodBackend]:
    backend = HorovodBackend()
    yield backend
    backend.close_round()


@pytest.mark.horovod
def test_the_horovod_that_is_installed_passes_the_check() -> None:
    HorovodBackend().find()


@pytest.mark.horovod
def test_every_round_has_a_server_without_the_keys_of_the_last(horovod: HorovodBackend) -> None:
    first = Client(horovod.open_round(nnodes=1, nproc_per_node=2))
    assert first.ask("PUT", "/global/0", b"address of a rank that died")[0] == 200
    assert first.ask("GET", "/global/0") == (200, b"address of a rank that died")
    last = horovod._server
    second = Client(horovod.open_round(nnodes=1, nproc_per_node=2))
    assert second.ask("GET", "/global/0")[0] == 404
    assert last.socket.fileno() == -1, "and the last one is closed"


@pytest.mark.horovod
def test_closing_a_round_frees_its_port_and_ends_its_thread(horovod: HorovodBackend) -> None:
    import threading

    def serving() -> int:
        return sum(thread.name == "safedist horovod server" for thread in threading.enumerate())

    before = serving()
    port = Client(horovod.open_round(nnodes=1, nproc_per_node=1)).port
    assert serving() == before + 1
    horovod.close_round()
    assert serving() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
    horovod.close_round()  # nothing is open: nothing happens


@pytest.mark.horovod
@pytest.mark.parametrize(("nnodes", "address"), [(1, "127.0.0.1"), (2, "0.0.0.0")])
def test_the_server_is_reached_from_elsewhere_only_when_there_are_other_nodes(
    horovod: HorovodBackend, nnodes: int, address: str
) -> None:
    port = Client(horovod.open_round(nnodes=nnodes, nproc_per_node=1)).port
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    bound = [local for _, local, _, state, *_ in rows if state == "0A" and int(local.split(":")[1], 16) == port]
    expected = socket.inet_aton(address)[::-1].hex().upper()  # the kernel prints it as a little-endian number
    assert [local.split(":")[0] for local in bound] == [expected]


@pytest.mark.horovod
def test_the_server_knows_how_many_ranks_each_scope_waits_for(horovod: HorovodBackend) -> None:
    horovod.open_round(nnodes=2, nproc_per_node=3)
    assert horovod._server.scope_size == {
        "global": 6,
        "local_node-0": 3,
        "local_node-1": 3,
        "cross_0": 2,
        "cross_1": 2,
        "cross_2": 2,
    }


@pytest.mark.horovod
def test_no_scope_keeps_addresses_for_the_next_init_whichever_is_left_first(horovod: HorovodBackend) -> None:
    kept = Client(horovod.open_round(nnodes=1, nproc_per_node=2))
    for scope, rank in (("local_node-0", 0), ("local_node-0", 1), ("cross_0", 0), ("cross_1", 1)):
        kept.ask("PUT", f"/{scope}/{rank}", b"address")
    # Rank 0 is through with its scopes before rank 1 has left the first.
    for scope, rank in (("local_node-0", 0), ("cross_0", 0), ("local_node-0", 1), ("cross_1", 1)):
        assert kept.ask("DELETE", f"/{scope}/{rank}")[0] == 200
    assert [kept.ask("GET", f"/local_node-0/{rank}")[0] for rank in (0, 1)] == [404, 404]
    # And so the next time.
    kept.ask("PUT", "/local_node-0/0", b"new address")
    kept.ask("DELETE", "/local_node-0/0")
    assert kept.ask("GET", "/local_node-0/0") == (200, b"new address"), "rank 1 has yet to read it"
    kept.ask("DELETE", "/local_node-0/1")
    assert kept.ask("GET", "/local_node-0/0")[0] == 404


# --- what is missing -------------------------------------------------------------------------------------------------
TORCH_HINT = "pip install 'flytekitplugins-safedist[torch]', in the task's image too"
HOROVOD_HINT = (
    "build its wheel against the installed torch with horovod_build/build.py of this project "
    "(the published sdist does not compile against torch >= 2.1), in the task's image too"
)


@pytest.mark.parametrize(("backend", "missing"), [("torch", "torch"), ("horovod", "torch"), ("horovod", "horovod")])
def test_what_is_not_installed_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch, backend: str, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, missing, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(MissingDependencyError) as caught:
        backends.create(backend).find()
    hint = TORCH_HINT if missing == "torch" else HOROVOD_HINT
    assert str(caught.value) == (f"{missing} is not installed [module={missing}] (seen: no such module). Fix: {hint}")


@pytest.mark.parametrize(
    ("backend", "statement", "hint"),
    [("torch", "import torch", TORCH_HINT), ("horovod", "import horovod.torch", HOROVOD_HINT)],
)
def test_what_does_not_load_is_told_apart_from_what_is_not_there(backend: str, statement: str, hint: str) -> None:
    found, module = backends.create(backend), statement.partition(" ")[2]
    found.check({})
    found.check({"import pandas": "ImportError: of the user's"})
    with pytest.raises(MissingDependencyError) as caught:
        found.check({statement: "ImportError: libcudart.so.12: cannot open shared object file"})
    assert str(caught.value) == (
        f"{module.partition('.')[0]} is installed, but cannot be imported [module={module}] "
        f"(seen: ImportError: libcudart.so.12: cannot open shared object file). Fix: {hint}"
    )
    assert statement in [f"import {name}" for name in found.libraries]
    assert ("horovod.torch" in found.libraries) == (backend == "horovod"), "SafeTorch needs none"


def test_a_torch_that_nothing_is_tried_with_is_refused_and_one_from_the_floor_on_is_taken() -> None:
    for version in ("2.4.0+cu121", "2.4.1", "1.13.1"):
        with pytest.raises(MissingDependencyError, match="torch is too old") as caught:
            refuse_before_floor(version)
        assert (caught.value.seen, caught.value.expected) == (f"torch {version}", "torch 2.5 or later")
    for version in ("2.5.0+cu124", "2.15.0+cu132", "3.0.0a0+git1"):
        refuse_before_floor(version)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ((3, 8), "this job has 4 ranks"),
        ((0, 4), "rank 0 has the store on node 0, and this is node 1"),
        ((3, 2), "ranks count from 0 to 1"),
    ],
)
def test_a_place_that_no_group_has_is_refused_and_another_ranks_is_not(place: tuple[int, int], why: str) -> None:
    rank_3 = {envvars.RANK: "3", envvars.WORLD_SIZE: "4", envvars.GROUP_RANK: "1"}
    with pytest.raises(TopologyError, match=f"for ranks that will never be there: {why}"):
        refuse_another_place(rank_3, *place, is_alone=True, has_store=False)
    refuse_another_place(rank_3, 1, 4, is_alone=True, has_store=False)
    refuse_another_place(rank_3, 3, 8, is_alone=False, has_store=False)
    refuse_another_place(rank_3, 0, 4, is_alone=True, has_store=True)


def test_the_floor_is_the_one_that_the_extras_ask_for() -> None:
    asked = re.findall(r"(?m)^ +torch>=([\d.]+),", (Path(__file__).parents[3] / "setup.cfg").read_text())
    assert asked == [".".join(str(part) for part in FLOOR)] * 2
