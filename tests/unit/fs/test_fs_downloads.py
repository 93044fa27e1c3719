"""Fetching once: what is there counts, what is not what was asked for does not, and what is told about it."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.callbacks import Callback

from flytekitplugins_safedist.errors import DownloadError, FsTimeoutError, PathBlockedError
from flytekitplugins_safedist.fs import download, download_once
from flytekitplugins_safedist.fs.download import _address, _without_secrets
from tests.fs.ranks import pause, processes

BODY = b"weights" * 100
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    place.write_bytes(BODY)
    return place


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again without a pause."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)


@pytest.mark.parametrize("digest", [None, DIGEST.upper()])
def test_a_file_is_brought_to_a_place_whose_parent_is_made(tmp_path, source, digest):
    target = tmp_path / "a" / "b" / "weights"
    assert download_once(str(source), target, sha256=digest) == target
    assert target.read_bytes() == BODY
    assert sorted(one.name for one in target.parent.iterdir()) == [".weights.safedist-source", "weights"]


def test_what_others_have_put_there_counts_as_it_is_where_no_digest_is_asked_for(tmp_path, source):
    (tmp_path / "weights").write_text("mine")
    assert download_once(str(source), tmp_path / "weights").read_text() == "mine"
    (tmp_path / "copy").mkdir()
    assert list(download_once(f"{tmp_path}/", tmp_path / "copy").iterdir()) == []


def test_what_is_there_with_the_digest_is_not_fetched_again(tmp_path):
    (tmp_path / "weights").write_bytes(BODY)
    download_once(str(tmp_path / "no such source"), tmp_path / "weights", sha256=DIGEST.upper())


def test_what_is_there_with_another_digest_is_refused(tmp_path, source):
    target = tmp_path / "weights"
    target.write_text("other")
    with pytest.raises(PathBlockedError, match=rf"seen: sha256 .*; expected: sha256 {DIGEST}"):
        download_once(str(source), target, sha256=DIGEST)
    assert target.read_text() == "other"


def test_a_file_with_another_digest_than_asked_for_is_not_there_afterwards(tmp_path, source):
    with pytest.raises(DownloadError) as caught:
        download_once(str(source), tmp_path / "weights", sha256="AB" * 32)
    assert str(caught.value) == (
        f"the download is not what was expected [source={source}] "
        f"(seen: sha256 {DIGEST}, {len(BODY)} bytes; expected: sha256 {'ab' * 32})"
    )
    assert os.listdir(tmp_path) == ["source"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_a_directorys_files_are_not_waited_for(tmp_path, monkeypatch):
    synced: list[bool] = []
    fsync, target = os.fsync, tmp_path / "out" / "copy"

    def note(handle: int) -> None:
        synced.append(target.exists())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"data")
    download_once(tmp_path / "source" / "file", target)
    assert synced == [False, True], "the file, and then its name"
    download_once(tmp_path / "source", tmp_path / "directory")
    assert synced[2:] == [True], "its name alone"


def test_a_digest_of_a_directory_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(DownloadError, match=r"sha256 of a directory, which has none.*fetch an archive"):
        download_once(f"{tmp_path}/data/", tmp_path / "copy", sha256=DIGEST)
    assert os.listdir(tmp_path) == ["data"]


@pytest.fixture
def pages() -> Iterator[str]:
    """A web server whose every page is its own address."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.path.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_another_source_is_refused_and_both_are_named(tmp_path, pages):
    """What a running job reads is never replaced under its feet, nor taken for something else."""
    target = tmp_path / "data"
    download_once(f"{pages}/get?file=train", target)
    for other in (f"{pages}/get?file=test", f"{pages}/get", tmp_path / os.fsdecode(b"not utf-8: \xff")):
        with pytest.raises(PathBlockedError) as caught:
            download_once(other, target)
        assert f"seen: {pages}/get" in str(caught.value)
        assert f"expected: {download._name_of(os.fspath(other))}" in str(caught.value)
        assert str(caught.value).encode("utf-8"), "a log can hold it"
    assert target.read_text() == "/get?file=train"


def test_a_record_without_what_it_names_is_another_processs_that_is_about_to_rename(tmp_path, source):
    target = download_once(source, tmp_path / "weights")
    target.unlink()
    with pytest.raises(PathBlockedError, match=r"remove this one, with .weights.safedist-source beside it"):
        download_once(tmp_path / "other", target)
    assert download_once(source, target).read_bytes() == BODY
    (tmp_path / ".weights.safedist-source").write_text("[1]")
    with pytest.raises(PathBlockedError, match="a source that cannot be read"):
        download_once(source, target)


@pytest.mark.parametrize("length", [238, 239, 255])
def test_a_name_may_be_as_long_as_the_file_system_has_them(tmp_path, source, length):
    assert download_once(source, tmp_path / ("n" * length)).read_bytes() == BODY
    with pytest.raises(PathBlockedError):
        download_once(tmp_path, tmp_path / ("n" * length))


