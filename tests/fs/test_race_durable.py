"""What is said to be durable was brought to stable storage before it got its name, and its name after that.

Counted by the file system itself: a crash of the machine, which is what this is for, no test can have.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import FsIoError, NoSpaceError
from flytekitplugins_safedist.fs import atomic_path, atomic_write
from tests.harness.fusefs import FuseMount, require


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
        draft.mkdir()
        (draft / "file").write_bytes(b"new")


MAKERS = [_by_write, _by_path, _by_dir]


@pytest.mark.parametrize("make", MAKERS)
def test_the_contents_and_the_name_are_brought_to_stable_storage(client, make):
    make(client.path / "made", durable=True)
    counts = client.counts()
    assert counts["fsync"] == 1
    assert counts["fsyncdir"] == (2 if make is _by_dir else 1)


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
    assert os.listdir(client.path) == []


@pytest.mark.parametrize("make", MAKERS)
def test_a_name_that_could_not_be_brought_to_stable_storage_is_an_error(client, make):
    client.set(faults=[{"op": "fsyncdir", "errno": "EIO", "match": ""}])
    with pytest.raises(FsIoError):
        make(client.path / "made", durable=True)
    assert os.listdir(client.path) == ["made"]


def test_what_a_server_refuses_only_when_the_file_is_closed_gets_no_name(client):
    client.set(faults=[{"op": "flush", "errno": "ENOSPC"}])
    with pytest.raises(NoSpaceError):
        _by_write(client.path / "made", durable=False)
    assert os.listdir(client.path) == []
