"""A store of checkpoints that fails for a moment."""

from __future__ import annotations

import logging

import fsspec
import pytest

from flytekitplugins_safedist.checkpoint.store import Store
from flytekitplugins_safedist.errors import CheckpointError


def test_a_store_that_fails_for_a_moment_is_asked_again(monkeypatch, caplog):
    store, fs = Store("memory://bucket/saves"), fsspec.filesystem("memory")
    store.put("one", b"1")
    read, fails = type(fs).cat_file, [ConnectionResetError("reset by peer")]

    def cat_file(*arguments, **more):
        if fails:
            raise fails.pop()
        return read(*arguments, **more)

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    with caplog.at_level(logging.INFO):
        assert store.get("one") == b"1"
    assert fails == []
    assert "reset by peer; trying again in 0." in caplog.text


def test_an_error_that_will_not_pass_is_told_at_once(monkeypatch):
    store, fs = Store("memory://bucket/closed"), fsspec.filesystem("memory")

    def cat_file(*_, **__):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    with pytest.raises(Exception, match=r"the store did not .*403 Forbidden"):
        store.get("one")


def test_what_is_no_error_of_a_disk_comes_through_at_once_as_it_is(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    store.put("save/part", b"all of it")

    def open_(*_, **__):
        raise MemoryError("the rank's own")

    monkeypatch.setattr("pathlib.Path.open", open_)
    with pytest.raises(MemoryError, match="the rank's own"):
        list(store.read("save", {"part": 9}, [("part", 0, 9)]))


def test_an_address_that_nothing_installed_here_reaches_is_named():
    with pytest.raises(CheckpointError, match=r"nothing installed here reaches this store \[store=nosuch://bucket\]"):
        Store("nosuch://bucket")
