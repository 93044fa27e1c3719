"""The example shows every race and its cure; by its exit status it says so itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_race_shows_and_is_cured():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fs_races.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exist_ok=True!" in done.stdout
    assert done.stdout.count("would for ever") == 3
    assert "NOT AS IT SHOULD BE" not in done.stdout
