"""The group over files, and what it publishes, on clients that see late, lie, fail and drop locks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import FsIoError, FsUnsupportedError
from flytekitplugins_safedist.fs import (
    atomic_dir,
    atomic_write,
    barrier,
    ensure_dir,
    exchange,
    file_group,
    identity_from_env,
    is_published,
    once_per_job,
    publish,
    use_group,
)
from tests.fs.ranks import Outcome, processes, rank_env
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


def _in_ranks(places: list[Path], work) -> list[Outcome]:
    """``work(rank, place)`` in ``RANKS`` processes that coordinate over files on their own client's mount."""

    def start(rank: int):
        place = places[rank % len(places)]
        use_group(file_group(place / "notes", identity=identity_from_env(os.environ)))
        return work(rank, place)

    envs = [rank_env(rank, RANKS, RANKS // CLIENTS, SAFEDIST_FS_TIMEOUT="60") for rank in range(RANKS)]
    with processes([(start, rank) for rank in range(RANKS)], envs) as started:
        return [one.outcome(within=240) for one in started]


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


def test_ranks_work_once_meet_and_publish_whatever_the_clients_answer(clients, tmp_path):
    def work(rank: int, place: Path):
        seen = []
        for turn in range(ROUNDS):
            by = once_per_job(f"work-{turn}", lambda: rank)
            barrier()
            with publish(place / "out" / f"ckpt-{turn}", shared="yes", durable=turn == 0) as part:
                ensure_dir(part / "sub")
                for name in (f"shard-{rank}", f"sub/meta-{rank}"):
                    with atomic_write(part / name, durable=False) as file:
                        file.write(b"whole")
            seen.append((by, exchange("names", f"rank {rank}")))
        return seen

    for client in clients:
        client.set(faults=LOST)
    results = [one.get() for one in _in_ranks([client.path for client in clients], work)]
    for turn in range(ROUNDS):
        assert len({result[turn][0] for result in results}) == 1
        assert [result[turn][1] for result in results] == [[f"rank {rank}" for rank in range(RANKS)]] * RANKS
        made = tmp_path / "server" / "out" / f"ckpt-{turn}"
        assert sorted(os.listdir(made)) == sorted([*(f"shard-{rank}" for rank in range(RANKS)), "sub"])
        assert all((made / f"shard-{rank}").read_bytes() == b"whole" for rank in range(RANKS))
        assert sorted(os.listdir(made / "sub")) == [f"meta-{rank}" for rank in range(RANKS)]


@pytest.mark.parametrize("code", ["EPERM", "EXDEV"])
def test_without_links_between_directories_publish_refuses_and_names_the_way_out(tmp_path, code):
    """BeeGFS before 7.4 says EPERM, AFS and quotas on directories EXDEV."""
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        client.set(faults=[{"op": "link", "errno": code, "match": "*/shard"}])
        with pytest.raises(FsUnsupportedError, match='commit="marker"'), publish(client.path / "ckpt") as part:
            (part / "shard").write_text("whole")
        assert os.listdir(client.path) == []
        with publish(client.path / "ckpt", commit="marker") as part:
            (part / "shard").write_text("whole")
        assert is_published(client.path / "ckpt")


def test_a_directory_that_cannot_be_read_is_not_passed_over_when_it_is_made_durable(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:

        def make() -> None:
            with atomic_dir(client.path / "made") as draft:
                (draft / "sub").mkdir()
                client.set(faults=[{"op": "opendir", "errno": "EIO", "match": "*/sub"}])

        with pytest.raises(FsIoError):
            make()
        client.set(faults=[])
        assert not (client.path / "made").exists()


def test_what_is_published_was_brought_to_stable_storage_before_with_every_directory(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:

        def make(name: str) -> None:
            with publish(client.path / name) as part:
                (part / "shard").write_text("whole")
                (part / "sub").mkdir()
                (part / "sub" / "meta").write_text("whole")

        make("ckpt")
        counts = client.counts()
        assert counts["fsync"] == 2
        assert counts["fsyncdir"] == 5, "the part and its directory, the draft and its directory, and their parent"
        client.set(faults=[{"op": "fsyncdir", "errno": "EIO"}])
        with pytest.raises(FsIoError):
            make("again")
        client.set(faults=[])
        assert os.listdir(client.path) == ["ckpt"]
