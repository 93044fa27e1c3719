"""A pod that comes when the verdict may be in the store."""

from __future__ import annotations

import logging

from flytekitplugins_safedist.agent import ending


def test_a_store_that_cannot_be_asked_is_no_verdict(caplog):
    caplog.set_level(logging.INFO)

    def down() -> bool:
        raise ConnectionError("refused")

    assert ending.is_decided(down) is None
    assert "refused" in caplog.text