def test_a_link_to_nothing_in_the_place_is_told_at_once(tmp_path, source):
    (tmp_path / "weights").symlink_to("nowhere")
    with pytest.raises(PathBlockedError, match="a symbolic link to nothing"):
        download_once(source, tmp_path / "weights", timeout=3600)


SIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=key{n}&X-Amz-Date=2026010{n}&X-Amz-Signature=sign{n}",
    "X-Goog-Credential=account&X-Goog-Date=2026010{n}&X-Goog-Signature=sign{n}",
    "AWSAccessKeyId=key&Signature=sign{n}&Expires=17000{n}",
    "Expires=17000{n}&Signature=sign{n}&Key-Pair-Id=K1",
    "sv=2024-11-04&se=2026-01-0{n}&sr=b&sp=r&sig=sign{n}",
)


def test_one_file_that_is_signed_anew_is_not_fetched_again(tmp_path, pages):
    for number, signed in enumerate(SIGNED):
        target, kept = tmp_path / str(number), f"{pages}/get?versionId=7&"
        first = download_once(kept + signed.format(n=1), target).read_text()
        assert download_once(kept + signed.format(n=2), target).read_text() == first
        assert "sign" not in (tmp_path / f".{number}.safedist-source").read_text()
        with pytest.raises(PathBlockedError, match="with another query"):
            download_once(f"{pages}/get?versionId=8&{signed.format(n=2)}", target)


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_a_directory_is_the_same_with_and_without_a_slash_and_whoever_reads_it_keeps_it(tmp_path, protocol):
    (tmp_path / "source").mkdir()
    first = download_once(f"{protocol}{tmp_path}/source", tmp_path / "data").stat().st_ino
    assert download_once(f"{protocol}{tmp_path}/source/", tmp_path / "data").stat().st_ino == first


def test_a_source_that_is_not_there_is_told_with_its_name_the_place_and_what_to_see(tmp_path):
    with pytest.raises(DownloadError) as caught:
        download_once(str(tmp_path / "nothing"), tmp_path / "weights")
    text = str(caught.value)
    assert f"the download failed [source={tmp_path}/nothing, to={tmp_path}/weights, host=" in text
    assert "(seen: FileNotFoundError: " in text
    assert "Fix: see whether the source exists and this task may read it" in text


