"""Readers see the old or the new, whole: whoever is killed, and whatever the file system answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import FsIoError, NoSpaceError, PathBlockedError
from flytekitplugins_safedist.fs import atomic_path, atomic_write
from tests.fs.ranks import Process, together
from tests.harness.fusefs import FuseMount, require


def _fill(directory: Path, text: str) -> None:
    directory.mkdir()
    for name in ("a", "b", "sub/c"):
        place = directory / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)


def _whole(directory: Path) -> str | None:
    """The one text that all of a published directory holds; None if it is not there. Torn: an error."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:  # by handle: the name may stand for another directory by the time of the second look
        texts = set()
        for name in ("a", "b", "sub/c"):
            with open(os.open(name, os.O_RDONLY, dir_fd=handle)) as file:
                texts.add(file.read())
    finally:
        os.close(handle)
    assert len(texts) == 1, f"torn: {texts}"
    return texts.pop()


def _publish(index: int, target: Path) -> str:
    try:
        with atomic_path(target) as draft:
            _fill(draft, str(index))
    except PathBlockedError:
        pass  # another was faster
    return _whole(target) or "missing"


def _publish_by_32(target: Path) -> set[str]:
    return {outcome.get() for outcome in together(32, _publish, target)}


def test_of_32_that_publish_one_directory_one_wins_and_all_see_it(tmp_path):
    assert len(Process(_publish_by_32, tmp_path / "made", small=True).outcome().get()) == 1
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("op", ["write", "create", "rename"])
def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path, op):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        target = client.path / "state"
        target.write_text("old")
        client.set(faults=[{"op": op, "errno": "ENOSPC"}])
        with pytest.raises(NoSpaceError) as caught, atomic_write(target) as file:
            file.write(b"new" * 1_000_000)
        client.set(faults=[])
        assert target.read_text() == "old"
        assert os.listdir(client.path) == ["state"]
    assert "free space" in str(caught.value)


@pytest.mark.parametrize(("code", "when"), [("EIO", "before"), ("ESTALE", "after"), ("EINTR", "after")])
def test_a_rename_whose_reply_is_lost_has_happened_once(tmp_path, code, when):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        client.set(faults=[{"op": "rename", "errno": code, "when": when, "first": 3}])
        with atomic_write(client.path / "state") as file:
            file.write(b"new")
        with atomic_path(client.path / "dir") as draft:
            _fill(draft, "x")
        assert (client.path / "state").read_bytes() == b"new"
        assert _whole(client.path / "dir") == "x"
        assert sorted(os.listdir(client.path)) == ["dir", "state"]


# --- stable storage, as the file system itself counts it: a crash of the machine no test can have --------------------
@pytest.fixture
def client(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as mount:
        yield mount


def _by_write(path: Path, *, durable: bool) -> None:
    with atomic_write(path, durable=durable) as file:
        file.write(b"new")


def _by_path(path: Path, *, durable: bool) -> None:
    with atomic_path(path, durable=durable) as draft:
        draft.write_bytes(b"new")


def _by_dir(path: Path, *, durable: bool) -> None:
    with atomic_path(path, durable=durable) as draft:
        _fill(draft, "new")


MAKERS = [_by_write, _by_path, _by_dir]


@pytest.mark.parametrize("make", MAKERS)
def test_the_contents_and_the_name_are_brought_to_stable_storage(client, make):
    make(client.path / "made", durable=True)
    counts = client.counts()
    assert counts["fsync"] == (3 if make is _by_dir else 1)
    assert counts["fsyncdir"] == (3 if make is _by_dir else 1), "the directories that were made, and their parent"


@pytest.mark.parametrize("make", MAKERS)
def test_what_need_not_be_durable_waits_for_no_disk(client, make):
    make(client.path / "made", durable=False)
    counts = client.counts()
    assert (counts["fsync"], counts["fsyncdir"]) == (0, 0)


@pytest.mark.parametrize("make", MAKERS)
def test_what_could_not_be_brought_to_stable_storage_gets_no_name(client, make):
    client.set(faults=[{"op": "fsync", "errno": "EIO"}])
    with pytest.raises(FsIoError):
        make(client.path / "made", durable=True)
    assert client.counts()["fsync"] == 1, "never again: the kernel would lie"
    assert os.listdir(client.path) == []


def test_a_directory_in_it_that_cannot_be_read_is_not_passed_over(client):
    client.set(faults=[{"op": "opendir", "errno": "EIO", "match": "*/sub"}])
    with pytest.raises(FsIoError):
        _by_dir(client.path / "made", durable=True)
    client.set(faults=[])
    assert not (client.path / "made").exists()


@pytest.mark.parametrize("make", MAKERS)
def test_a_name_that_could_not_be_brought_to_stable_storage_is_an_error(client, make):
    client.set(faults=[{"op": "fsyncdir", "errno": "EIO", "match": "", "first": 1}])  # a second one would lie
    with pytest.raises(FsIoError):
        make(client.path / "made", durable=True)
    assert os.listdir(client.path) == ["made"]


def test_what_a_server_refuses_only_when_the_file_is_closed_gets_no_name(client):
    client.set(faults=[{"op": "flush", "errno": "ENOSPC"}])
    with pytest.raises(NoSpaceError):
        _by_write(client.path / "made", durable=False)
    assert os.listdir(client.path) == []
