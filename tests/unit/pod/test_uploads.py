"""Uploads are tried again while that may help, a verdict is the last thing that is there, and the first one stays."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flyteidl.core import literals_pb2
from flytekit.bin import entrypoint as flytekit_entrypoint
from flytekit.core.data_persistence import FileAccessProvider

from flytekitplugins_safedist import lastwords
from flytekitplugins_safedist.agent.verdict import Verdict
from flytekitplugins_safedist.errors import StorageError
from flytekitplugins_safedist.failures import Payer
from flytekitplugins_safedist.pod import verdict
from flytekitplugins_safedist.pod.verdict import Verdicts, document, is_there, room_kept, warning_of
from flytekitplugins_safedist.store import patience, transfers
from flytekitplugins_safedist.store.transfers import Transfers, patience_of
from tests.harness.objectstore import ClientError, ObjectStore

PASSES = ConnectionRefusedError("the store is away")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.001)


class Failing:
    """A store that fails so often, and then does what it is asked."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.tries = list(errors), 0

    async def __call__(self, *_: object) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def uploaded(self, seconds: float = 60.0) -> str:
        done: str = asyncio.run(Transfers(seconds).upload(None, "", "s3://b/k", self))  # type: ignore[arg-type]
        return done


def test_an_outage_that_ends_in_time_is_outlasted() -> None:
    store = Failing(*[PASSES] * 5)
    assert store.uploaded() == "done"
    assert store.tries == 6


def test_an_outage_that_does_not_end_is_its_last_error() -> None:
    store = Failing(*[PASSES] * 1000)
    with pytest.raises(ConnectionRefusedError):
        store.uploaded(seconds=0.1)
    assert 1 < store.tries < 1000


def caused(by: BaseException) -> RuntimeError:
    error = RuntimeError("upload failed")
    error.__cause__ = by
    return error


def test_what_cannot_pass_is_not_tried_again() -> None:
    for error in (
        *(caused(OSError(number, "on the disk")) for number in (errno.EEXIST, errno.ENOSPC, errno.EROFS)),
        *(PermissionError("denied"), FileNotFoundError("no such file"), ImportError("no s3fs")),
    ):
        store = Failing(*[error] * 3)
        with pytest.raises(type(error), match=str(error)):
            store.uploaded()
        assert (store.tries, error) == (1, error)


def test_an_upload_on_whose_way_nothing_comes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "ANSWER_SECONDS", 0.01)
    tries: list[int] = []

    async def once(*_: object) -> str:
        tries.append(1)
        if len(tries) == 1:
            await asyncio.sleep(3600)
        return "done"

    assert asyncio.run(Transfers().upload(None, "", "s3://b/k", once)) == "done"  # type: ignore[arg-type]
    assert len(tries) > 1  # on a busy machine the second may not answer in time either


def test_the_log_says_what_is_waited_for_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Failing(ConnectionError("https://me:word@host/k?X-Amz-Signature=abc")).uploaded()
    assert "upload to s3://b/k: ConnectionError: https://host/k?...; trying again in" in caplog.text
    assert "abc" not in caplog.text
    assert "word" not in caplog.text


def test_patience_leaves_the_other_nodes_time_to_hear_of_the_end() -> None:
    assert (patience_of(20.0), patience_of(3600.0)) == (10.0, 600.0)


