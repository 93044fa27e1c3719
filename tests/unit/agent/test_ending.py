"""A pod that comes when the verdict may be in the store."""

from __future__ import annotations

from flytekitplugins_safedist.agent import ending


def test_a_store_that_cannot_be_asked_is_no_verdict():
    said: list[str] = []

    def down() -> bool:
        raise ConnectionError("refused")

    assert ending.is_decided(down, said.append) is False
    assert "refused" in said[0]
