"""Remote stores: fetched in order, retried where that helps, and named where it does not."""

from __future__ import annotations

import gzip
import os
import threading
from contextlib import contextmanager
from importlib import import_module

import pytest
from flytekit.configuration import DataConfig, S3Config
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins_safedist.container.staging import Options, stage
from flytekitplugins_safedist.container.staging.fetch import _RANGE
from flytekitplugins_safedist.errors import ArchiveError, CodeNotFoundError, MissingDependencyError, StagingError
from flytekitplugins_safedist.flyte.storage_errors import Outlook, judge
from tests.harness.objectstore import ObjectStore
from tests.harness.tarballs import project

BLOB = os.urandom(2 * _RANGE + 12345)
ARCHIVE = project({"main.py": "V = 1", "blob.bin": BLOB})


@contextmanager
def by_s3(content, scratch):
    """A store that is read in ranges, through s3fs; fsspec's own client for HTTP reads one stream."""
    with ObjectStore(content) as server:
        s3 = S3Config(endpoint=server.url.partition("/bucket")[0], access_key_id="x", secret_access_key="y")
        access = FileAccessProvider(scratch / "sandbox", str(scratch / "raw"), data_config=DataConfig(s3=s3))
        server.url = "s3://bucket/fast.tar.gz"
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            yield server


@pytest.fixture
def ranged(tmp_path):
    with by_s3(ARCHIVE, tmp_path) as server:
        yield server


@pytest.fixture(params=["ranges", "one stream"])
def store(request, tmp_path):
    with by_s3(ARCHIVE, tmp_path) if request.param == "ranges" else ObjectStore(ARCHIVE, ranges=False) as server:
        yield server


def staged(server, tmp_path, **changes):
    code = stage(server.url, tmp_path / "dest", Options(pause=0.01, **changes))
    assert (tmp_path / "dest/blob.bin").read_bytes() == BLOB
    return code


def refused(server, tmp_path, kind=StagingError, **changes) -> str:
    """The one error; of a store that does not recover, after the time for staging."""
    with pytest.raises(kind) as caught:
        staged(server, tmp_path, **changes)
    assert os.listdir(tmp_path / "dest") == []
    return str(caught.value)


def test_every_byte_is_fetched_once(store, tmp_path):
    staged(store, tmp_path)
    assert store.sent == len(ARCHIVE)


@pytest.fixture
def plain_files(monkeypatch, tmp_path):
    """A file system of fsspec's that is no asynchronous one."""

    class Plain(LocalFileSystem):
        protocol = "plain"
        answers = threading.Event()

        def info(self, path, **_):
            self.answers.wait()
            return super().info(path.removeprefix("plain://"))

        def get_file(self, rpath, lpath, **_):
            super().get_file(rpath.removeprefix("plain://"), lpath)

    monkeypatch.setitem(import_module("fsspec.registry")._registry, "plain", Plain)
    (tmp_path / "fast.tar.gz").write_bytes(ARCHIVE)
    return Plain, f"plain://{tmp_path}/fast.tar.gz"


def test_a_file_system_that_is_not_asynchronous_is_fetched_from(plain_files, tmp_path):
    kind, uri = plain_files
    kind.answers.set()
    stage(uri, tmp_path / "dest")
    assert (tmp_path / "dest/blob.bin").read_bytes() == BLOB


def test_a_file_system_that_is_not_asynchronous_and_hangs_is_bounded_too(plain_files, tmp_path):
    kind, uri = plain_files
    with pytest.raises(StagingError, match="not fetched in time"):
        stage(uri, tmp_path / "dest", Options(deadline=0.3, answer=0.1, pause=0.01))
    kind.answers.set()  # the thread that was left behind ends


def test_a_client_that_takes_long_to_be_made_is_bounded_too(plain_files, tmp_path, monkeypatch):
    kind, uri = plain_files
    made = threading.Event()
    monkeypatch.setattr(kind, "__init__", lambda *_, **__: made.wait())
    with pytest.raises(StagingError, match="not fetched in time"):
        stage(uri, tmp_path / "dest", Options(deadline=0.3, answer=0.1, pause=0.01))
    made.set()


def test_a_connection_that_breaks_is_taken_up_again(store, tmp_path):
    store.fault = lambda method, number: ("cut", 1000) if method == "GET" and number in (0, 2) else None
    staged(store, tmp_path)


def test_a_server_that_is_busy_for_a_while_is_borne(store, tmp_path):
    store.fault = lambda method, number: 503 if method == "GET" and number < 2 else None
    staged(store, tmp_path)


