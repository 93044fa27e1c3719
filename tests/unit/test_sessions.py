"""How these tests are run: from an IDE too, and leaving nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.procs import ROOT

pytestmark = pytest.mark.processes


LEFT_OUT = """
import pytest
from tests.harness import needs

@pytest.mark.parametrize("number", range(3))
def test_of_a_machine(number):
    needs.missing("there is no tape drive", bring="apt-get install tape", required="NOBODY_REQUIRES_IT")

def test_that_passes(): ...
"""


def test_plain_pytest_finds_the_helpers_of_the_tests_leaves_nothing_and_tells_at_last_what_it_left_out(
    tmp_path: Path,
) -> None:
    """``pytest``, not ``python -m pytest``, which puts the working directory on the path."""
    pytest_alone = Path(sys.executable).with_name("pytest")
    chosen = "tests/unit/test_import.py::test_every_public_name_can_be_imported"  # imports flytekit
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_left_out.py").write_text(LEFT_OUT)
    command = [str(pytest_alone), "-q", "-p", "no:cacheprovider", chosen, str(tmp_path / "tests")]
    ours = ("PYTHONPATH", "PYTEST_DEBUG_TEMPROOT")
    environment = {name: value for name, value in os.environ.items() if name not in ours and "XDIST" not in name}
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "TMPDIR": str(temporary)}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("pytest-of-")] == []
    assert done.stdout.splitlines()[-2:-1] == [
        "3 tests left out: there is no tape drive. To run them: apt-get install tape"
    ], done.stdout
