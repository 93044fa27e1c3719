"""Which mutants are drawn, and how they are counted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "mutants.py"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_seed_draws_the_same_mutants_in_whatever_order_they_come(mutants: ModuleType) -> None:
    names = [f"m{number}" for number in range(100)]
    once = mutants.drawn(names, 10, 3)
    assert len(set(once)) == 10
    assert mutants.drawn(names[::-1], 10, 3) == once
    assert mutants.drawn(names, 10, 4) != once


def test_a_sample_larger_than_the_module_is_all_of_it(mutants: ModuleType) -> None:
    assert mutants.drawn(["b", "a"], 10, 1) == ["a", "b"]


def test_a_worker_that_died_is_no_mutant_that_was_noticed(mutants: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py.meta").write_text(json.dumps({"exit_code_by_key": {"a": 1, "b": 255, "c": None, "d": 36}}))
    assert mutants.died(tmp_path) == 1


def test_only_what_a_test_noticed_counts_as_noticed(mutants: ModuleType) -> None:
    states = ["killed"] * 6 + ["timeout", "survived", "no tests", "suspicious"]
    assert mutants.summary("fs", states) == (
        "fs: 70.0 % of 10 noticed (1 of them by the time limit); 1 survived, 1 reached by no test, 1 suspicious"
    )


def test_every_module_of_the_list_and_its_tests_are_there(mutants: ModuleType) -> None:
    for module, tests in mutants.MODULES.items():
        place = mutants.ROOT / mutants.PACKAGE / module
        assert place.is_dir() or place.with_suffix(".py").is_file(), module
        for test in tests:
            assert (mutants.ROOT / "tests" / "unit" / test).exists(), test
