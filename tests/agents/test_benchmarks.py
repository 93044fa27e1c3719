"""A benchmark whose jobs are started pod by pod, as no other test does: a fault ends as it asks."""

from __future__ import annotations

import subprocess
import sys

from tests.harness.procs import ROOT


def test_a_fault_of_the_soak_ends_as_the_soak_asks():
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--seed", "7", "--only", "1"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "failed: []" in done.stdout
