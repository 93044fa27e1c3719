"""Run the tests that judge a mutant, in their order, each within its time: scripts/mutants.py's plugin of pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flytekitplugins_safedist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not Path(flytekitplugins_safedist.__file__).is_relative_to(Path.cwd()):
        raise pytest.UsageError(f"{flytekitplugins_safedist.__file__} is not of the copy")
    seconds = json.loads(Path("judges.json").read_text())
    place = {test: number for number, test in enumerate(seconds)}
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(seconds[item.nodeid]))
