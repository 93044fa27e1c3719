"""The fuzz target's share of CI: a round from one seed, as this user and as nobody.

New seeds are for runs by hand: what they find must not stop whoever comes along with another change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.mark.parametrize("user", ["this user", "nobody"])
def test_ordinary_archives_are_read_as_by_tar_and_others_unpacked_or_refused(user):
    become = ["--uid", str(NOBODY)] if user == "nobody" and os.geteuid() == 0 else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.archive_fuzz", "--examples", "60", "--seed", "20261121", *become],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 examples" in done.stdout
