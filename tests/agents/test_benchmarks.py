"""Benchmarks whose jobs are started pod by pod, as no other test does: their jobs do what is measured."""

from __future__ import annotations

import subprocess
import sys

from tests.harness.procs import ROOT

SAYS_BACK = """
import sys
sys.path[:0] = ["benchmarks", "."]
import restart
print(restart.run(restart.safedist("safe_torch")))
"""


def result_of(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], check=False, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_ranks_of_the_restart_benchmark_come_back():
    assert "Back(" in result_of("-c", SAYS_BACK)


def test_a_fault_of_the_soak_ends_as_the_soak_asks():
    assert "failed: []" in result_of("benchmarks/soak.py", "--seed", "7", "--only", "1")
