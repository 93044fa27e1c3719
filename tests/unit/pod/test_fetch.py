"""Remote stores: fetched in order, retried where that helps, and named where it does not."""

from __future__ import annotations

import gzip
import os
import random
import threading
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from flytekit.configuration import DataConfig, S3Config
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins_safedist.errors import CodeNotFoundError, MissingDependencyError, StagingError
from flytekitplugins_safedist.pod.staging import Options, points, stage
from flytekitplugins_safedist.pod.staging.fetch import Download
from flytekitplugins_safedist.store import patience
from tests.harness.objectstore import ObjectStore
from tests.harness.tarballs import project

BLOB = random.Random(1).randbytes(4 << 20)
ARCHIVE = project({"main.py": "V = 1", "blob.bin": BLOB})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.01)


@contextmanager
def by_s3(content, scratch):
    """A store that is reached through s3fs."""
    with ObjectStore(content) as server:
        s3 = S3Config(endpoint=server.url.partition("/bucket")[0], access_key_id="x", secret_access_key="y")
        access = FileAccessProvider(scratch / "sandbox", str(scratch / "raw"), data_config=DataConfig(s3=s3))
        server.url = "s3://bucket/fast.tar.gz"
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            yield server


@pytest.fixture(params=["S3", "HTTP"])
def store(request, tmp_path):
    with by_s3(ARCHIVE, tmp_path) if request.param == "S3" else ObjectStore(ARCHIVE) as server:
        yield server


def staged(server, tmp_path, **changes):
    code = stage(server.url, tmp_path / "dest", Options(**changes))
    assert (tmp_path / "dest/blob.bin").read_bytes() == BLOB
    return code


@pytest.fixture
def short(monkeypatch):
    """A store has a tenth of a second for its first answer."""
    monkeypatch.setattr(patience, "ANSWER_SECONDS", 0.1)


def refused(server, tmp_path, kind=StagingError, **changes) -> str:
    """The one error; of a store that does not recover, after the time for staging."""
    with pytest.raises(kind) as caught:
        staged(server, tmp_path, **changes)
    assert os.listdir(tmp_path / "dest") == []
    return str(caught.value)


class Plain(LocalFileSystem):
    """A file system of fsspec's that is no asynchronous one."""

    protocol = "plain"
    answers = threading.Event()

    def info(self, path, **_):
        self.answers.wait()
        return super().info(path.removeprefix("plain://"))

    def get_file(self, rpath, lpath, callback=None, max_concurrency=10):
        assert max_concurrency == 1, "several parts at once, each whole in memory"
        self.fetch(Path(rpath.removeprefix("plain://")).read_bytes(), Path(lpath))

    def fetch(self, content, path):
        path.write_bytes(content)


@pytest.fixture
def plain(monkeypatch, tmp_path):
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "plain", Plain)
    monkeypatch.setattr(Plain, "answers", threading.Event())
    (tmp_path / "fast.tar.gz").write_bytes(ARCHIVE)
    return f"plain://{tmp_path}/fast.tar.gz"


def test_a_file_system_that_is_not_asynchronous_and_hangs_is_bounded_too(plain, tmp_path, short):
    with pytest.raises(StagingError, match="not fetched in time"):
        stage(plain, tmp_path / "dest", Options(deadline=0.3))
    Plain.answers.set()  # the thread that was left behind ends


def test_a_client_that_takes_long_to_be_made_is_bounded_too(plain, tmp_path, monkeypatch, short):
    made = threading.Event()
    monkeypatch.setattr(Plain, "__init__", lambda *_, **__: made.wait())
    with pytest.raises(StagingError, match="not fetched in time"):
        stage(plain, tmp_path / "dest", Options(deadline=0.3))
    made.set()


