"""The helpers under the real ``torchrun``, whose run id is not a name of one run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.fs import torchrun_ranks
from tests.fs.ranks import launched

RUNS = int(os.environ.get("SAFEDIST_TEST_TORCHRUN_RUNS", "2"))
"""Launches in a row; 20 passed on 2026-11-22, and take two minutes of a machine."""
RANKS = 2
# The same for each run, as a port written into a script is; below the ports that the kernel hands out.
PORT = 20_000 + os.getpid() % 10_000


def _torchrun(place: Path, value: str) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    launcher = [torchrun, f"--nproc-per-node={RANKS}", f"--master-port={PORT}", "--rdzv-id=nightly3"]
    launched(Path(torchrun_ranks.__file__), launcher, place, value, SAFEDIST_FS_TIMEOUT="120")


@pytest.mark.timeout(3600)  # launches of torch, one after the other
def test_runs_of_one_name_take_no_answers_from_each_other(tmp_path):
    for run in range(RUNS):
        _torchrun(tmp_path, f"run{run}")
    for run in range(RUNS):
        said = [f"run{run}-{rank}" for rank in range(RANKS)]
        for rank in range(RANKS):
            assert (tmp_path / f"run{run}-{rank}").read_text() == f"run{run} {said}"
