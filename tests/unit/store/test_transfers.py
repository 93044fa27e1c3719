"""How far downloads and uploads are, as flytekit's way to a real store tells it; the clock is the test's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.compat import flytekit as flytekit_inside
from flytekitplugins_safedist.store import patience, transfers
from flytekitplugins_safedist.store.transfers import Transfer, Transfers
from flytekitplugins_safedist.texts import public
from tests.harness.moto_s3 import BUCKET, S3

MB = 10**6


def ticking(seconds: float) -> Callable[[], float]:
    """A clock on which so many seconds go by between two looks."""
    return map(float, itertools.count(0, seconds)).__next__  # type: ignore[call-overload]


@pytest.fixture
def access(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    """flytekit's way to the store, where a clock goes by so many seconds at each look."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)

    def made(seconds: float) -> Any:
        kind = flytekit_inside.file_access(
            lambda _access, path, address, once: once(path, Transfer(f"upload to {address}", ticking(seconds))),
            lambda address, to, once, is_directory: once(to, Transfer(f"download of {address}", ticking(seconds))),
        )
        return kind(local_sandbox_dir=str(tmp_path / "sandbox"), raw_output_prefix=f"s3://{BUCKET}/raw")

    return made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == transfers.__name__]


def test_a_file_that_takes_long_says_how_far_it_is(access, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, transfers.__name__)
    (tmp_path / "model").write_bytes(bytes(8 * MB))
    address = f"s3://{BUCKET}/model"
    access(11).put_data(str(tmp_path / "model"), address)
    assert lines(caplog)[-1] == f"upload to {address}: 8.0 of 8.0 MB (100%), 0.4 MB/s, 22 s"
    caplog.clear()
    access(4).get_data(address, str(tmp_path / "again"))
    said = lines(caplog)
    assert 1 < len(said) < 50, "each third look, and a look for each 64 KiB or a little less: 123 or more"
    assert all(line.startswith(f"download of {address}: ") and " of 8.0 MB (" in line for line in said)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "model").read_bytes()


def test_a_directory_says_how_many_files_and_bytes_have_come(access, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, transfers.__name__)
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / str(number)).write_bytes(bytes(MB))
    access(11).put_data(str(tmp_path / "data"), f"s3://{BUCKET}/data", is_multipart=True)
    assert " of 3 files, " in lines(caplog)[-1]
    assert "3.0 MB, " in lines(caplog)[-1]


def test_what_is_quick_says_nothing(access, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, transfers.__name__)
    (tmp_path / "model").write_bytes(bytes(MB))
    access(0.01).put_data(str(tmp_path / "model"), f"s3://{BUCKET}/small")
    access(0.01).get_data(f"s3://{BUCKET}/small", str(tmp_path / "again"))
    assert lines(caplog) == []


@pytest.mark.parametrize("name", ["a[1].pt", "loss=?.pt", "best*.pt", "run[2]/a[1].pt"])
def test_what_has_the_name_of_a_pattern_comes_to_its_own_address(access, s3, tmp_path, name) -> None:
    made, top = tmp_path / name, name.partition("/")[0]
    made.parent.mkdir(exist_ok=True)
    made.write_bytes(b"model")
    kind = Transfers(0.0).access()
    kind(str(tmp_path / "sandbox"), f"s3://{BUCKET}/raw").put_data(
        str(tmp_path / top), f"s3://{BUCKET}/named/{top}", is_multipart=top != name
    )
    assert s3.get(f"named/{name}") == b"model"


def test_where_there_may_be_no_further_thread_a_file_is_uploaded_without_one(tmp_path, monkeypatch) -> None:
    """The loop that does it is not to wait for itself."""

    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(patience, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(transfers, "ANSWER_SECONDS", 0.1)
    (tmp_path / "model").write_bytes(b"model")
    kind = Transfers(0.0).access()
    access = kind(local_sandbox_dir=str(tmp_path / "sandbox"), raw_output_prefix=str(tmp_path / "raw"))
    asyncio.run(access.async_put_data(str(tmp_path / "model"), str(tmp_path / "raw" / "model")))
    assert (tmp_path / "raw" / "model").read_bytes() == b"model"


@pytest.mark.parametrize("tells", [True, False], ids=["one rank of a node", "another"])
def test_one_rank_of_a_node_says_it_and_names_no_secret(access, tmp_path, caplog, tells, monkeypatch) -> None:
    caplog.set_level(logging.INFO, transfers.__name__)
    access(1).put_data(__file__, f"s3://{BUCKET}/something")
    monkeypatch.setattr(transfers, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(transfers, "public", lambda address: public(f"{address}?sig=secret"))
    kind = Transfers(tells=tells).access()
    kind(str(tmp_path / "sandbox"), f"s3://{BUCKET}/raw").get_data(f"s3://{BUCKET}/something", str(tmp_path / "it"))
    said = {line.partition(": ")[0] for line in lines(caplog)}
    assert said == ({f"download of s3://{BUCKET}/something?..."} if tells else set())
