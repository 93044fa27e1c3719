"""CI's last word: the sum of all tests, and no skip that goes unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import sum_tests

pytestmark = pytest.mark.processes

TESTS = """
import pytest

@pytest.fixture
def leaves_something():
    yield
    raise OSError("left behind")

def test_a(): ...
def test_b(): ...
def test_fails(): assert 0
def test_skips(): pytest.skip("no docker")
def test_whose_end_fails(leaves_something): ...
"""
SUMS = {
    ("test_a", "test_b"): (0, ["2 passed, 0 failed, 0 skipped"]),
    ("test_a", "test_skips"): (1, ["skipped: test_one::test_skips: no docker", "1 passed, 0 failed, 1 skipped"]),
    ("test_fails", "test_whose_end_fails"): (
        1,
        [
            "failed: test_one::test_fails: assert 0",
            'failed: test_one::test_whose_end_fails: failed on teardown with "OSError: left behind"',
            "0 passed, 2 failed, 0 skipped",
        ],
    ),
    (): (1, ["0 passed, 0 failed, 0 skipped"]),
}


def test_a_sum_is_good_where_something_has_passed_and_nothing_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of records that a real pytest has written."""
    (tmp_path / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    subprocess.run(
        [*command, "-c", "/dev/null", f"--junitxml={tmp_path}/all.xml", str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        check=False,
    )
    records = ET.parse(tmp_path / "all.xml").getroot().findall("testsuite/testcase")
    found = {}
    for names in SUMS:
        report = ET.Element("testsuite")
        report.extend(each for each in records if each.get("name") in names)
        ET.ElementTree(report).write(tmp_path / "some.xml")
        found[names] = (sum_tests.main([str(tmp_path / "some.xml")]), capsys.readouterr().out.splitlines())
    assert found == SUMS


def test_a_session_that_died_without_a_report_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sum_tests.main([str(tmp_path / "r.xml")]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"failed: {tmp_path}/r.xml: no report: ")
    assert last == "0 passed, 1 failed, 0 skipped"
