"""Which mutants are drawn, which tests judge them, and how they are counted."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.procs import until

SCRIPT = Path(__file__).parents[3] / "scripts" / "mutants.py"
SOURCE = """
import logging
SECONDS: float = max(3 - 1, 0)
LIMIT = 30
ROOM, LEAST = 4 << 20, 1
def pick(
    one: int | None,
    two=7,
) -> int | str:
    if one is None and (
        two > 4
    ):
        log.warning("few", two - 1)
        raise ValueError(f"{two + 1} is one more")
    return two * 2
"""


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
    fates = ["noticed"] * 6 + ["unseen", "survived", "survived", "survived"]
    assert mutants.summary("fs", fates) == "fs: 6 of 10 noticed (60.0 %)"


def test_nothing_is_drawn_that_no_test_should_see(mutants: ModuleType) -> None:
    drawn = {"3 - 1", "two > 4", "two * 2", "7", "one is None"}
    left = {"30", "4 << 20", "int | None", "int | str", "two - 1", "two + 1"}
    idle = [*mutants.does_nothing(ast.parse(SOURCE))]

    def is_idle(text: str) -> bool:
        before = SOURCE[: SOURCE.index(text)]
        place = (before.count("\n") + 1, len(before) - before.rfind("\n") - 1)
        return any(begin <= place < end for begin, end in idle)

    assert {text for text in drawn | left if is_idle(text)} == left


def test_a_statement_is_run_where_its_lines_are_and_not_where_its_body_is(mutants: ModuleType) -> None:
    lines = {3: [3], 10: [10, 11, 12], 11: [10, 11, 12], 15: [15]}
    assert {line: [*mutants.statement(ast.parse(SOURCE), line)] for line in lines} == lines


def test_the_cheap_tests_of_a_statement_judge_first_and_then_one_of_each_file(mutants: ModuleType) -> None:
    module = "room/module.py"
    named = "tests/unit/room/test_module_in_use.py::test_4"
    dear = [f"tests/agents/test_{file}.py::test_{number}" for file in "ab" for number in (1, 2)]
    cheap, other = "tests/unit/test_c.py::test_3", "tests/unit/test_c.py::test_of_another_line"
    seconds = {cheap: 9.0, named: 10.0, other: 1.0, **dict(zip(dear, (1.0, 2.0, 3.0, 4.0), strict=True))}
    everywhere = {cheap, *dear}
    known = mutants.Known(
        {module: {7: everywhere, 8: {"", dear[0]}, 9: {other}, 11: everywhere, 12: {dear[3]}}}, seconds
    )

    def judges(line: int) -> list[str]:
        judging: list[str] = known.judges(mutants.Mutant("room", module, "", 0, line, range(line, line + 1)))
        return judging

    assert judges(7) == [cheap, named, dear[0], dear[2], dear[1], dear[3]]
    assert judges(8)[:3] == [other, cheap, named], "runs at import: whoever runs the module"
    assert judges(10) == [named], "no test is known to run it"
    assert judges(11)[2] == dear[3], "the one that goes another way than most"


def test_a_change_is_judged_by_the_copy_that_has_it_and_nothing_of_it_goes_on(mutants: ModuleType) -> None:
    test = "tests/unit/store/test_storage_errors.py::test_what_does_not_pass_is_not_waited_for"
    known = mutants.Known({}, {test: 30.0})
    with mutants.copy() as where:
        assert mutants.tested([test], where, sys.executable, known)[0] == 0
        (where / mutants.PACKAGE / "__init__.py").write_text("raise RuntimeError('changed')\n")
        assert mutants.tested([test], where, sys.executable, known)[0] != 0
        left = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{where}:"})
        environment = Path(f"/proc/{left.pid}/environ")
        until(lambda: str(where).encode() in environment.read_bytes(), "it has its environment")
        mutants.end_all_of(where)
        assert left.wait(60) == -signal.SIGKILL
