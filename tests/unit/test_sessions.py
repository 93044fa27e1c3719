"""How these tests are run: from an IDE too, and leaving nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.procs import ROOT

pytestmark = pytest.mark.processes


def test_plain_pytest_finds_the_helpers_of_the_tests_and_a_session_leaves_nothing(tmp_path: Path) -> None:
    """``pytest``, not ``python -m pytest``, which puts the working directory on the path."""
    pytest_alone = Path(sys.executable).with_name("pytest")
    # That file imports flytekit in the test's own process, and starts another that does.
    command = [str(pytest_alone), "-q", "-p", "no:cacheprovider", "tests/unit/test_log.py", "tests/unit/test_import.py"]
    ours = ("PYTHONPATH", "PYTEST_DEBUG_TEMPROOT")
    environment = {name: value for name, value in os.environ.items() if name not in ours and "XDIST" not in name}

    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("pytest-of-")] == []
