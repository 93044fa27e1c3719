"""When a pod imports early and forks its rank server: with the variables that registration has pinned into it."""

from __future__ import annotations

import gc

import pytest

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.plugin.task import SafeTask
from flytekitplugins_safedist.ranks import forkserver_client, preload


def train() -> None:
    """Never runs."""


@pytest.mark.parametrize(("method", "early"), [("preload", True), ("spawn", False)])
def test_a_pod_imports_early_only_for_ranks_that_are_forked(monkeypatch, method, early):
    environment = SafeTask(SafeTorch(start_method=method), train).plan.variables()
    imported: list[str] = []

    def noting(libraries: list[str]) -> str:
        imported.extend(libraries)
        return "this test process is not forked"

    monkeypatch.setattr(preload, "import_libraries", noting)
    monkeypatch.setattr(preload, "unsafe_to_fork", lambda culprit: None)
    forkserver_client.fork_early(environment)
    assert ("torch" in imported) == early
    assert forkserver_client.EARLY.value is None


def test_what_is_imported_before_the_fork_is_kept_from_the_collector_whose_marks_would_copy_its_pages(monkeypatch):
    frozen: list[int] = []
    monkeypatch.setattr(preload, "import_libraries", lambda libraries: None)
    monkeypatch.setattr(preload, "unsafe_to_fork", lambda culprit: None)
    monkeypatch.setattr(forkserver_client.RankServer, "fork", lambda: frozen.append(gc.get_freeze_count()))
    environment = SafeTask(SafeTorch(), train).plan.variables()
    gc.unfreeze()
    try:
        forkserver_client.fork_early(environment)
    finally:
        gc.unfreeze()
    assert frozen[0] > 100_000
