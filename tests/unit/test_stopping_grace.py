"""How long a pod may wait for something after it was told to stop: no longer than Kubernetes lets it live."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist import stopping


@pytest.mark.parametrize(
    ("grace", "wanted", "given"),
    [(60, 20, 20), (15, 20, 15 - 5 - stopping.MARGIN_SECONDS), (5, 20, 0)],
)
def test_a_wait_ends_before_the_grace_period_and_what_comes_after_it_do(monkeypatch, grace, wanted, given):
    monkeypatch.setattr(stopping._PROCESS, "listening", True)
    monkeypatch.setattr(stopping._PROCESS, "grace", grace)
    assert stopping.within_grace(wanted, then=5) == given


def test_outside_a_container_nothing_ends_a_wait(monkeypatch):
    monkeypatch.setattr(stopping._PROCESS, "listening", False)
    assert stopping.within_grace(1000, then=5) == 1000
