"""Readers see the old or the new, whole: whoever is killed, and whatever the file system answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import FsIoError, NoSpaceError, PathBlockedError
from flytekitplugins_safedist.fs import atomic_path, atomic_write
from tests.fs.ranks import pause, processes, size, together
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


def test_of_32_that_publish_one_directory_one_wins_and_all_see_it(tmp_path):
    outcomes = together(32, _publish, tmp_path / "made")
    assert len({outcome.get() for outcome in outcomes}) == 1
    assert os.listdir(tmp_path) == ["made"]


def test_a_reader_never_sees_part_of_a_directory_whoever_is_killed(tmp_path):
    target = tmp_path / "made"

    def publish_and_stop(point: str) -> None:
        if point == "after":
            with atomic_path(target) as draft:
                _fill(draft, "x")
            pause(point)
        with atomic_path(target) as draft:
            if point == "during":
                draft.mkdir()
                (draft / "a").write_text("x")
            else:
                _fill(draft, "x")
            pause(point)

    def read() -> list[str | None]:
        pause("ready")
        seen: list[str | None] = []
        while not seen or seen[-1] != "x":
            now = _whole(target)
            if not seen or seen[-1] != now:
                seen.append(now)
        return seen

    with processes([(read,)]) as (reader,):
        reader.until("ready")
        reader.resume()
        for point in ("during", "filled", "after"):
            with processes([(publish_and_stop, point)]) as (writer,):
                writer.until(point)
                writer.kill()
        assert reader.outcome().get() == [None, "x"]
    made, *drafts = sorted(os.listdir(tmp_path), reverse=True)
    assert made == "made"
    assert len(drafts) == 2, "of the two that died before the rename"
    assert all(draft.startswith(".made.safedist-") for draft in drafts)


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


def test_a_failed_fsync_is_an_error_and_is_not_tried_again(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        client.set(faults=[{"op": "fsync", "errno": "EIO", "first": 1}])
        with pytest.raises(FsIoError), atomic_write(client.path / "state") as file:
            file.write(b"new")
        assert client.counts()["fsync"] == 1
        assert os.listdir(client.path) == []


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "EINTR"])
@pytest.mark.parametrize("when", ["before", "after"])
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


SIZE = 12_000
READERS, READS = 2, size(100_000, 1_000_000)
WHOLE = {letter: letter * SIZE for letter in (b"0", b"a", b"b", b"c")}


def _read_file(target: Path) -> int:
    torn = 0
    for _ in range(READS):
        handle = os.open(target, os.O_RDONLY)
        data = os.read(handle, SIZE + 1)
        os.close(handle)
        torn += data != WHOLE.get(data[:1])
    return torn


def _write_for_ever(target: Path) -> None:
    pause("begin")
    while True:
        for letter in (b"a", b"b", b"c"):
            with atomic_write(target, durable=False) as file:
                for _ in range(12):
                    file.write(letter * 1000)
                    file.flush()  # so that a torn file could be seen, were it visible


def test_in_many_reads_of_a_file_replaced_by_writers_that_are_killed_none_is_torn(tmp_path):
    target = tmp_path / "state"
    with atomic_write(target) as file:
        file.write(b"0" * SIZE)
    with processes([(_read_file, target)] * READERS) as readers:
        finished = 0
        while not any(reader.done() for reader in readers) or not finished:
            with processes([(_write_for_ever, target)]) as (writer,):
                writer.until("begin")
                before = target.stat().st_ino
                writer.resume()
                while target.stat().st_ino == before:
                    pass  # until this writer, too, is in the middle of its work
                writer.kill()
                finished += 1
        assert [reader.outcome().get() for reader in readers] == [0] * READERS
    assert sorted(os.listdir(tmp_path))[-1] == "state"
