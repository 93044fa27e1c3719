"""The page of a run that goes on, in the store; and what a node's part in it may not cost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from flytekitplugins_safedist import Metrics
from flytekitplugins_safedist.record import layout, page, run_page
from flytekitplugins_safedist.record import run as record_of_run
from flytekitplugins_safedist.record.run import RankView, RunRecord
from flytekitplugins_safedist.record.run_page import ConsoleDeck


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


def deck_of(tmp_path: Path) -> ConsoleDeck:
    return ConsoleDeck(str(tmp_path / "out"), str(tmp_path / "raw"))


def test_no_page_of_a_run_that_goes_on_follows_the_last_one(tmp_path) -> None:
    deck, file = deck_of(tmp_path), tmp_path / "out" / "deck.html"
    deck.put({"run": "goes on"})
    assert "goes on" in file.read_text()
    deck.cancel()
    file.write_text("the last")
    with pytest.raises(asyncio.CancelledError):
        deck.put({"run": "still goes on"})
    assert file.read_text() == "the last"


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


def test_a_page_that_is_not_wanted_any_more_is_no_error_in_the_log(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr("threading.excepthook", told.append)
    deck = deck_of(tmp_path)
    deck.cancel()
    record = record_of(console=deck)
    record.look(lambda: [view()])
    record.close()
    assert told == []
    assert not (tmp_path / "out").exists()


def test_the_page_of_a_run_that_goes_on_has_its_earlier_rounds_and_its_upload_ends_with_the_run(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: SimpleQueue[str] = SimpleQueue()
    cancelled = threading.Event()

    def put(_: ConsoleDeck, decks: Mapping[str, str]) -> None:
        pages.put(decks["Run"])
        cancelled.wait()

    monkeypatch.setattr(ConsoleDeck, "put", put)
    monkeypatch.setattr(ConsoleDeck, "cancel", lambda _: cancelled.set())
    record = record_of(console=deck_of(tmp_path))
    record.over(lambda: [view("SIGKILL")])
    record.begins(1, 0, nnodes=1)
    record.look(lambda: [view()])
    text = pages.get(timeout=60)
    assert "SIGKILL" in text
    assert "<td>it goes on</td>" in text
    record.over(lambda: [view("returned")])
    record.close()
    assert cancelled.is_set()
    assert "it goes on" not in record.show(bool)[0]