def test_an_archive_is_unpacked_while_it_arrives_and_every_byte_is_fetched_once(store, tmp_path, monkeypatch):
    monkeypatch.setattr(points, "at", lambda point: store.goes_on.set() if point == "fetch" else None)
    store.fault = lambda method, _: ("held", 1 << 20) if method == "GET" else None
    staged(store, tmp_path)
    assert store.sent == len(ARCHIVE)


@pytest.mark.parametrize("archive", [ARCHIVE, gzip.decompress(ARCHIVE)], ids=["gzip", "plain"])
@pytest.mark.parametrize("first", [0, 2 << 20], ids=["nothing first", "half of it first"])
def test_a_client_may_write_its_file_in_any_order(plain, tmp_path, monkeypatch, archive, first):
    """gcsfs and others make it as long as the archive at once, and fill it in as parts arrive."""
    (tmp_path / "fast.tar.gz").write_bytes(archive)
    Plain.answers.set()
    read, tried = Download.read, threading.Event()

    def noted(self, position, most):
        data = read(self, position, most)
        if position + len(data) > first:
            tried.set()
        return data

    def fetch(_, content, path):
        with open(path, "wb") as file:
            file.write(content[:first])
            file.flush()
            os.truncate(path, len(content))
            if first and content == ARCHIVE:  # what is plain is not looked at before all is there
                tried.wait()
            file.write(content[first:])

    monkeypatch.setattr(Download, "read", noted)
    monkeypatch.setattr(Plain, "fetch", fetch)
    stage(plain, tmp_path / "dest")
    assert (tmp_path / "dest/blob.bin").read_bytes() == BLOB


