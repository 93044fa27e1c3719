"""A project to register, and a place to register it at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clis import PROJECT
from flyteadmin import Received, serving


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy without this repository above it, as users have it."""
    target = tmp_path / "project"
    for source in PROJECT.rglob("*.py"):
        copy = target / source.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    return target


@pytest.fixture
def admin() -> Iterator[tuple[str, Received]]:
    with serving() as running:
        yield running
