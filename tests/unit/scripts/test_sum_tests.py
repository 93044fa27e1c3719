"""CI's last word: the sum of all tests, and no skip that goes unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[3] / "scripts" / "sum_tests.py"


def summed(tmp_path: Path, tests: str) -> tuple[int, list[str]]:
    """Run a real pytest over ``tests`` and sum its result up."""
    (tmp_path / "test_one.py").write_text(f"import pytest\n{tests}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    subprocess.run(
        [*command, "-c", "/dev/null", f"--junitxml={tmp_path}/r.xml", str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        check=False,
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "r.xml")], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


def test_all_passed(tmp_path: Path) -> None:
    assert summed(tmp_path, "def test_a(): pass\ndef test_b(): pass") == (0, ["2 passed, 0 failed, 0 skipped"])


def test_a_skip_fails_the_run_and_says_why(tmp_path: Path) -> None:
    status, lines = summed(tmp_path, "def test_a(): pass\ndef test_b(): pytest.skip('no docker')")
    assert status == 1
    assert lines[0].startswith("skipped: ")
    assert "no docker" in lines[0]
    assert lines[-1] == "1 passed, 0 failed, 1 skipped"


def test_a_failing_teardown_counts_once_as_failed(tmp_path: Path) -> None:
    fixture = "@pytest.fixture\ndef f():\n    yield\n    raise OSError('left behind')\n"
    tests = f"{fixture}def test_a(f): pass\ndef test_b(): assert 0"
    status, lines = summed(tmp_path, tests)
    assert status == 1
    assert lines[-1] == "0 passed, 2 failed, 0 skipped"


def test_nothing_run_is_not_success(tmp_path: Path) -> None:
    assert summed(tmp_path, "") == (1, ["0 passed, 0 failed, 0 skipped"])


def test_a_session_that_died_without_a_report_is_a_failure(tmp_path: Path) -> None:
    status, lines = summed(tmp_path, "import os\ndef test_a(): os._exit(0)")
    assert status == 1
    assert lines[0].startswith("failed: ")
    assert "no report" in lines[0]
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"
