"""Inputs that ranks share, without a store: who is killed, who fails, and what is whole."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.errors import PayloadError
from flytekitplugins_safedist.rank import shared_inputs
from flytekitplugins_safedist.rank.shared_inputs import SharedInputs
from tests.harness import needs

Fetch = Callable[[str], Awaitable[Any]]


def rank(tmp_path: Path, number: int) -> SharedInputs:
    own = tmp_path / f"rank-{number}"
    own.mkdir(exist_ok=True)
    (tmp_path / "node").mkdir(exist_ok=True)
    return SharedInputs(tmp_path / "node", own, nullcontext)


def fetches(text: str, calls: list[str]) -> Fetch:
    async def fetch(path: str) -> None:
        calls.append(path)
        Path(path).write_text(text)

    return fetch


def bring(of: SharedInputs, fetch: Fetch, address: str = "s3://b/model") -> Path:
    to = of.sandbox / "0123" / "model"
    asyncio.run(of.bring(address, str(to), fetch, is_directory=False))
    return to


def test_a_rank_that_is_killed_as_it_fetches_holds_nobody_and_leaves_no_part(tmp_path: Path) -> None:
    first, second = rank(tmp_path, 0), rank(tmp_path, 1)
    began, tells = os.pipe()

    async def half(path: str) -> None:
        Path(path).write_text("ha")
        os.write(tells, b"x")
        signal.pause()

    child = os.fork()
    if child == 0:
        try:
            bring(first, half)
        finally:
            os._exit(1)
    os.read(began, 1)
    (lock,) = (tmp_path / "node").glob("*.lock")
    with lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert [each.suffix for each in (tmp_path / "node").iterdir()] == [".lock"], "no part has the name of the whole"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    calls: list[str] = []
    assert bring(second, fetches("half", calls)).read_text() == "half"
    assert len(calls) == 1


def test_one_fetches_and_another_tries_for_itself_only_where_that_failed(tmp_path: Path) -> None:
    calls: list[str] = []

    async def fails(path: str) -> None:
        Path(path).write_text("ha")
        raise ConnectionError("the store is away")

    with pytest.raises(ConnectionError, match="the store is away"):
        bring(rank(tmp_path, 0), fails)
    places = [bring(rank(tmp_path, number), fetches("whole", calls)) for number in range(3)]
    assert [place.read_text() for place in places] == ["whole"] * 3
    assert len(calls) == 1
    assert len({place.stat().st_ino for place in places}) == 1, "the bytes are there once"
    assert [stat.S_IMODE(place.stat().st_mode) & 0o222 for place in places] == [0, 0, 0]
    assert [each for each in (tmp_path / "rank-0").iterdir() if each.name != "inputs"] == [], "no draft is left"


def test_another_address_is_another_input_and_only_places_in_the_sandbox_are_inputs(tmp_path: Path) -> None:
    of, calls = rank(tmp_path, 0), []
    assert bring(of, fetches("one", calls)).read_text() == "one"
    assert bring(of, fetches("two", calls), "s3://b/other").read_text() == "two"
    assert of.has(str(of.sandbox / "x"))
    assert not of.has(str(tmp_path / "rank-0" / "local_flytekit" / "x"))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, 524])  # 524: Linux's own, of NFS
def test_where_there_are_neither_locks_nor_hard_links_each_rank_has_a_copy(tmp_path: Path, monkeypatch, number) -> None:
    """As on a claim that a FUSE client of an object store serves, or on Lustre that is mounted without them."""

    def refuses(*_: object) -> None:
        raise OSError(number, "not supported")

    monkeypatch.setattr(shared_inputs.os, "link", refuses)
    monkeypatch.setattr(shared_inputs.fcntl, "flock", refuses)
    calls: list[str] = []
    places = [bring(rank(tmp_path, number), fetches("whole", calls)) for number in range(2)]
    assert [place.read_text() for place in places] == ["whole", "whole"]
    assert len(calls) == 1


def test_a_rank_that_waits_for_another_ones_download_says_so(tmp_path: Path) -> None:
    waits, came = threading.Event(), []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.set()
        yield
        came.append(True)

    async def slow(path: str) -> None:
        other.start()
        await asyncio.to_thread(waits.wait)
        assert not came
        Path(path).write_text("whole")

    second = rank(tmp_path, 1)
    marked = SharedInputs(tmp_path / "node", tmp_path / "rank-1", waiting)
    other = threading.Thread(target=bring, args=(marked, fetches("never", [])), daemon=True)
    bring(rank(tmp_path, 0), slow)
    other.join()
    assert came
    assert (second.sandbox / "0123" / "model").read_text() == "whole"


def test_of_two_that_fetch_at_once_where_locks_do_nothing_one_is_kept_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shared_inputs.fcntl, "flock", lambda *_: None)
    calls: list[str] = []

    async def overtaken(path: str) -> None:
        Path(path).write_text("mine")
        await rank(tmp_path, 1).bring("s3://b/model", str(tmp_path / "1"), fetches("theirs", calls), is_directory=False)

    assert bring(rank(tmp_path, 0), overtaken).read_text() == "theirs"
    assert [each.name for each in (tmp_path / "rank-0").iterdir()] == ["inputs"]


def test_who_comes_later_is_not_given_what_a_rank_has_changed(tmp_path: Path) -> None:
    needs.root("write to a file that is read-only")
    calls: list[str] = []
    first, second = rank(tmp_path, 0), rank(tmp_path, 1)
    own = bring(first, fetches("model", calls))
    first.see_all_unchanged()
    own.write_text("other")
    with pytest.raises(PayloadError, match="has changed a file of an input in place"):
        bring(second, fetches("model", calls))
    with pytest.raises(PayloadError, match="s3://b/model"):
        second.see_all_unchanged()
    own.unlink()
    assert len(calls) == 1


def test_a_file_that_is_written_anew_under_its_name_is_the_ranks_own(tmp_path: Path) -> None:
    first, second = rank(tmp_path, 0), rank(tmp_path, 1)
    own = bring(first, fetches("model", []))
    own.unlink()
    own.write_text("mine")
    assert bring(second, fetches("model", [])).read_text() == "model"
    first.see_all_unchanged()
