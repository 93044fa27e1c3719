"""How the probes of a job's nodes find each other and wait for each other, in a real corner; and what a probe makes of
a GPU that fails, of which there is none here."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.coordinator.kv import KeyValues
from flytekitplugins_safedist.meeting import Meeting
from flytekitplugins_safedist.preflight import probe
from flytekitplugins_safedist.preflight.judge import DISK
from flytekitplugins_safedist.preflight.probe import Peers, examined

LONG = 300.0
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
FACTS = {"version": "2", "cuda_build": "12.8", "hip_build": None, "gpus": 1, "nccl": True, "gloo": True}


class Here(Meeting):
    """A corner of this process, without the server before it. Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__("", "job", 0)
        self.calls: Counter[str] = Counter()
        self._counting = threading.Lock()  # a word that is new to it is no single step
        self._corner, self._loop = KeyValues(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def _call(self, head: Mapping[str, Any], body: bytes = b"", seconds: float = 0.0) -> tuple[dict[str, Any], bytes]:
        with self._counting:
            self.calls[head["op"]] += 1
        return asyncio.run_coroutine_threadsafe(self._corner.answer(head, body), self._loop).result()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def corner() -> Iterator[Here]:
    made = Here()
    yield made
    made.end()


def meet(corner: Here, nodes: int, limits: Mapping[int, float]) -> dict[int, Peers]:
    """Those of *nodes* that come, and how many seconds each has."""
    with ThreadPoolExecutor(nodes) as pool:
        came = {
            node: pool.submit(Peers, corner, node, nodes, time.monotonic() + limit, "127.0.0.1")
            for node, limit in limits.items()
        }
    return {node: each.result() for node, each in came.items()}


def test_probes_find_each_other_with_few_calls(corner: Here) -> None:
    nodes = 8
    peers = meet(corner, nodes, dict.fromkeys(range(nodes), LONG))
    assert all(each.unreached == {} for each in peers.values())
    assert corner.calls == {"set": nodes + 1, "wait": 2 * nodes}


def test_a_node_that_never_comes_is_named_by_all(corner: Here) -> None:
    """Node 0 gives it up first."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(Peers, corner, 1, 3, time.monotonic() + LONG, "127.0.0.1")
        assert corner.wait("safedist/preflight/at/1", LONG)
        first = Peers(corner, 0, 3, time.monotonic() + 5, "127.0.0.1")  # of which it waits for 2, and dials in 3
    assert first.unreached == other.result().unreached == {2: "its checks have not begun"}


def test_where_node_0_never_comes_it_alone_is_named(corner: Here) -> None:
    assert Peers(corner, 1, 3, time.monotonic(), "127.0.0.1").unreached == {0: "its checks have not begun"}


@pytest.mark.parametrize("last", [True, False])
def test_all_measure_together_or_none_does(corner: Here, *, last: bool) -> None:
    peers = meet(corner, 3, dict.fromkeys(range(3), LONG))
    with ThreadPoolExecutor(3) as pool:
        can = [pool.submit(each.all_can, can=last or node != 2) for node, each in peers.items()]
    assert [each.result() for each in can] == [last] * 3


def test_one_whose_peer_hangs_goes_on_without_it_when_its_time_is_up(corner: Here) -> None:
    peers = meet(corner, 2, {0: LONG, 1: 1.0})
    assert not peers[1].all_can(can=True)


def test_a_gpu_that_cannot_compute_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(_: int) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ...")

    monkeypatch.setattr(probe, "torch_facts", lambda: FACTS)
    monkeypatch.setattr(probe, "_computing", fails)
    (report,) = examined(tmp_path, time.monotonic(), ALONE)
    (told,) = [each for each in report.troubles if each.subject == "Gpu"]
    assert told.is_broken
    assert told.text.startswith(
        "a matrix product fails: RuntimeError: CUDA error: uncorrectable ECC error encountered;"
    )


def test_dialling_ends_when_the_time_does(corner: Here) -> None:
    """Hundreds of nodes of whom none answers: they listen, and say nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=300) as silent:
        place = f"127.0.0.1 {silent.getsockname()[1]}"
        corner.set("safedist/preflight/at", json.dumps([place] * 300).encode())
        unreached = Peers(corner, 1, 300, time.monotonic() + 1, "127.0.0.1").unreached

    assert len(unreached) == 299
    assert {why.rpartition(": ")[2] for why in unreached.values()} == {"timed out", "no time was left"}


def measured(monkeypatch: pytest.MonkeyPatch, directory: Path, facts: object, seconds: Iterable[float]) -> Any:
    """What a probe measures alone, by a clock that shows these."""
    clock = iter(seconds)
    monkeypatch.setattr(probe, "torch_facts", lambda: facts)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(clock))
    (report,) = examined(directory, time.monotonic(), ALONE)
    return report.measured


def test_a_disk_is_measured_at_its_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another pod may write there at that moment."""
    found = measured(monkeypatch, tmp_path, "no torch", [0.0, 9.0, 10.0, 10.5, 20.0, 27.0])
    assert found == {DISK: {"": pytest.approx(64 * 2**20 / 1e6 / 0.5)}}


def test_a_disk_that_cannot_be_written_has_no_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert measured(monkeypatch, tmp_path / "none", "no torch", count()) == {DISK: {"": 0.0}}


def test_the_figure_of_a_matrix_product_is_its_operations_in_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured(monkeypatch, tmp_path, {**FACTS, "gpus": 0}, count(step=0.5))
    assert found["matrix product, TFLOP/s:"] == {"": 2 * 1024**3 / 1e12 / 0.5}


def test_of_a_clock_it_is_known_how_far_it_is_ahead_and_how_well(monkeypatch: pytest.MonkeyPatch, corner: Here) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(probe, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        corner.set("safedist/preflight/at", json.dumps([f"127.0.0.1 {server.getsockname()[1]}", ""]).encode())
        peers = pool.submit(Peers, corner, 1, 2, time.monotonic() + LONG, "127.0.0.1")
        with server.accept()[0] as caller:
            caller.sendall(b"90.0")
        found = peers.result(30)
    assert (found.unreached, found.ahead, found.slack) == ({}, 12.0, 2.0)
