"""The page of a run that goes on, in the store."""

from __future__ import annotations

import asyncio

import pytest

from flytekitplugins_safedist.record.run_page import ConsoleDeck


def test_no_page_of_a_run_that_goes_on_follows_the_last_one(tmp_path) -> None:
    deck = ConsoleDeck(str(tmp_path / "out"), str(tmp_path / "raw"))
    deck.put({"run": "goes on"})
    assert "goes on" in (tmp_path / "out" / "deck.html").read_text()
    deck.cancel()
    (tmp_path / "out" / "deck.html").write_text("the last")
    with pytest.raises(asyncio.CancelledError):
        deck.put({"run": "still goes on"})
    assert (tmp_path / "out" / "deck.html").read_text() == "the last"
