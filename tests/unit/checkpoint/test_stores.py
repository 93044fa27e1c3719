"""What stores of saves promise, where two writers mean one name. Object stores: tests/unit/flyte/test_put_new.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flytekitplugins_safedist.checkpoint.stores import DirectoryStore
from flytekitplugins_safedist.errors import CheckpointError
from flytekitplugins_safedist.flyte import put_new as module
from flytekitplugins_safedist.flyte.put_new import NoConditionError

NAME = "step-1.2.3/manifest.json"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "place")


def once(action: Callable[[], object]) -> Callable[[int], None]:
    """In the place of ``os.fsync``: at the first call, and before it, *action* happens."""
    fsync, left = os.fsync, [action]

    def with_action(file: int) -> None:
        if left:
            left.pop()()
        fsync(file)

    return with_action


def test_of_two_who_commit_at_once_the_second_is_told_and_the_first_stays(store, tmp_path, monkeypatch):
    other = DirectoryStore(tmp_path / "place")
    monkeypatch.setattr(os, "fsync", once(lambda: other.put_new(NAME, b"of the other")))
    with pytest.raises(CheckpointError, match="another writer has committed"):
        store.put_new(NAME, b"ours")
    assert store.get(NAME) == b"of the other"
    assert sorted(path.name for path in (tmp_path / "place" / "step-1.2.3").iterdir()) == ["manifest.json"]


def test_a_second_commit_is_refused(store):
    store.put_new(NAME, b"first")
    with pytest.raises(CheckpointError, match="another writer has committed"):
        store.put_new(NAME, b"second")
    assert store.get(NAME) == b"first"


def test_a_try_that_got_through_without_a_reply_is_a_commit(store):
    store.put_new(NAME, b"ours")
    store.put_new(NAME, b"ours")
    assert store.get(NAME) == b"ours"


def test_where_there_are_no_hard_links_a_save_is_committed_all_the_same(store, monkeypatch):
    def refuse(path: Path, data: bytes) -> bool:
        raise NoConditionError("ENOTSUP")

    monkeypatch.setattr(module, "_link_new", refuse)
    store.put_new(NAME, b"first")
    with pytest.raises(CheckpointError, match="another writer has committed"):
        store.put_new(NAME, b"second")
    assert store.get(NAME) == b"first"
