"""Which mutants are drawn, and how they are counted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "mutants.py"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_seed_draws_the_same_mutants_and_one_of_each_place(mutants: ModuleType) -> None:
    there = [[f"{place}a", f"{place}b"] for place in range(100)]
    once = mutants.drawn(there, 10, 3)
    assert len({name[:-1] for name in once}) == 10
    assert mutants.drawn(there, 10, 3) == once
    assert mutants.drawn(there, 10, 4) != once


def test_a_sample_larger_than_there_is_takes_each_place_once(mutants: ModuleType) -> None:
    assert sorted(mutants.drawn([["b"], ["a"]], 10, 1)) == ["a", "b"]


def test_what_no_test_noticed_counts_against_the_room(mutants: ModuleType) -> None:
    fates = ["noticed"] * 6 + ["late", "survived", "survived", "survived"]
    assert mutants.summary("fs", fates) == "fs: 70.0 % of 10 noticed (1 by the time limit)"


def test_every_room_and_its_tests_are_there(mutants: ModuleType) -> None:
    for room, tests in mutants.ROOMS.items():
        assert (mutants.ROOT / mutants.PACKAGE / room).is_dir(), room
        for test in tests:
            assert (mutants.ROOT / "tests" / test).exists(), test


def test_the_tests_that_are_named_as_the_changed_module_come_first_and_all_come_once(mutants: ModuleType) -> None:
    module = f"{mutants.PACKAGE}/ranks/rank_set.py"
    assert mutants.tests_of("ranks", module, mutants.ROOT) == ["unit/ranks/test_rank_set.py", *mutants.ROOMS["ranks"]]


def test_a_change_is_judged_by_the_copy_that_has_it(mutants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mutants.ROOMS, "topology", ["unit/topology/test_operators_words.py"])
    with mutants.copy() as where:
        assert mutants.tested("topology", where, sys.executable, 120, module=None)[0] == 0
        (where / mutants.PACKAGE / "topology" / "__init__.py").write_text("raise RuntimeError('changed')\n")
        assert mutants.tested("topology", where, sys.executable, 120, module=None)[0] not in (0, None)
