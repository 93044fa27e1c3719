"""Remote stores: fetched in order, retried where that helps, and named where it does not."""

from __future__ import annotations

import gzip
import os
import threading
from contextlib import contextmanager

import pytest
from flytekit.configuration import DataConfig, S3Config
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from flytekitplugins_safedist.container.staging import CodeNotFoundError, Options, Retry, stage
from flytekitplugins_safedist.container.staging.source import _RANGE
from flytekitplugins_safedist.container.staging.watch import Watch
from flytekitplugins_safedist.errors import ArchiveError, MissingDependencyError, StagingError
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
    pauses: list[float] = []
    retry = Retry(attempts=4, base=1.0, sleep=pauses.append, answer=changes.pop("answer", 120.0))
    options = Options(**{"store": tmp_path / "store", "retry": retry, **changes})
    code = stage(server.url, tmp_path / "dest", options)
    assert (tmp_path / "dest/blob.bin").read_bytes() == BLOB
    return code, pauses


def refused(server, tmp_path, kind=StagingError, **changes) -> str:
    with pytest.raises(kind) as caught:
        staged(server, tmp_path, **changes)
    assert os.listdir(tmp_path / "store/trees") == []
    assert os.listdir(tmp_path / "store/work") == []
    assert not (tmp_path / "dest").exists()
    return str(caught.value)


def test_an_object_is_fetched_once_and_every_byte_once(store, tmp_path):
    before = threading.active_count()
    staged(store, tmp_path)
    assert store.sent == len(ARCHIVE)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith(("safedist-inflate", "safedist-fetch")) for name in names), (
        "our threads are joined before a task may run"
    )
    assert before <= threading.active_count()


def test_a_second_staging_asks_but_does_not_fetch(store, tmp_path):
    staged(store, tmp_path)
    store.sent = 0
    code, _ = staged(store, tmp_path)
    assert not code.fetched
    assert store.sent == 0


def test_a_connection_that_breaks_is_taken_up_again(store, tmp_path):
    store.fault = lambda method, number: ("cut", 1000) if method == "GET" and number in (0, 2) else None
    _, pauses = staged(store, tmp_path)
    assert pauses


def test_a_server_that_is_busy_for_a_while_is_borne_with_growing_pauses(store, tmp_path):
    store.fault = lambda method, number: 503 if method == "GET" and number < 2 else None
    _, pauses = staged(store, tmp_path)
    assert len(pauses) == 2


def test_pauses_grow_and_are_bounded_and_each_is_told():
    pauses: list[float] = []
    said: list[str] = []
    retry = Retry(base=1.0, most=4.0, sleep=pauses.append, say=said.append)
    for attempt in range(1, 9):
        retry.pause(attempt, "s3://b/k", ConnectionError("refused"))
    assert all(0.5 * least <= pause <= least for pause, least in zip(pauses, [1, 2, 4, 4, 4, 4, 4, 4], strict=True))
    assert said[0].startswith("s3://b/k: ConnectionError: refused; trying again in")
    assert said[0].endswith("(attempt 1 of 5 failed)")


def test_a_server_that_stays_down_is_one_error_after_bounded_tries(store, tmp_path):
    store.fault = lambda method, _: 503 if method == "GET" else None
    message = refused(store, tmp_path)
    assert "failed 4 times" in message
    assert "503" in message or "Service Unavailable" in message
    assert store.url in message


def test_a_download_that_always_breaks_is_one_error(store, tmp_path):
    store.fault = lambda method, _: ("cut", 10) if method == "GET" else None
    assert "failed 4 times" in refused(store, tmp_path)


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
@pytest.mark.parametrize("hanging", ["HEAD", "GET"])
def test_a_store_that_accepts_and_never_answers_is_one_error(store, tmp_path, hanging):
    store.fault = lambda method, _: "hang" if method == hanging else None
    message = refused(store, tmp_path, answer=0.2)
    assert "failed 4 times" in message
    assert "no answer within 0.2 s" in message


