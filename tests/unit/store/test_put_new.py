"""Of two who put one object, the store lets one: on file systems by link(2), on object stores by a condition."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.failures import Outlook, outlook
from flytekitplugins_safedist.store.put_new import NoConditionError, put_new
from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.objectstore import ClientError


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path, scheme: str) -> None:
    address = f"{scheme}{tmp_path}/not/there/yet/error.pb"
    assert put_new(None, address, b"first")
    assert not put_new(None, address, b"second")
    [file] = (tmp_path / "not/there/yet").iterdir()
    assert (file.name, file.read_bytes()) == ("error.pb", b"first")


def _put(address: str, data: bytes, both: Any, answers: Any) -> None:
    both.wait()
    answers.put((put_new(None, address, data), data))


def test_of_processes_that_put_at_once_one_has_put_and_its_object_is_whole(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    answers = forked.SimpleQueue()
    both = forked.Barrier(4)
    data = [bytes([number]) * 100_000 for number in range(4)]
    putting = [forked.Process(target=_put, args=(f"{tmp_path}/error.pb", one, both, answers)) for one in data]
    for one in putting:
        one.start()
    found = [answers.get() for _ in putting]
    for one in putting:
        one.join()
    assert [data for won, data in found if won] == [(tmp_path / "error.pb").read_bytes()]
    assert os.listdir(tmp_path) == ["error.pb"]


def test_what_is_in_the_way_is_not_taken_for_the_object(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        put_new(None, f"{tmp_path}/file/error.pb", b"data")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_on_a_file_system_without_links_the_object_is_whole_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, "no links here")

    monkeypatch.setattr(os, "link", link)
    assert put_new(None, f"{tmp_path}/error.pb", b"data")
    assert (tmp_path / "error.pb").read_bytes() == b"data"
    assert os.listdir(tmp_path) == ["error.pb"]


def test_an_object_that_is_there_stays_as_it_is(s3: S3) -> None:
    import s3fs

    s3.put("something", b"")  # the bucket is there
    stores = [
        s3fs.S3FileSystem(endpoint_url=s3.endpoint, key="test", secret="test", skip_instance_cache=True)
        for _ in range(2)
    ]
    assert put_new(stores[0], f"s3://{BUCKET}/a/error.pb", b"first")
    assert not put_new(stores[1], f"s3://{BUCKET}/a/error.pb", b"second")
    assert s3.get("a/error.pb") == b"first"


class Store:
    """A filesystem of fsspec that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def pipe_file(self, address: str, data: bytes, mode: str = "overwrite") -> None:
        raise OSError("the client's own words") from self._error


class Old:
    """One of a version without the condition."""

    def pipe_file(self, address: str, data: bytes) -> None:
        raise AssertionError("nothing was to be put")


class Azure:
    """As adlfs takes it: by a word of its own."""

    def pipe_file(self, address: str, data: bytes, overwrite: bool = True, **kwargs: object) -> None:
        if not overwrite:
            raise FileExistsError(address)


def test_a_store_that_has_a_word_of_its_own_is_asked_by_it() -> None:
    assert not put_new(Azure(), "abfs://container/error.pb", b"second")


class Silent:
    """s3fs 2024.9 and 2024.10: what they do not know they hand on to botocore, less what that does not know either."""

    def pipe_file(self, address: str, data: bytes, chunksize: int = 1, **kwargs: object) -> None:
        raise AssertionError("nothing was to be put: the condition is left out without a word")


def test_a_store_that_refuses_has_the_object() -> None:
    codes = ("PreconditionFailed", "412", "ConditionNotMet")
    assert [code for code in codes if put_new(Store(ClientError(code)), "s3://bucket/key", b"data")] == []


@pytest.mark.parametrize("store", [Store(ClientError("NotImplemented")), Store(ClientError("501")), Old(), Silent()])
def test_a_store_that_has_no_condition_says_so(store: Any) -> None:
    with pytest.raises(NoConditionError):
        put_new(store, "s3://bucket/key", b"data")


@pytest.mark.parametrize("code", ["SlowDown", "ConditionalRequestConflict"])
def test_every_other_error_is_the_callers_and_may_pass(code: str) -> None:
    """A conflict (409) says that nothing was put: the next try does it, or finds the other one's."""
    with pytest.raises(OSError, match="own words") as caught:
        put_new(Store(ClientError(code)), "s3://bucket/key", b"data")
    assert outlook(caught.value) is Outlook.TRANSIENT


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    error = RuntimeError("no code in it")
    error.__cause__ = error
    with pytest.raises(OSError, match="own words"):
        put_new(Store(error), "s3://bucket/key", b"data")