@pytest.mark.usefixtures("at_once")
def test_an_address_with_a_secret_is_told_by_nothing_that_goes_wrong_with_it(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise FileNotFoundError("https://host/file?signature=secret")

    monkeypatch.setattr(download._Fetch, "_get", fail)
    with pytest.raises(DownloadError) as caught:
        download_once("https://host/file?signature=secret", tmp_path / "file")
    assert "signature" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_of_two_sources_at_once_the_first_to_record_its_own_wins(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)

    def fetch(name: str) -> Path:
        claim = download._claim

        def at(*args: Any) -> None:
            pause("is whole")
            claim(*args)
            pause("is recorded")

        download._claim = at
        return download_once(tmp_path / name, tmp_path / "data")

    with processes([(fetch, "one"), (fetch, "two")]) as (one, two):
        one.until("is whole")
        two.until("is whole")
        one.resume()
        one.until("is recorded")
        two.resume()
        error = two.outcome().error()
        assert isinstance(error, PathBlockedError)
        assert f"seen: {tmp_path}/one; expected: {tmp_path}/two" in str(error)
        one.resume()
        assert one.outcome().get().read_text() == "one"
    assert sorted(os.listdir(tmp_path)) == [".data.safedist-source", "data", "one", "two"]


def test_who_finds_that_another_node_was_faster_keeps_what_is_there(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    tried, inodes = download._Fetch._tried, []

    def overtaken(self: download._Fetch, draft: Path) -> None:
        tried(self, draft)
        if not inodes:
            inodes.append(0)
            inodes.append(download_once(tmp_path / "data", tmp_path / "copy").stat().st_ino)

    monkeypatch.setattr(download._Fetch, "_tried", overtaken)
    assert download_once(tmp_path / "data", tmp_path / "copy").stat().st_ino == inodes[1]
    assert sorted(os.listdir(tmp_path)) == [".copy.safedist-source", "copy", "data"]


class Held(Callback):
    """Holds the second file of a directory up, and tells."""

    def __init__(self, tell: Callable[[], object]) -> None:
        super().__init__()
        self.tell = tell
        self.files: list[str] = []
        self.goes_on = threading.Event()

    def branched(self, path_1: str, path_2: str, **_: Any) -> Callback:
        self.files.append(path_1)
        if len(self.files) == 2:
            self.tell()
            self.goes_on.wait()
        return Callback()


def interrupt() -> None:
    """As Ctrl-C does."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize(
    ("seconds", "tell", "error"), [(0.2, bool, FsTimeoutError), (3600, interrupt, KeyboardInterrupt)]
)
def test_a_directory_that_nobody_waits_for_any_more_is_not_written_further_and_nothing_of_it_stays(
    tmp_path, monkeypatch, request, seconds, tell, error
):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # flytekit has its own
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    (tmp_path / "source").mkdir()
    for name in "abc":
        (tmp_path / "source" / name).write_bytes(BODY)
    held = Held(tell)
    # What is written at that moment may come in the way of who removes it.
    monkeypatch.setattr("flytekitplugins_safedist.fs.atomic.discard", bool)
    with pytest.raises(error):
        download_once(tmp_path / "source", tmp_path / "copy", timeout=seconds, callback=held)
    (behind,) = (each for each in threading.enumerate() if each.name == "safedist-fs-bounded")
    held.goes_on.set()
    behind.join()
    assert [Path(file).name for file in held.files] == ["a", "b"]
    assert os.listdir(tmp_path) == ["source"]


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path):
    patterns = ("run-[lr=0.1]", "what?", "a*b")
    for each in (*patterns, "run-l", "whatx", "aab"):  # which the patterns match
        (tmp_path / "source" / each).mkdir(parents=True)
        (tmp_path / "source" / each / f"{each}.txt").write_text(each)
    copy = download_once(tmp_path / "source", tmp_path / "all")
    for name in patterns:
        found = download_once(f"{tmp_path}/source/{name}/", tmp_path / f"one of {name}")
        assert [file.name for file in found.iterdir()] == [f"{name}.txt"]
        found = download_once(tmp_path / "source" / name / f"{name}.txt", tmp_path / f"file of {name}")
        assert (found.read_text(), (copy / name / f"{name}.txt").read_text()) == (name, name)


@pytest.mark.usefixtures("at_once")
def test_a_link_to_a_directory_is_copied_with_all_that_is_in_it(tmp_path):
    for name in ("source/below", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "file").write_text("far")
    (tmp_path / "source" / "linked").symlink_to("../elsewhere")
    (tmp_path / "source" / "below" / "file").symlink_to("../linked/deep/file")
    target = download_once(tmp_path / "source", tmp_path / "copy")
    for name in ("linked/deep/file", "below/file"):
        assert (target / name).read_text() == "far"
        assert not (target / name).is_symlink()
    (tmp_path / "source" / "below" / "round").symlink_to("..")
    with pytest.raises(DownloadError, match="goes round"):
        download_once(tmp_path / "source", tmp_path / "other")


def test_an_empty_directory_is_one_in_the_copy(tmp_path):
    (tmp_path / "source" / "deep" / "empty").mkdir(parents=True)
    assert (download_once(tmp_path / "source", tmp_path / "copy") / "deep" / "empty").is_dir()


def test_a_source_has_a_name_without_secrets():
    names = [
        ("s3://bucket/data/", "s3://bucket/data/"),
        ("https://user:word@host/file?key=secret", "https://host/file"),
        (Path("/no/such/file"), "/no/such/file"),
        ("s3://user@bucket/runs@7/a?versionId=1", "s3://bucket/runs@7/a"),
        ("a@b", "a@b"),
        ("zip://a::https://user:word@host/f.zip?sig=1", "zip://a::https://host/f.zip"),
        ("/data/a?1", "/data/a?1"),
        (SimpleNamespace(remote_source="s3://b/f", path="/x", download=1), "s3://b/f"),
        (SimpleNamespace(remote_source=None, path="/x", download=1), "/x"),
    ]
    assert [_without_secrets(_address(source)) for source, _ in names] == [name for _, name in names]


def test_what_is_nothing_that_can_be_fetched_is_told_with_what_can(tmp_path):
    with pytest.raises(DownloadError) as caught:
        download_once(3, tmp_path / "file")
    assert str(caught.value) == (
        "this cannot be downloaded (seen: int; expected: a URL, a path, FlyteFile, FlyteDirectory)"
    )


@pytest.mark.usefixtures("at_once")
def test_two_names_that_are_one_path_are_refused_and_neither_is_left_out(tmp_path):
    """An object store takes any text for a key: "a//b", "a/x/../b"."""
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        for name in ("d/a", "d/x/../a"):
            archive.writestr(name, name)
    with pytest.raises(DownloadError, match=r"two names.*d/a, d/x/../a"):
        download_once(f"zip://d::file://{tmp_path}/odd.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_of_an_archive_is_below_the_destination_in_a_task_too(tmp_path):
    import flytekit  # noqa: F401  (as in a task: its way to stores is taken then)

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("a.txt", "d/b.txt"):
            archive.writestr(name, name)
    fetched = download_once(f"zip://::file://{tmp_path}/all.zip", tmp_path / "out")
    assert sorted(str(path.relative_to(fetched)) for path in fetched.rglob("*")) == ["a.txt", "d", "d/b.txt"]