def test_one_request_that_hangs_is_asked_again(store, tmp_path):
    store.fault = lambda method, number: "hang" if (method, number) == ("GET", 0) else None
    _, pauses = staged(store, tmp_path, answer=1.0)
    assert len(pauses) >= 1


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_all_waiting_ends_at_the_deadline(store, tmp_path, fault):
    store.fault = lambda method, _: fault if method == "GET" else None
    message = refused(store, tmp_path, deadline=0.5)
    assert "not fetched in time" in message
    assert "all of it within 0.5 s" in message
    assert "SAFEDIST_CODE_TIMEOUT" in message


def test_a_store_that_resets_every_connection_is_one_error(store, tmp_path):
    store.fault = lambda method, _: ("reset", 10) if method == "GET" else None
    assert "failed 4 times" in refused(store, tmp_path)


def test_a_store_that_sends_less_than_it_announced_is_one_error(store, tmp_path):
    store.fault = lambda method, _: ("short", 7) if method == "GET" else None
    message = refused(store, tmp_path)
    assert "failed 4 times" in message
    assert "bytes arrived" in message


def test_a_store_that_sends_another_range_than_was_asked_for_is_one_error(ranged, tmp_path):
    ranged.range_fault = lambda start: ("shift", 11) if start else None
    assert "damaged" in refused(ranged, tmp_path, ArchiveError)


def test_a_bad_member_is_reported_while_later_ranges_hang(ranged, tmp_path):
    ranged.content = project({"../evil.py": "1", "blob.bin": BLOB})
    ranged.range_fault = lambda start: "hang" if start else None
    assert "'../evil.py'" in refused(ranged, tmp_path, ArchiveError)


def test_whoever_waits_is_told_what_for_again_and_again(monkeypatch):
    monkeypatch.setattr("flytekitplugins_safedist.container.staging.watch._LOOK", 0.001)
    monkeypatch.setattr("flytekitplugins_safedist.container.staging.watch._TELL", 0.0)
    enough, said = threading.Event(), []

    def say(text):
        said.append(text)
        if len(said) == 3:
            enough.set()

    Watch(3600.0, say).call(enough.wait, "s3://b/k", 3600.0)
    assert said[2].startswith("waiting for s3://b/k: no answer for")


# --- what tells one version from another ----------------------------------------------------------------------------
@pytest.mark.parametrize("header", ["Last-Modified", "Content-MD5", "ETag"])
def test_a_changed_object_of_the_same_size_is_fetched_again(tmp_path, header):
    with ObjectStore(ARCHIVE) as store:
        store.headers = {"ETag": None, header: "Mon, 02 Nov 2026 10:00:00 GMT"}
        staged(store, tmp_path)
        assert not staged(store, tmp_path)[0].fetched
        store.headers[header] = "Mon, 02 Nov 2026 10:00:01 GMT"
        assert staged(store, tmp_path)[0].fetched


def test_an_object_that_has_nothing_but_a_size_is_never_taken_for_known(store, tmp_path):
    store.headers = {"ETag": None}
    staged(store, tmp_path)
    assert staged(store, tmp_path)[0].fetched


@pytest.mark.parametrize("archive", [ARCHIVE, gzip.decompress(ARCHIVE)], ids=["gzip", "plain"])
def test_a_content_encoding_is_not_taken_off(store, tmp_path, archive):
    """Some servers take it from the name; fsspec then knows no size, and aiohttp would inflate on the way."""
    store.content = archive
    store.headers = {"Content-Encoding": "gzip"}
    staged(store, tmp_path)


def test_a_server_that_is_not_there_is_one_error(tmp_path):
    server = ObjectStore(b"")
    server.close()
    message = refused(server, tmp_path)
    assert "failed 4 times" in message
    assert "network" in message


def test_a_store_that_nothing_here_speaks_to_is_named(tmp_path):
    with pytest.raises(MissingDependencyError, match="cannot reach the store") as caught:
        stage("nosuch://bucket/key", tmp_path / "dest", Options(store=tmp_path / "store"))
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