def test_each_try_that_failed_is_told(tmp_path, caplog):
    caplog.set_level("INFO")
    with ObjectStore(ARCHIVE, ranges=False) as store:
        store.fault = lambda method, number: 503 if method == "GET" and number < 2 else None
        staged(store, tmp_path)
    again = [text for text in caplog.messages if "trying again in" in text]
    assert ["(attempt 1 failed)" in again[0], "(attempt 2 failed)" in again[1]] == [True, True]


@pytest.mark.parametrize("fault", [503, ("cut", 10), ("reset", 10), ("short", 7), "hang", "drip"])
def test_a_server_that_stays_down_is_one_error_at_the_deadline(store, tmp_path, fault):
    store.fault = lambda method, _: fault if method == "GET" else None
    message = refused(store, tmp_path, deadline=0.5, answer=0.1)
    for words in ("not fetched in time", store.url, "at attempt", "all of it within 0.5 s", "SAFEDIST_CODE_TIMEOUT"):
        assert words in message


def test_a_missing_object_says_to_register_again(store, tmp_path):
    store.fault = lambda *_: 404
    message = refused(store, tmp_path, CodeNotFoundError)
    assert "register the task again" in message
    assert store.requests["GET"] + store.requests["HEAD"] <= 2, "asked once: asking again will not help"


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_named_and_not_hammered(store, tmp_path, status):
    store.fault = lambda *_: status
    message = refused(store, tmp_path)
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


def test_an_object_that_is_overwritten_between_two_ranges_is_called_changed_and_not_damaged(ranged, tmp_path):
    other = project({"main.py": "V = 2", "blob.bin": os.urandom(len(BLOB))})
    ranged.range_fault = lambda start: ("replace", other) if start else None
    assert "changed while it was fetched" in refused(ranged, tmp_path)


def test_an_object_that_is_overwritten_by_a_shorter_one_is_called_changed_and_not_a_broken_connection(ranged, tmp_path):
    shorter = ranged.content[:-6]
    ranged.range_fault = lambda start: ("replace", shorter) if start else None
    assert "changed while it was fetched" in refused(ranged, tmp_path)


# --- hostile stores ----------------------------------------------------------------------------------------------
def test_a_store_that_accepts_and_never_answers_is_one_error(store, tmp_path):
    store.fault = lambda method, _: "hang" if method == "HEAD" else None
    assert "no answer within" in refused(store, tmp_path, deadline=0.5, answer=0.1)


def test_one_request_that_hangs_is_asked_again(store, tmp_path):
    store.fault = lambda method, number: "hang" if (method, number) == ("GET", 0) else None
    staged(store, tmp_path, answer=1.0)


def test_a_store_that_sends_another_range_than_was_asked_for_is_one_error(ranged, tmp_path):
    ranged.range_fault = lambda start: ("shift", 11) if start else None
    assert "damaged" in refused(ranged, tmp_path, ArchiveError)


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


def test_signatures_of_signed_urls_are_not_told(store, tmp_path):
    store.fault = lambda *_: 403
    store.url += "?X-Amz-Signature=secretsecret"
    assert "secretsecret" not in refused(store, tmp_path)


# --- verdicts ----------------------------------------------------------------------------------------------------
class ClientError(Exception):
    """As botocore's: the code is in ``response``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


class NoCredentialsError(Exception):
    """As botocore's: known by its name."""


def wrapped(inner: BaseException) -> OSError:
    error = OSError("s3fs wraps it")
    error.__cause__ = inner
    return error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (FileNotFoundError("x"), Outlook.MISSING),
        (ClientError("NoSuchBucket"), Outlook.MISSING),
        (wrapped(ClientError("NoSuchKey")), Outlook.MISSING),
        (PermissionError("x"), Outlook.DENIED),
        (wrapped(ClientError("ExpiredToken")), Outlook.DENIED),
        (wrapped(ClientError("InvalidToken")), Outlook.DENIED),
        (wrapped(NoCredentialsError()), Outlook.DENIED),
        (ImportError("no s3fs"), Outlook.UNSUPPORTED),
        (ClientError("SlowDown"), Outlook.TRANSIENT),
        (ConnectionResetError(), Outlook.TRANSIENT),
        (TimeoutError(), Outlook.TRANSIENT),
        (OSError(5, "Input/output error"), Outlook.TRANSIENT),
    ],
    ids=lambda value: getattr(value, "value", f"{type(value).__name__} {value}"),
)
def test_errors_of_stores_are_understood_by_code_and_name(error, verdict):
    assert judge(error) is verdict
