"""The page of a run that goes on, in the store; and what a node's part in it may not cost."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist import Metrics
from flytekitplugins_safedist.record import layout, page, run_page
from flytekitplugins_safedist.record import run as record_of_run
from flytekitplugins_safedist.record.run import RankView, RunRecord
from flytekitplugins_safedist.record.run_page import ConsoleDeck
from tests.harness.procs import until


def record_of(**facts: Any) -> RunRecord:
    """Of a run with a deck, in its first round."""
    nothing: dict[str, Any] = {"console": None, "environment": {}, "terminal": {}, "metrics": Metrics(), "labels": {}}
    job = {"hosts": lambda: True, "send": bool, "others": tuple, "course": lambda: {"restart": [], "loss": []}}
    node = {"gpus": tuple, "inputs": lambda: (0, 0), "prepared": 0.0, "nproc_per_node": 1}
    record = RunRecord("train", **{"is_local": False, "has_deck": True, **nothing, **job, **node, **facts})
    record.begins(0, 0, nnodes=1)
    return record


def view(how: str = "running") -> RankView:
    return RankView(0, memoryview(bytearray(layout.SIZE)), how, time.monotonic(), Path("/no profile"))


def failing(error: Exception) -> Any:
    def fails(*_: object, **__: object) -> Any:
        raise error

    return fails


def test_no_job_fails_for_what_its_record_cannot_see(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_of_run, "LOOK_SECONDS", 0.0)
    record = record_of(inputs=failing(OSError(5, "Input/output error")))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            record.look(list)
        record.over(list)
        record.close()
    assert [each.partition(": ")[2] for each in caplog.messages] == ["OSError: [Errno 5] Input/output error"]


def test_no_job_fails_for_want_of_a_thread(tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("threading.Thread.start", failing(RuntimeError("can't start new thread")))
    record = record_of(console=ConsoleDeck(str(tmp_path / "out"), str(tmp_path / "raw")))
    record.look(lambda: [view()])
    record.over(lambda: [view("returned")])
    record.close()
    assert [each.partition(": ")[2] for each in caplog.messages] == ["RuntimeError: can't start new thread"]


def test_a_store_that_does_not_take_the_trace_costs_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "leave", failing(OSError(28, "No space left on device")))
    record = record_of()
    record.over(list)
    assert "Trace for Perfetto: could not be left" in record.show(bool)[0]


def test_no_job_fails_for_a_page_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page, "fragment", failing(ZeroDivisionError("division by zero")))
    record = record_of()
    record.over(list)
    assert record.show(bool) == ("", "")
    assert caplog.messages == ["the record of this run could not be shown: ZeroDivisionError: division by zero"]


def test_the_page_of_a_run_that_goes_on_has_its_earlier_rounds_and_its_upload_ends_with_the_run(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, made, go_on = tmp_path / "out" / "deck.html", threading.Event(), threading.Event()
    make = page.fragment

    def waits(*given: Any) -> str:
        made.set()
        go_on.wait()
        return make(*given)

    def look() -> None:
        monkeypatch.setattr(record_of_run, "PAGE_SECONDS", 0.0)
        monkeypatch.setattr(record_of_run, "LOOK_SECONDS", 0.0)
        record.look(lambda: [view()])

    record = record_of(console=ConsoleDeck(str(tmp_path / "out"), str(tmp_path / "raw")))
    record.over(lambda: [view("SIGKILL")])
    record.begins(1, 0, nnodes=1)
    look()
    until(file.exists, "the page is there")
    text = file.read_text()
    assert "SIGKILL" in text
    assert "<td>it goes on</td>" in text
    file.write_text("the last")
    monkeypatch.setattr(page, "fragment", waits)
    until(lambda: look() or made.is_set(), "the next one is made")
    threading.Timer(0.5, go_on.set).start()
    record.over(lambda: [view("returned")])
    record.close()
    assert go_on.is_set(), "its end is waited for"
    assert file.read_text() == "the last"
    assert "it goes on" not in record.show(bool)[0]
    assert caplog.messages == []