def test_a_download_may_take_long_as_long_as_something_comes(plain, tmp_path, monkeypatch, short):
    Plain.answers.set()

    def fetch(_, content, path):
        with open(path, "wb", buffering=0) as file:
            for start in range(0, len(content), len(content) // 8):
                time.sleep(0.05)
                file.write(content[start : start + len(content) // 8])

    monkeypatch.setattr(Plain, "fetch", fetch)
    assert stage(plain, tmp_path / "dest").new == 2


def test_a_connection_that_breaks_is_taken_up_again(store, tmp_path):
    store.fault = lambda method, number: ("cut", 1000) if method == "GET" and number in (0, 2) else None
    staged(store, tmp_path)


def test_a_server_that_is_busy_for_a_while_is_borne_and_each_try_that_failed_is_told(store, tmp_path, caplog):
    caplog.set_level("INFO")
    store.fault = lambda method, number: 503 if method == "GET" and number < 2 else None
    staged(store, tmp_path)
    again = [text for text in caplog.messages if "trying again in" in text]
    if store.url.startswith("http"):  # S3's client tries again by itself
        assert ["(attempt 1 failed)" in again[0], "(attempt 2 failed)" in again[1]] == [True, True]
        assert store.sent == len(ARCHIVE), "what comes, comes once"


@pytest.mark.parametrize("fault", [503, ("cut", 10), ("reset", 10), ("short", 7), "hang", "drip"])
def test_a_server_that_stays_down_is_one_error_at_the_deadline(store, tmp_path, short, fault):
    store.fault = lambda method, _: fault if method == "GET" else None
    message = refused(store, tmp_path, deadline=0.3)
    for words in ("not fetched in time", store.url, "at attempt", "all of it within 0.3 s", "SAFEDIST_CODE_TIMEOUT"):
        assert words in message


def test_a_missing_object_says_to_register_again(store, tmp_path):
    store.fault = lambda *_: 404
    message = refused(store, tmp_path, CodeNotFoundError)
    assert "register the task again" in message
    assert store.requests["GET"] + store.requests["HEAD"] <= 2, "asked once: asking again will not help"


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_named_and_not_hammered_and_signatures_of_urls_are_not_told(store, tmp_path, status):
    store.fault = lambda *_: status
    store.url += "?X-Amz-Signature=secretsecret"
    message = refused(store, tmp_path)
    assert "secretsecret" not in message
    assert "refused access" in message
    assert "credentials" in message
    assert store.requests["GET"] + store.requests["HEAD"] <= 4


def test_an_object_that_changes_while_it_is_fetched_is_refused(store, tmp_path):
    other = project({"main.py": "V = 2", "blob.bin": BLOB})
    gets = []

    def replaced_behind_our_back(method, _number):
        gets.append(method)
        return ("replace", other) if gets.count("GET") and method == "HEAD" else None

    store.fault = replaced_behind_our_back
    assert "changed while it was fetched" in refused(store, tmp_path)


def test_the_same_archive_may_be_put_again_while_it_is_fetched(store, tmp_path):
    """By whoever registers the same code again: flytekit's addresses are made of the content."""

    def put_again(method, _number):
        if store.requests["GET"] and method == "HEAD":
            store.headers = {"ETag": '"another"', "Last-Modified": "Fri, 27 Nov 2026 07:00:00 GMT"}

    store.fault = put_again
    staged(store, tmp_path)
    assert store.sent == 2 * len(ARCHIVE)


@pytest.mark.parametrize(
    "other",
    [project({"main.py": "V = 2", "blob.bin": random.Random(2).randbytes(4 << 20)}), ARCHIVE[:-6]],
    ids=["another", "shorter"],
)
def test_an_object_of_two_versions_is_called_changed_and_neither_damaged_nor_a_broken_connection(
    store, tmp_path, other
):
    store.fault = lambda method, number: ("replace", other) if (method, number) == ("GET", 0) else None
    assert "changed while it was fetched" in refused(store, tmp_path)


# --- hostile stores ----------------------------------------------------------------------------------------------
def test_a_store_that_accepts_and_never_answers_is_one_error(store, tmp_path, short):
    store.fault = lambda method, _: "hang" if method == "HEAD" else None
    assert "no answer within" in refused(store, tmp_path, deadline=0.3)


def test_one_request_that_hangs_is_asked_again(store, tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "ANSWER_SECONDS", 0.3)
    store.fault = lambda method, number: "hang" if (method, number) == ("GET", 0) else None
    staged(store, tmp_path)


@pytest.mark.parametrize("archive", [ARCHIVE, gzip.decompress(ARCHIVE)], ids=["gzip", "plain"])
def test_a_content_encoding_is_not_taken_off(store, tmp_path, archive):
    """Some servers take it from the name; fsspec then knows no size, and aiohttp would inflate on the way."""
    store.content = archive
    store.headers = {"Content-Encoding": "gzip"}
    staged(store, tmp_path)


def test_a_server_that_is_not_there_is_one_error(tmp_path):
    server = ObjectStore(b"")
    server.close()
    message = refused(server, tmp_path, deadline=0.3)
    assert "network" in message


def test_a_store_that_nothing_here_speaks_to_is_named(tmp_path):
    with pytest.raises(MissingDependencyError, match="cannot reach the store") as caught:
        stage("nosuch://bucket/key", tmp_path / "dest", Options())
    assert "install the store's fsspec package" in str(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "http://127.0.0.1:1"])
def test_a_store_whose_address_is_wrong_needs_no_package(endpoint, tmp_path, monkeypatch):
    s3 = S3Config(endpoint=endpoint, access_key_id="x", secret_access_key="y")
    access = FileAccessProvider(tmp_path / "sandbox", str(tmp_path / "raw"), data_config=DataConfig(s3=s3))
    with (
        FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)),
        pytest.raises(StagingError, match="check the store's address") as caught,
    ):
        stage("s3://bucket/fast.tar.gz", tmp_path / "dest", Options(deadline=0.3))
    assert "install" not in str(caught.value)


def test_an_error_shows_the_cause_that_it_is_judged_by(tmp_path):
    """fsspec says FileNotFoundError of whatever HTTP server."""
    with ObjectStore(b"") as store:
        store.fault = lambda *_: 403
        assert "seen: ClientResponseError: 403" in refused(store, tmp_path)
