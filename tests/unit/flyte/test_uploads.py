"""Uploads are tried again while that may help, and no longer."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit.bin import entrypoint as flytekit_entrypoint

from flytekitplugins_safedist.flyte import uploads


class Time:
    """A clock that only moves when someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def tried(fails: Callable[[int], BaseException | None], seconds: float = 60.0) -> tuple[int, Time]:
    """How often an action that fails so was tried, and when the last try was."""
    time, count = Time(), 0

    async def action() -> None:
        nonlocal count
        count += 1
        if (error := fails(count)) is not None:
            raise error

    try:
        asyncio.run(uploads.tried_again(action, "s3://b/k", seconds=seconds, sleep=time.sleep, clock=time))
    except ConnectionError:
        count = -count
    return count, time


def test_an_upload_that_works_is_done_once() -> None:
    assert tried(lambda _: None)[0] == 1


def test_an_outage_that_ends_in_time_is_outlasted() -> None:
    count, time = tried(lambda number: ConnectionRefusedError() if number < 6 else None)
    assert count == 6
    assert 0 < time.now < 60


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOSPC, errno.EROFS])
def test_a_disk_as_the_store_that_says_what_will_not_pass_is_believed_at_once(number: int) -> None:
    tries: list[int] = []

    def fails(count: int) -> BaseException:
        tries.append(count)
        error = RuntimeError("upload failed")
        error.__cause__ = OSError(number, "on the disk")
        return error

    with pytest.raises(RuntimeError, match="upload failed"):
        tried(fails)
    assert tries == [1]


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    error = ConnectionResetError("again and again")
    error.__cause__ = error
    assert tried(lambda number: error if number == 1 else None)[0] == 2


def test_an_outage_that_does_not_end_is_the_last_error_after_the_whole_time() -> None:
    count, time = tried(lambda _: ConnectionRefusedError(), seconds=60)
    assert count < -5
    assert time.now == pytest.approx(60)


@pytest.mark.parametrize("error", [PermissionError("denied"), FileNotFoundError("no such file")])
def test_what_cannot_pass_is_not_tried_again(error: OSError) -> None:
    tries: list[int] = []

    def fails(count: int) -> BaseException:
        tries.append(count)
        return error

    with pytest.raises(type(error)):
        tried(fails)
    assert tries == [1]


def test_the_log_says_what_is_waited_for_and_no_signature(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tried(lambda number: ConnectionError("https://host/k?X-Amz-Signature=abc") if number == 1 else None)
    said = caplog.text
    assert "upload to s3://b/k failed: ConnectionError: https://host/k?..." in said
    assert "abc" not in said


@pytest.mark.parametrize(("timeout", "patience"), [(20.0, 10.0), (3600.0, 600.0)])
def test_patience_leaves_the_other_nodes_time_to_hear_of_the_end(timeout: float, patience: float) -> None:
    assert uploads.be_patient(timeout) == patience


@pytest.mark.parametrize("method", ["put_data", "put_raw_data"])
def test_both_ways_of_flytekit_to_upload_try_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The store is a directory: what is under test is that flytekit calls the method that tries again.
    made: list[str] = []

    async def noted(action: Callable[[], object], label: str, *, seconds: float) -> object:
        made.append(label)
        return await action()  # type: ignore[misc]

    monkeypatch.setattr(uploads, "tried_again", noted)
    access = uploads.patient_access()(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
    (tmp_path / "file").write_text("content")
    if method == "put_data":
        access.put_data(str(tmp_path / "file"), str(tmp_path / "there"))
        assert (tmp_path / "there").read_text() == "content"
    else:
        assert Path(access.put_raw_data(str(tmp_path / "file"))).read_text() == "content"
    assert len(made) == 1


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an attempt's verdict goes that several pods may upload."""
    monkeypatch.setattr(uploads._VERDICT, "value", None)
    uploads.first_stays(str(tmp_path / "outputs"))
    return tmp_path / "outputs"


def upload(prefix: Path, name: str, content: str) -> dict[str, str]:
    """Upload an engine directory as flytekit does; what is at the prefix then."""
    directory = prefix.parent / f"engine-{content}"
    directory.mkdir()
    (directory / name).write_text(content)
    access = uploads.patient_access()(str(prefix.parent / "sandbox"), str(prefix.parent / "raw"))
    access.put_data(str(directory), str(prefix), is_multipart=True)
    return {path.name: path.read_text() for path in prefix.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("second", ["outputs.pb", "error.pb"])
@pytest.mark.parametrize("first", ["outputs.pb", "error.pb"])
def test_of_two_verdicts_the_first_stays(
    prefix: Path, first: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert upload(prefix, first, "first") == {first: "first"}
    assert upload(prefix, second, "second") == {first: "first"}
    assert caplog.text.count("nothing replaces it") == 1


def test_of_two_errors_the_first_stays_also_where_both_pods_had_found_none(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads, "_is_decided", lambda *_: False)
    caplog.set_level("INFO")
    assert upload(prefix, "error.pb", "first") == {"error.pb": "first"}
    assert upload(prefix, "error.pb", "second") == {"error.pb": "first"}
    assert caplog.text.count("nothing replaces it") == 1


KILLED_WHILE_IT_WRITES = """
import resource, signal, sys
from flytekitplugins_safedist.flyte import uploads
outputs, engine, sandbox = sys.argv[1:]
uploads.first_stays(outputs)
access = uploads.patient_access()(sandbox, sandbox)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # the kernel kills this process at the first byte of a file
access.put_data(engine, outputs, is_multipart=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["outputs.pb", "error.pb"])
def test_a_pod_that_is_killed_while_it_writes_a_verdict_leaves_none(prefix: Path, tmp_path: Path, name: str) -> None:
    """On a store that is a file system, where a file is there before it has its content."""
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / name).write_text("cut")
    words = [sys.executable, "-c", KILLED_WHILE_IT_WRITES, prefix, engine, tmp_path / "sandbox"]
    killed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    assert upload(prefix, "outputs.pb", "whole") == {"outputs.pb": "whole"}


def test_an_error_goes_flytekits_way_where_the_store_cannot_arbitrate(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_new(*_: object) -> bool:
        raise uploads.NoConditionError

    monkeypatch.setattr(uploads, "put_new", put_new)
    assert upload(prefix, "error.pb", "first") == {"error.pb": "first"}


def test_a_store_that_cannot_be_looked_at_is_shown_by_the_upload(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: object) -> bool:
        raise ConnectionError("refused")

    monkeypatch.setattr(uploads.task_context, "uploaded_to", down)
    assert upload(prefix, "outputs.pb", "first") == {"outputs.pb": "first"}


def test_a_pod_that_is_alone_uploads_as_flytekit_does(prefix: Path) -> None:
    other = prefix.parent / "other"
    assert upload(other, "error.pb", "first") == {"error.pb": "first"}
    assert upload(other, "error.pb", "second") == {"error.pb": "second"}


def test_flytekits_entrypoint_makes_its_provider_by_the_name_that_is_replaced() -> None:
    from flytekit.core.data_persistence import FileAccessProvider

    assert issubclass(flytekit_entrypoint.FileAccessProvider, FileAccessProvider)
