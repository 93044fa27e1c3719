"""Fetching once: what is there counts, what is not what was asked for does not, and what is told about it."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.errors import DownloadError, WorkFailedError
from flytekitplugins_safedist.fs import Identity, download_once, downloads, file_group
from flytekitplugins_safedist.fs.coordination import MemoryCoordinationStore
from flytekitplugins_safedist.fs.downloads import Progress, plan_fetch
from flytekitplugins_safedist.fs.group import Group
from tests.harness.procs import until

BODY = b"weights" * 100
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def alone() -> Group:
    return Group(MemoryCoordinationStore(), Identity())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    place.write_bytes(BODY)
    return place


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers /whole, /cut (fewer bytes than it says) and /unsized."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if self.path.startswith("/whole"):
                self.send_header("Content-Length", str(len(BODY)))
            if self.path == "/cut":
                self.send_header("Content-Length", str(len(BODY) + 1))
            self.end_headers()
            self.wfile.write(BODY)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def cause_of(caught: pytest.ExceptionInfo[WorkFailedError]) -> str:
    return str(caught.value)


# --- what is fetched ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [None, DIGEST, DIGEST.upper()])
def test_a_file_is_brought_to_a_place_whose_parent_is_made(tmp_path, source, alone, digest):
    target = tmp_path / "a" / "b" / "weights"
    assert download_once(str(source), target, sha256=digest, group=alone) == target
    assert target.read_bytes() == BODY
    assert [one.name for one in target.parent.iterdir()] == ["weights"]


def test_what_is_there_counts_as_it_is_where_no_digest_is_asked_for(tmp_path, source, alone):
    (tmp_path / "weights").write_text("mine")
    assert download_once(str(source), tmp_path / "weights", group=alone).read_text() == "mine"


def test_what_is_there_with_the_digest_is_not_fetched_again(tmp_path, alone):
    (tmp_path / "weights").write_bytes(BODY)
    download_once(str(tmp_path / "no such source"), tmp_path / "weights", sha256=DIGEST.upper(), group=alone)


def test_what_is_there_with_another_digest_is_fetched_anew_and_that_is_told(tmp_path, source, alone, caplog):
    target = tmp_path / "weights"
    target.write_text("other")
    assert download_once(str(source), target, sha256=DIGEST, group=alone).read_bytes() == BODY
    assert f"{target} is there with another digest than asked for; it is fetched anew" in caplog.messages


def test_a_file_with_another_digest_than_asked_for_is_not_there_afterwards(tmp_path, source, alone):
    with pytest.raises(WorkFailedError) as caught:
        download_once(str(source), tmp_path / "weights", sha256="AB" * 32, group=alone)
    assert (
        f"the download is not what was expected [source={source}] "
        f"(seen: sha256 {DIGEST}, {len(BODY)} bytes; expected: sha256 {'ab' * 32})" in cause_of(caught)
    )
    assert not (tmp_path / "weights").exists()


def test_what_was_fetched_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced: list[bool] = []
    fsync, target = os.fsync, tmp_path / "out" / "file"

    def note(handle: int) -> None:
        synced.append(target.exists())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    (tmp_path / "source").write_bytes(b"data")
    download_once(tmp_path / "source", target)
    assert synced == [False, True], "the file, and then its name"


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_directory_is_brought_with_all_that_is_below_it(tmp_path, alone, slash):
    (tmp_path / "source" / "below").mkdir(parents=True)
    (tmp_path / "source" / "below" / "a").write_bytes(BODY)
    said: list[Progress] = []
    target = download_once(f"{tmp_path}/source{slash}", tmp_path / "copy", progress=said.append, group=alone)
    assert (target / "below" / "a").read_bytes() == BODY
    assert [(one.done, one.total) for one in said] == [(len(BODY), None)]


def test_a_directory_that_is_there_is_kept(tmp_path, alone):
    (tmp_path / "source").mkdir()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").touch()
    target = download_once(f"{tmp_path}/source/", tmp_path / "copy", group=alone)
    assert [one.name for one in target.iterdir()] == ["mine"]


def test_a_digest_of_a_directory_is_refused_before_anything_is_fetched(tmp_path, alone):
    with pytest.raises(DownloadError) as caught:
        download_once("s3://bucket/data/", tmp_path / "copy", sha256=DIGEST, group=alone)
    assert str(caught.value) == (
        f"a directory has no digest of its own [source=s3://bucket/data/] (seen: sha256={DIGEST}). "
        "Next step: fetch an archive or a file, or compare the files' digests yourself"
    )


def test_the_second_call_for_one_place_looks_again(tmp_path, source, alone):
    target = download_once(str(source), tmp_path / "weights", group=alone)
    target.unlink()
    assert download_once(str(source), tmp_path / "weights", group=alone).read_bytes() == BODY


def test_a_source_that_is_not_there_is_told_with_its_name_the_place_and_what_to_see(tmp_path, alone):
    with pytest.raises(WorkFailedError) as caught:
        download_once(str(tmp_path / "nothing"), tmp_path / "weights", group=alone)
    text = cause_of(caught)
    assert f"the download failed [source={tmp_path}/nothing, to={tmp_path}/weights, host=" in text
    assert "(seen: FileNotFoundError: " in text
    assert "Next step: see whether the source exists and this task may read it" in text


# --- over HTTP ------------------------------------------------------------------------------------------------------


def test_a_url_is_fetched_with_its_length_told(tmp_path, server, alone):
    said: list[Progress] = []
    url = f"http://127.0.0.1:{server.server_port}/whole?signature=secret"
    target = download_once(url, tmp_path / "weights", progress=said.append, group=alone)
    assert target.read_bytes() == BODY
    assert [(one.done, one.total) for one in said] == [(len(BODY), len(BODY))]


def test_a_url_that_does_not_say_its_length_is_fetched(tmp_path, server, alone):
    said: list[Progress] = []
    url = f"http://127.0.0.1:{server.server_port}/unsized"
    assert download_once(url, tmp_path / "weights", progress=said.append, group=alone).read_bytes() == BODY
    assert [one.total for one in said] == [None]


def test_a_connection_that_ends_early_leaves_nothing(tmp_path, server, alone):
    with pytest.raises(WorkFailedError) as caught:
        download_once(f"http://127.0.0.1:{server.server_port}/cut", tmp_path / "weights", group=alone)
    assert f"OSError: the connection ended after {len(BODY)} of {len(BODY) + 1} bytes" in cause_of(caught)
    assert not (tmp_path / "weights").exists()


# --- how a source is fetched ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "is_dir"),
    [
        ("s3://bucket/file", "s3://bucket/file", False),
        ("s3://bucket/data/", "s3://bucket/data/", True),
        ("https://user:word@host/file?key=secret", "https://host/file", False),
        ("http://host/data/", "http://host/data/", False),
        (Path("/no/such/file"), "/no/such/file", False),
        ("a@b", "a@b", False),
        (SimpleNamespace(remote_source="s3://b/f", path="/x", download=1), "s3://b/f", False),
        (SimpleNamespace(remote_source=None, path="/x", download=1), "/x", False),
    ],
)
def test_a_source_has_a_name_without_secrets_and_is_a_file_or_a_directory(source, name, is_dir):
    fetch = plan_fetch(source)
    assert (fetch.name, fetch.is_dir) == (name, is_dir)


def test_what_is_nothing_that_can_be_fetched_is_told_with_what_can():
    with pytest.raises(DownloadError) as caught:
        plan_fetch(3)
    assert str(caught.value) == (
        "this cannot be downloaded (seen: int; expected: a URL, a path, FlyteFile, FlyteDirectory)"
    )


@pytest.mark.parametrize(("kind", "ends"), [("FlyteFile", ""), ("FlyteDirectory", "/")])
def test_what_flyte_holds_is_fetched_with_flytes_own_access(tmp_path, alone, monkeypatch, kind, ends):
    asked: list[tuple[Any, ...]] = []

    def get_data(*args: Any, **more: Any) -> None:
        asked.append((*args, more))
        if more:
            (Path(args[1]) / "a").write_bytes(BODY)
        else:
            Path(args[1]).write_bytes(BODY)

    context = SimpleNamespace(file_access=SimpleNamespace(get_data=get_data))
    monkeypatch.setattr("flytekit.FlyteContextManager.current_context", lambda: context)
    source = type(kind, (), {"remote_source": "s3://b/f", "download": None})()
    target = download_once(source, tmp_path / "copy", group=alone)
    ((uri, draft, more),) = asked
    assert (uri, draft[-1:] == "/") == (f"s3://b/f{ends}", bool(ends))
    assert more == ({"is_multipart": True} if ends else {})
    assert (target / "a" if ends else target).read_bytes() == BODY


# --- who fetches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "part"), [("job", "job"), ("node", "node1"), ("rank", "rank3")])
def test_who_is_said_to_share_the_place_has_one_download(tmp_path, monkeypatch, source, scope, part):
    parts: list[str] = []
    monkeypatch.setattr(downloads, "once_per_part", lambda name, key, work, **_: (parts.append(name), work())[1])
    group = file_group(tmp_path / "notes", identity=Identity(3, 4, 1, 2, 1, 2))
    target = tmp_path / "made" / "weights"
    assert download_once(str(source), target, scope=scope, group=group) == target
    assert parts == [f"download/{part}"]


def test_ranks_find_out_who_shares_the_place_where_nobody_says_it(tmp_path, monkeypatch, source):
    asked: list[tuple[Path, str]] = []

    def shared(place: Path, *, key: str, group: Group) -> SimpleNamespace:
        asked.append((place, key))
        return SimpleNamespace(part=2)

    parts: list[str] = []
    monkeypatch.setattr(downloads, "shared_scope", shared)
    monkeypatch.setattr(downloads, "once_per_part", lambda name, key, work, **_: (parts.append(name), work())[1])
    download_once(
        str(source), tmp_path / "weights", group=file_group(tmp_path / "notes", identity=Identity(0, 2, 0, 2))
    )
    ((place, key),) = asked
    assert place == tmp_path
    assert key.startswith("download/")
    assert parts == ["download/part2"]


def test_places_and_sources_of_another_name_are_other_downloads(tmp_path, monkeypatch, source):
    keys: list[str] = []
    monkeypatch.setattr(downloads, "once_per_part", lambda name, key, work, **_: (keys.append(key), work())[1])
    (tmp_path / "other").write_bytes(BODY)
    group = Group(MemoryCoordinationStore(), Identity())
    for here, there in ((source, "a"), (source, "b"), (tmp_path / "other", "a"), (source, "a")):
        download_once(str(here), tmp_path / there, scope="job", group=group)
    first, *others = (key.partition("/") for key in keys)
    assert [key[0] == first[0] for key in others] == [False, False, True]
    assert others[-1][2] == "1"


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_told_now_and_then_while_a_file_grows(tmp_path, alone, monkeypatch):
    said: list[Progress] = []

    def bring(uri: str, draft: Path, *, is_dir: bool) -> None:
        draft.write_bytes(b"1234")
        until(lambda: any(one.done == 4 for one in said), "progress")
        draft.write_bytes(BODY)

    monkeypatch.setattr(downloads, "_by_fsspec", bring)
    download_once("s3://b/f", tmp_path / "f", progress=said.append, report_every_s=0.001, group=alone)
    assert said[-1].done == len(BODY)
    assert all(one.seconds >= 0 for one in said)


def test_progress_is_a_line_of_the_log_where_nobody_asks_for_it(tmp_path, source, alone, caplog):
    caplog.set_level(logging.INFO, "flytekitplugins_safedist.fs")
    download_once(str(source), tmp_path / "weights", group=alone)
    assert any(line.startswith(f"downloading {source}: 0.0 MB, ") for line in caplog.messages)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1_500_000, 3_000_000, 0.5), "1.5 of 3.0 MB (50%), 3.0 MB/s, 0 s"),
        (Progress(1_500_000, None, 2.0), "1.5 MB, 0.8 MB/s, 2 s"),
        (Progress(0, None, 0.0), "0.0 MB, 0.0 MB/s, 0 s"),
    ],
)
def test_progress_reads_as_megabytes_share_rate_and_time(progress, text):
    assert str(progress) == text
