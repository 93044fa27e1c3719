"""Random orders of faults in virtual time; ``python -m tests.unit.job.simulation 20000`` plays more of them."""

from __future__ import annotations

import pytest

from tests.unit.job import simulation


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_whatever_happens_the_job_ends_within_its_budgets_and_with_one_verdict(first: int) -> None:
    for seed in range(first, first + 1000):
        simulation.play(seed)
