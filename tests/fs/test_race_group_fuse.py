"""What ranks make together, on clients that see late, lie and fail."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins_safedist.errors import PathBlockedError
from flytekitplugins_safedist.fs import (
    atomic_path,
    atomic_write,
    barrier,
    download_once,
    ensure_dir,
    once_per_job,
    wait_for,
)
from tests.fs.ranks import corner, processes, rank_env
from tests.harness.fusefs import FuseMount, require

RANKS, CLIENTS, ROUNDS = 6, 3, 3
LOST = [  # what a soft mount or a server that fails over says; "after": it was done, and only the reply is lost
    {"op": op, "errno": code, "chance": 0.01, "when": when}
    for op in ("link", "unlink", "rename", "mkdir", "rmdir", "open", "create", "opendir", "readdir", "getattr")
    for code in ("EIO", "ESTALE", "EINTR")
    for when in ("before", "after")
    # A handle that was given out and not told of would leak in the test's own server.
    if not (op in ("open", "create", "opendir") and when == "after")
]


@pytest.fixture
def clients(tmp_path):
    require()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                FuseMount(tmp_path / "server", tmp_path / f"client{n}", late=[0, 0.5], seed=n, locks="dropped")
            )
            for n in range(CLIENTS)
        ]


def test_ranks_make_and_see_whole_files_and_directories_whatever_the_clients_answer(clients, tmp_path):
    (tmp_path / "source").write_bytes(b"weights")

    def work(rank: int) -> list[int]:
        place, seen = clients[rank // (RANKS // CLIENTS)].path, []  # its node's
        for turn in range(ROUNDS):
            out = ensure_dir(place / "out" / str(turn))
            with atomic_write(out / f"shard-{rank}", durable=turn == 0) as file:
                file.write(b"whole")
            with atomic_path(out / f"part-{rank}", durable=turn == 0) as draft:
                ensure_dir(draft / "sub")
                with atomic_write(draft / "sub" / "meta") as file:
                    file.write(b"whole")
            barrier()
            for other in range(RANKS):
                wait_for(out / f"shard-{other}", content=b"whole")
                wait_for(out / f"part-{other}" / "sub" / "meta", content=b"whole")
            seen.append(once_per_job(f"work-{turn}", lambda: rank))
        wait_for(download_once(tmp_path / "source", place / "weights", shared=True), content=b"weights")
        return seen

    for client in clients:
        client.set(faults=LOST)
    with corner() as meet:
        envs = [rank_env(rank, RANKS, RANKS // CLIENTS, SAFEDIST_FS_TIMEOUT="200", **meet) for rank in range(RANKS)]
        with processes([(work, rank) for rank in range(RANKS)], envs) as started:
            results = [one.outcome().get() for one in started]
    assert all(result == results[0] for result in results)
    for turn in range(ROUNDS):
        made = sorted(os.listdir(tmp_path / "server" / "out" / str(turn)))
        assert made == sorted(f"{kind}-{rank}" for rank in range(RANKS) for kind in ("part", "shard"))


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "EINTR"])
def test_a_download_that_has_arrived_outlives_an_answer_that_is_lost(tmp_path, code):
    require()
    (tmp_path / "source").write_bytes(b"weights")
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:

        class Lossy(LocalFileSystem):
            protocol = "lossy"

            def get_file(self, _path: str, draft: str, **_: Any) -> None:
                super().get_file(str(tmp_path / "source"), draft)
                client.set(faults=[{"op": op, "errno": code, "first": 3} for op in ("getattr", "open")])

        fsspec.register_implementation("lossy", Lossy, clobber=True)
        download_once("lossy://source", client.path / "weights")
        client.set(faults=[])
        assert (client.path / "weights").read_bytes() == b"weights"
        assert sorted(os.listdir(client.path)) == [".weights.safedist-source", "weights"]

        (tmp_path / "source").unlink()
        client.set(faults=[{"op": "getattr", "errno": code, "first": 3, "match": "*weights"}])
        assert download_once("lossy://source", client.path / "weights").read_bytes() == b"weights", "it is there"


def test_a_directory_that_is_there_and_cannot_be_looked_at_for_a_moment_fails_no_download(tmp_path):
    """As flytekit has it, fsspec makes the parent of each file, and a stat that fails is a FileExistsError then."""
    require()
    (tmp_path / "source").write_bytes(b"weights")
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        lost = [{"op": "getattr", "errno": "EIO", "first": 1}]

        class Making(LocalFileSystem):
            protocol = "making"

            def get_file(self, _path: str, draft: str, **_: Any) -> None:
                client.set(faults=[lost.pop()] if lost else [])
                LocalFileSystem(auto_mkdir=True).get_file(str(tmp_path / "source"), draft)

        fsspec.register_implementation("making", Making, clobber=True)
        assert download_once("making://source", client.path / "weights").read_bytes() == b"weights"
        assert lost == []


def test_where_there_are_no_hard_links_the_source_is_recorded_all_the_same(tmp_path):
    require()
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        client.set(faults=[{"op": "link", "errno": "EPERM"}])
        assert download_once(tmp_path / "one", client.path / "data").read_text() == "one"
        assert client.counts()["link"] == 1
        with pytest.raises(PathBlockedError):
            download_once(tmp_path / "two", client.path / "data")
        assert sorted(os.listdir(client.path)) == [".data.safedist-source", "data"]
