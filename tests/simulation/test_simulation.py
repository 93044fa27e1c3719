"""Random orders of faults in virtual time, some of each kind; ``python -m tests.simulation 200000`` plays many."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import play
from tests.simulation.faults import PROFILES
from tests.simulation.mutants import MUTANTS, PACKAGE, ROOT

ORDERS = {"any": 210, "relapse": 40}
"""Of each kind; 20 of those that are not named. So many show each mutant that is to be seen in orders of its kind."""


@pytest.mark.parametrize("profile", PROFILES)
def test_whatever_happens_the_job_keeps_its_promises(profile: str) -> None:
    _, broken = play(range(ORDERS.get(profile, 20)), profile)
    assert broken == []


def test_a_broken_rule_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from flytekitplugins_safedist.coordinator.rules import Rules

    monkeypatch.setattr(Rules, "patience", property(lambda rules: rules.grace))
    _, broken = play(range(60), "relapse", stops=True)
    assert broken


def test_each_rule_that_a_mutant_breaks_is_there() -> None:
    edits = [(name, file, before) for name in MUTANTS for file, before, _ in MUTANTS[name].edits]
    assert [each for each in edits if (ROOT / PACKAGE / each[1]).read_text().count(each[2]) != 1] == []
