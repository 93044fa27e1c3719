"""Every row of docs/failures.md's tables has a test that is tagged with it (:mod:`tests.harness.ends`)."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.agents.test_node_0_lost import OnePrefix
from tests.harness.ends import CODES, NODES, codes
from tests.harness.procs import KILL, ROOT, TERM, Gate

BUDGETS = ("`max_restarts`", "`max_replacements`", "Flyte", "none")


def tags(place: str) -> Iterator[tuple[str, str, bool]]:
    """Of tests there: row, code ("" for a row that has none), whether the end is imitated."""
    for file in sorted((ROOT / "tests" / place).glob("test_*.py")):
        for test in ast.walk(ast.parse(file.read_text())):
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                for call in (part for each in test.decorator_list for part in ast.walk(each)):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.end":
                        row, code = (*(ast.literal_eval(each) for each in call.args), "")[:2]
                        yield row, code, bool(call.keywords)


TAGS = [*tags("agents"), *tags("containers")]
REAL, IMITATED = (
    {(row, code) for row, code, is_imitated in TAGS if is_imitated is imitated} for imitated in (False, True)
)
PROMISED = {(row, code) for row in (*CODES, *NODES) for code in codes(row) or {""}}


def test_every_row_and_every_code_of_it_has_a_test_with_a_real_end_or_it_is_said_why_there_is_none():
    table = (ROOT / "tests" / "README.md").read_text().partition("## Ends that are imitated")[2]
    why = {
        (row, code)
        for row, listed in re.findall(r"^\| `([^`]*)` \| (.*?) \|", table, re.M)
        for code in listed.split("`")[1::2]
    }
    assert REAL | IMITATED == PROMISED
    assert why == IMITATED - REAL


def test_every_row_says_which_budget_it_takes():
    assert [row for row, cells in NODES.items() if not cells[2].startswith(BUDGETS)] == []


def test_a_node_that_leaves_while_its_job_goes_on_says_that(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch_not_replaced", "gate", ranks_gate.environment)
    stays, leaves = job.start(0), job.start(1)
    ranks_gate.heard(2)
    leaves.signal(TERM)
    ended = leaves.wait()
    with contextlib.suppress(ProcessLookupError):  # it gives up by itself after a while
        stays.signal(KILL)
    stays.wait()
    said = "this node leaves (told to stop by SIGTERM; every rank has been ended): the job goes on when its replacement"
    assert ended.code == 137
    last = ended.err.splitlines()[-1]
    stood = r"rank 1 was at procs\.py:\d+ in (say|wait_for_word)"  # it may still be coming back from what it has said
    assert re.fullmatch(rf"\[safedist\] {re.escape(said)} is there\. When it was told, {stood}", last)
    assert (ended.files / "termination-log").read_text() == last.removeprefix("[safedist] ") + "\n"
    assert "the job failed" not in ended.err
    assert "Flyte retries" not in ended.err


@pytest.mark.end(
    "nothing can be uploaded: the store is down, the container may have no further thread, or the pod is told to stop "
    "before the task is loaded"
)
def test_where_nothing_can_be_uploaded_the_pod_exits_with_another_status(warm, tmp_path):
    (tmp_path / "file").write_text("in the way")
    place = ("--output-prefix", str(tmp_path / "file" / "outputs"))
    environment = {"TEST_HOW": "raise"}
    ended = warm.run(
        "job_failing:one_fails", tmp_path / "job", kind="execute", environment=environment, arguments=place
    )
    assert ended.code == 137
    (promised,) = [cells[2] for row, cells in CODES.items() if row.startswith("nothing can be uploaded")]
    assert "the pod exits [137]" in promised
    assert "infrastructure failure, for Flyte to retry: FlyteUpload" in (ended.files / "termination-log").read_text()
