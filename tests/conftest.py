"""Fixtures and settings shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.procs import Gate, Warm, gate

# A loaded machine is slow, not wrong: no test of this project fails because of the time that an example took.
settings.register_profile("safedist", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("safedist")


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A process that has imported torch, Horovod and flytekit, and forks real jobs for tests."""
    process = Warm()
    yield process
    process.close()


@pytest.fixture
def ranks_gate(tmp_path: Path) -> Iterator[Gate]:
    """A FIFO by which ranks and the test wait for each other."""
    with gate(tmp_path / "gate") as made:
        yield made