@pytest.mark.parametrize("method", ["put_data", "put_raw_data"])
def test_both_ways_of_flytekit_to_upload_try_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = FileAccessProvider._put, [PASSES]

    async def put(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return await real(*args, **kwargs)

    monkeypatch.setattr(FileAccessProvider, "_put", put)
    access = Transfers().access()(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
    (tmp_path / "file").write_text("content")
    there = tmp_path / "there"
    if method == "put_data":
        access.put_data(str(tmp_path / "file"), str(there))
    else:
        there = Path(access.put_raw_data(str(tmp_path / "file")))
    assert there.read_text() == "content"


# --- what is tried again as a whole ----------------------------------------------------------------------------------
def outlasted(*errors: Exception, seconds: float = 60.0) -> tuple[object, int]:
    """What comes of an action that fails so, and how often it was done."""
    left, tries = list(errors), 0

    def action() -> str:
        nonlocal tries
        tries += 1
        if left:
            raise left.pop(0)
        return "done"

    try:
        return Transfers(seconds).outlast("uploading", action), tries
    except Exception as error:
        return error, tries


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)


def test_what_a_type_does_by_a_client_of_its_own_outlasts_an_outage(at_once: None) -> None:
    errors: list[Exception] = [PASSES, ClientError("SlowDown"), TimeoutError(), caused(ClientError("503"))]
    found = [(error, *outlasted(error, error)) for error in errors]
    assert found == [(error, "done", 3) for error in errors]


def test_what_is_no_stores_error_is_the_users_as_it_is(at_once: None) -> None:
    errors = [ValueError("the user's type"), FileNotFoundError("/x"), PermissionError("/x"), RuntimeError()]
    assert [outlasted(error) for error in errors] == [(error, 1) for error in errors]


@pytest.mark.parametrize(("error", "seconds"), [(PASSES, 0.0), (ClientError("AccessDenied"), 60.0)], ids=repr)
def test_a_store_that_stays_away_or_refuses_is_the_platforms(error: Exception, seconds: float) -> None:
    ended, tries = outlasted(*[error] * 9, seconds=seconds)
    assert isinstance(ended, StorageError)
    assert ended.error_code == "SYSTEM:Storage"
    assert (ended.__cause__, tries) == (error, 1)


def test_within_it_an_upload_is_tried_once(tmp_path: Path, at_once: None) -> None:
    """Else each of its tries would have all the time that it has itself."""
    kind, store = Transfers(), Failing(PASSES, PASSES)

    def action() -> object:
        before = store.tries
        try:
            return asyncio.run(kind.upload(None, "", "s3://b/k", store))  # type: ignore[arg-type]
        finally:
            assert store.tries == before + 1

    assert kind.outlast("uploading", action) == "done"
    assert store.tries == 3
    assert kind.seconds > 0


# --- verdicts --------------------------------------------------------------------------------------------------------
@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Where an attempt's verdict goes."""
    return tmp_path / "outputs"


def upload(prefix: Path, files: dict[str, str], *, is_shared: bool = True) -> dict[str, str]:
    """Upload an engine directory as flytekit does, of texts in Latin-1; what is at the prefix then."""
    directory = prefix.parent / f"engine-{time.monotonic_ns()}"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content.encode("latin-1"))
    verdicts = Verdicts()
    verdicts.prefix, verdicts.is_shared = str(prefix), is_shared
    access = verdicts.access()(str(prefix.parent / "sandbox"), str(prefix.parent / "raw"))
    access.put_data(str(directory), str(prefix), is_multipart=True)
    return {path.name: path.read_text("latin-1") for path in prefix.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("second", ["outputs.pb", "error.pb"])
@pytest.mark.parametrize("first", ["outputs.pb", "error.pb"])
def test_of_two_verdicts_the_first_stays(
    prefix: Path, first: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert upload(prefix, {first: "1"}) == {first: "1"}
    assert upload(prefix, {second: "2"}) == {first: "1"}
    assert caplog.text.count("nothing replaces it") == 1


def test_of_two_errors_the_first_stays_also_where_both_pods_had_found_none(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verdict, "is_there", lambda *_: False)
    caplog.set_level("INFO")
    assert upload(prefix, {"error.pb": "first"}) == {"error.pb": "first"}
    assert upload(prefix, {"error.pb": "second"}) == {"error.pb": "first"}
    assert caplog.text.count("nothing replaces it") == 1


@pytest.mark.parametrize("is_shared", [True, False], ids=["one of several pods", "a pod alone"])
@pytest.mark.parametrize("other", ["a_offloaded_metadata.pb", "weights_offloaded_metadata.pb"])
def test_outputs_are_there_when_all_that_they_refer_to_is(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, other: str, is_shared: bool
) -> None:
    real, failures, was_there = FileAccessProvider._put, [PASSES, PASSES], set[bool]()

    async def put(self: Any, from_path: str, *args: Any, **kwargs: Any) -> Any:
        if Path(from_path, other).exists():  # flytekit puts a directory
            was_there.add((prefix / "outputs.pb").exists())
            if failures:
                raise failures.pop()
        return await real(self, from_path, *args, **kwargs)

    monkeypatch.setattr(FileAccessProvider, "_put", put)
    assert sorted(upload(prefix, {"outputs.pb": "", other: "x"}, is_shared=is_shared)) == sorted(["outputs.pb", other])
    assert (was_there, failures) == ({False}, [])


def test_a_pod_that_is_alone_uploads_as_flytekit_does(prefix: Path) -> None:
    assert upload(prefix, {"error.pb": "first"}, is_shared=False) == {"error.pb": "first"}
    assert upload(prefix, {"error.pb": "second"}, is_shared=False) == {"error.pb": "second"}


KILLED_WHILE_THEY_WRITE = """
import os, resource, signal, sys
from flytekitplugins_safedist.pod.verdict import Verdicts
outputs, sandbox, *engines = sys.argv[1:]
for engine in engines:
    if (pod := os.fork()) == 0:
        verdicts = Verdicts()
        verdicts.prefix, verdicts.is_shared = outputs, True
        access = verdicts.access()(sandbox, sandbox)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # the kernel kills this process at the first byte of a file
        access.put_data(engine, outputs, is_multipart=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pod, 0)[1]))
"""


def test_a_pod_that_is_killed_while_it_writes_a_verdict_leaves_none(warm, prefix: Path, tmp_path: Path) -> None:
    """On a store that is a file system, where a file is there before it has its content."""
    engines = [tmp_path / "engine of outputs", tmp_path / "engine of an error"]
    for engine, name in zip(engines, ("outputs.pb", "error.pb"), strict=True):
        engine.mkdir()
        (engine / name).write_text("cut")
    (tmp_path / "pods.py").write_text(KILLED_WHILE_THEY_WRITE)
    words = [str(each) for each in (prefix, tmp_path / "sandbox", *engines)]
    killed = warm.run(f"{tmp_path}/pods.py:__main__", tmp_path / "job", kind="main", libraries=False, arguments=words)
    assert killed.out.split() == [str(-signal.SIGXFSZ)] * 2, killed.err
    assert upload(prefix, {"outputs.pb": ""}) == {"outputs.pb": ""}


def test_an_error_goes_flytekits_way_where_the_store_cannot_arbitrate(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_new(*_: object) -> bool:
        raise verdict.NoConditionError

    monkeypatch.setattr(verdict, "put_new", put_new)
    assert upload(prefix, {"error.pb": "first"}) == {"error.pb": "first"}


def test_a_store_that_cannot_be_looked_at_is_shown_by_the_upload(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: object) -> bool:
        raise ConnectionError("refused")

    monkeypatch.setattr(verdict, "is_there", down)
    assert upload(prefix, {"outputs.pb": ""}) == {"outputs.pb": ""}


def test_the_question_whether_there_is_a_verdict_is_bounded_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(verdict, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(patience, "TELL_SECONDS", 0.1)
    with ObjectStore(b"") as store:
        store.fault = lambda *_: "hang"
        access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
        with pytest.raises(TimeoutError, match="no answer within"):
            is_there(store.url, access)
    assert "waiting for the question whether this attempt has ended" in caplog.text


def test_outputs_that_flyte_may_refuse_are_uploaded_and_told(prefix: Path, caplog: pytest.LogCaptureFixture) -> None:
    outputs = literals_pb2.LiteralMap()
    for name, length in (("weights", 2_000_000), ("losses", 200_000), ("epochs", 1)):
        outputs.literals[name].scalar.primitive.string_value = "x" * length
    text = outputs.SerializeToString().decode("latin-1")
    assert upload(prefix, {"outputs.pb": text}) == {"outputs.pb": text}
    [said] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == warning_of(text.encode("latin-1"), f"{prefix}/outputs.pb")
    for words in (
        f"{len(text):,} bytes (weights 2,000,",
        "losses 200,",
        "FlyteFile",
        "OutputSizeExceeded",
        str(prefix),
    ):
        assert words in said


def test_flytekits_entrypoint_makes_its_provider_by_the_name_that_is_replaced() -> None:
    assert issubclass(flytekit_entrypoint.FileAccessProvider, FileAccessProvider)


def test_what_would_move_a_terminals_cursor_is_spelled_out_wherever_the_error_is_read() -> None:
    said = "the store says:\n\tno \x1b[2J\r\x07, of caf\udce9"
    shown = "the store says:\n\tno \\x1b[2J\\x0d\\x07, of caf\\udce9"
    storage = StorageError(said)
    storage.code = "SYSTEM:\x1bStorage"
    error = document(Verdict(Payer.FLYTE, storage, 1)).error
    assert (error.message, error.code) == (shown, "SYSTEM:\\x1bStorage")
    lastwords.keep(said.replace("\n\t", " "))
    assert lastwords.take() == lastwords.FAILED + shown.replace("\n\t", " ")


def test_of_a_small_disk_a_quarter_is_kept_for_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=64, f_frsize=4096))
    with room_kept(str(tmp_path)):
        assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) == 64 * 4096 // 4
    assert list(tmp_path.iterdir()) == []
